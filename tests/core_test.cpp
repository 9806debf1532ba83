// How the portable core runs plans: same bits whatever the threads, neighbours and hosts, workspaces, the caller's
// floating-point state. Results themselves are kernel_test's business, what plans decide plan_test's and schedule_test's.
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cctype>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <set>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#if MH_WITH_TBB
#include <tbb/global_control.h>
#include <tbb/task_arena.h>
#endif

#include "core_test.hpp"
#include "crew.hpp"
#include "error.hpp"
#include "exec_of.hpp"
#include "host_fp_state.hpp"
#include "machine.hpp"
#include "plan.hpp"
#include "pool.hpp"
#include "profile.hpp"
#include "registry.hpp"
#include "schedule.hpp"
#include "scheduler.hpp"
#include "test_case.hpp"

// --- counting allocations --------------------------------------------------------------------------------------------
// The C library's functions are replaced, so that nothing escapes; sanitizers replace them themselves, then nothing is counted.
#if defined(__GLIBC__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define MH_COUNTS_ALLOCATIONS 1
static std::atomic<int64_t> allocations{0};
extern "C" {
void* __libc_malloc(size_t);
void* __libc_calloc(size_t, size_t);
void* __libc_realloc(void*, size_t);
void* __libc_memalign(size_t, size_t);
void* malloc(size_t size) { return ++allocations, __libc_malloc(size); }
void* calloc(size_t n, size_t size) { return ++allocations, __libc_calloc(n, size); }
void* realloc(void* p, size_t size) { return ++allocations, __libc_realloc(p, size); }
void* aligned_alloc(size_t alignment, size_t size) { return ++allocations, __libc_memalign(alignment, size); }
int posix_memalign(void** p, size_t alignment, size_t size) {
  ++allocations;
  *p = __libc_memalign(alignment, size);
  return *p == nullptr ? ENOMEM : 0;
}
}
#else
#define MH_COUNTS_ALLOCATIONS 0
static std::atomic<int64_t> allocations{0};
#endif

namespace manyhead::test {
namespace {

// The bytes of all outputs, canaries included. Not std::string, whose contents doctest would print.
struct output_bits {
  std::string bytes;
  bool operator==(const output_bits&) const = default;
};

output_bits run_bits(test_case& c, const plan& plan, const mh_exec& exec) {
  c.clear_outputs();
  run(plan, c.t, exec);
  return {c.output_bytes()};
}

// Enough work for several threads each; every phase of a run occurs (split keys, merging, second pass, column sums).
const char* const busy_lines[] = {
    "f32 b2 h4/2 q130 kv200 d24 causal align=br lse weights meanw colsums",
    "f32 b1 h8/2 q1 kv5000 d64 lse",
    "f32 b1 h4/2 q2 kv3000 d40 mask lse weights colsums",
    "f32 b3 h2/1 q50 kv700 d16 lens lse weights",
    "f32 b2 h6/2 q90 kv90 d40 mask bias alibi softcap=20 sinks lse meanw colsums scores=biased",
    "f32 b1 h4 q224 kv224 d64 causal data=poison lse",
    "f32 b2 h2 q150 kv400 d33 v17 strides=odd keymask window=100,50 align=br lse",
    "f64 b1 h4/2 q100 kv300 d16 causal align=tl lse weights",
    "bf16 b2 h8/2 q40 kv200 d64 bshd causal align=br lse colsums",
    "bf16 b2 h8/2 q40 kv200 d64 bshd causal align=br lse",
    "f32 b1 h4 q160 kv256 d64 mask lse",
    "f32 b1 h4 q161 kv200 d64 lse",
    "f16 b1 h8/1 q1 kv3000 d128 lse",
    "bf16 b2 h8/2 q3 kv3000 d64 bshd causal align=br lse",
    // Tiles that no row of a panel sees, between a window and the extra keys.
    "f32 b1 h8/4 q200 kv700 d32 extra=1 window=5,5 align=tl weights",
    "bf16 b1 h8/4 q200 kv700 d32 extra=1 window=5,5 align=tl weights",
    // More scores than are kept of all rows.
    "f32 b1 h10/2 q220 kv500 d16 causal align=br lse meanw",
    "f32 b1 h75/25 q100 kv128 d8 meanw",
    "f64 b2 h71/1 q30 kv300 d16 meanw colsums",
    "bf16 b2 h71/1 q30 kv300 d32 data=poison mask meanw",
    "f32 b1 h10/2 q220 kv500 d16 causal align=br weights meanw colsums",
    "bf16 b1 h8 q301 kv500 d64 weights",
};

// --- instruction sets ------------------------------------------------------------------------------------------------

// Of tables whose kernels this CPU may lack: they are looked at, not called.
TEST_CASE("an ISA with a matrix unit has the unit's kernels over those of another") {
  const char* setting = std::getenv("MH_F32_UNIT");  // as tests/meson.build has it
  const bool f32 = this_machine().f32_on_unit;
  if (setting != nullptr && *setting != 0) CHECK(f32 == (setting == std::string("1")));
  std::map<std::string, kernel_table> by_name;
  for (int32_t i = 0; i < isa_count(); ++i) by_name[isa_table(i)->isa] = *isa_table(i);
  const auto check = [&](const std::string& isa, const std::string& under, std::vector<int32_t> of_unit) {
    if (!by_name.contains(isa)) return;
    INFO(isa);
    REQUIRE(by_name.contains(under));
    const kernel_table &t = by_name[isa], &base = by_name[under];
    CHECK((t.lanes == base.lanes && t.read == base.read));
    for (int32_t i = 0; i < dtype_count; ++i) {
      const dtype_kernels &own = t.dtype[i], &other = base.dtype[i];
      const bool on_unit = std::find(of_unit.begin(), of_unit.end(), i) != of_unit.end() && (f32 || i != MH_DTYPE_F32);
      CAPTURE(i);
      CHECK((own.attention[route_tile] != nullptr && own.attention[route_tile] == other.attention[route_tile]));
      CHECK((own.attention[route_decode] != nullptr));
      CHECK(((own.attention[route_decode] != other.attention[route_decode]) == (own.unit_steps != other.unit_steps)));
      CHECK((own.weights == other.weights && own.merge == other.merge && own.merge_real == other.merge_real));
      CHECK((own.linear != nullptr && own.linear == other.linear && own.widen == other.widen));
      CHECK(((own.widen != nullptr) == (i == MH_DTYPE_BF16 || i == MH_DTYPE_F16)));
      CHECK(((own.linear_unit.run != other.linear_unit.run) == on_unit));
      CHECK(((own.attention[route_matrix] != other.attention[route_matrix]) == on_unit));
      CHECK(((own.attention[route_matrix] != nullptr) == (own.scratch_bytes[route_matrix] != nullptr)));
      CHECK(((own.attention[route_matrix] != nullptr) == (own.matrix_rows > 0 && own.matrix_keys > 0)));
      CHECK(((own.arithmetic != other.arithmetic) == (on_unit && i != MH_DTYPE_F32)));
      CHECK(own.flops_of_turn > 0);
    }
  };
  check("amx_fp16", "amx", {MH_DTYPE_F16});
  check("amx", "avx512", {MH_DTYPE_F32, MH_DTYPE_BF16, MH_DTYPE_F16});
  check("avx512_bf16", "avx512", {MH_DTYPE_BF16});
  check("neon_bf16", "neon", {MH_DTYPE_BF16});
}

static_assert(unit_pays_for_f32(1) && unit_pays_for_f32(15) && !unit_pays_for_f32(16) && !unit_pays_for_f32(256));

TEST_CASE("the ISA of new plans can be forced") {
  REQUIRE(isa_count() > 0);
  CHECK(isa_table(-1) == nullptr);
  CHECK(isa_table(isa_count()) == nullptr);
  const std::string automatic = current_isa().isa;
  int32_t best = 0;  // rows stand best first
  while (!isa_supported(best)) ++best;
  if (this_machine().isa_request.empty()) CHECK(automatic == isa_table(best)->isa);
  for (int32_t i = 0; i < isa_count(); ++i) {
    const char* name = isa_table(i)->isa;
    INFO(std::string(name));
    if (isa_supported(i)) {
      set_isa(name);
      CHECK(std::string(current_isa().isa) == name);
      CHECK(describe(plan_of("f32 b1 h1 q9 kv9 d8"), false).find(std::string("@") + name) != std::string::npos);
    } else {
      const std::string before = current_isa().isa;
      try {
        set_isa(name);
        FAIL("an ISA that the CPU lacks was accepted");
      } catch (const error& e) {
        CHECK(e.status() == MH_UNSUPPORTED);
      }
      CHECK(before == current_isa().isa);
    }
  }
  try {
    set_isa("mmx");
    FAIL("an unknown ISA was accepted");
  } catch (const error& e) {
    CHECK(e.status() == MH_INVALID_ARGUMENT);
    CHECK(std::string(e.what()).find("mmx") != std::string::npos);
  }
  // set_isa("") means automatic even where MH_ISA asked for another one; give that back.
  set_isa(this_machine().isa_request.empty() ? nullptr : automatic.c_str());
  CHECK(automatic == current_isa().isa);
}

// --- threads ---------------------------------------------------------------------------------------------------------

using hook_body = std::function<void(int64_t n, const std::function<void(int64_t)>& call)>;

void hook(void* ctx, int64_t n, mh_task_fn fn, void* arg) {
  (*static_cast<hook_body*>(ctx))(n, [=](int64_t i) { fn(arg, i); });
}

mh_exec exec_with(hook_body& body, int32_t threads) {
  mh_exec exec = exec_of(threads);
  exec.parallel_for = hook;
  exec.parallel_ctx = &body;
  return exec;
}

void on_threads(int64_t n, const std::function<void(int64_t)>& call) {
  std::vector<std::thread> pool;
  for (int64_t i = 0; i < n; ++i) pool.emplace_back(call, i);
  for (std::thread& thread : pool) thread.join();
}

TEST_CASE("the bits do not depend on the threads") {
  for (const kernel_table* table : tables()) {
    for (const char* text : busy_lines) {
      test_case c(parse_problem(text));
      const plan plan = make_plan(c.p, *table, l2);
      INFO(std::string(text));
      INFO(std::string(table->isa));
      REQUIRE(thread_count(plan, 7) > 1);
      const output_bits serial = run_bits(c, plan, exec_of(1));
      for (const int32_t threads : {0, 2, 3, 7}) CHECK(serial == run_bits(c, plan, exec_of(threads)));

      int64_t most = 0;
      hook_body in_order = [&](int64_t n, const auto& call) {
        most = std::max(most, n);
        for (int64_t i = 0; i < n; ++i) call(i);
      };
      hook_body reversed = [&](int64_t n, const auto& call) {
        for (int64_t i = n - 1; i >= 0; --i) call(i);
      };
      hook_body pool = on_threads;
      for (const int32_t threads : {2, 3, 7}) {
        most = 0;
        CHECK(serial == run_bits(c, plan, exec_with(in_order, threads)));
        CHECK((most > 1 && most <= threads));
        CHECK(serial == run_bits(c, plan, exec_with(reversed, threads)));
        CHECK(serial == run_bits(c, plan, exec_with(pool, threads)));
      }
      CHECK(c.damage() == "");
    }
  }
}

TEST_CASE("one thread means the calling thread, without the hook") {
  test_case c(parse_problem(busy_lines[0]));
  const plan plan = make_plan(c.p, current_isa(), l2);
  int calls = 0;
  hook_body count = [&](int64_t n, const auto& call) {
    ++calls;
    for (int64_t i = 0; i < n; ++i) call(i);
  };
  run(plan, c.t, exec_with(count, 1));
  CHECK(calls == 0);
  run(plan, c.t, exec_with(count, 2));
  CHECK(calls > 0);
}

TEST_CASE("the process-wide cap holds") {
  const plan plan = plan_of(busy_lines[0]);
  const int32_t before = max_threads();
  set_max_threads(1);
  CHECK(max_threads() == 1);
  CHECK(thread_count(plan, 0) == 1);
  set_max_threads(3);
  CHECK(thread_count(plan, 0) == 3);
  CHECK(thread_count(plan, 2) == 2);
  CHECK(allowed_threads(0) == 3);
  CHECK(allowed_threads(2) == 2);
  CHECK(allowed_threads(7) == 3);
  set_max_threads(0);
  CHECK(allowed_threads(before + 7) == before + 7);
  CHECK(max_threads() == before);
  CHECK(thread_count(plan_of("f32 b1 h8 q10 kv10 d64"), 7) == 1);  // waking threads would take longer than the work
}

TEST_CASE("a result has the bits that it has without weights") {
  for (const kernel_table* table : tables()) {
    for (const char* text : busy_lines) {
      test_case c(parse_problem(text));
      INFO(std::string(text));
      INFO(std::string(table->isa));
      problem alone = c.p;
      alone.outputs &= MH_OUTPUT_LSE;
      mh_tensors tensors = c.t;
      tensors.weights = tensors.mean_weights = tensors.column_sums = tensors.scores = nullptr;
      const auto results = [&](const problem& p, const mh_tensors& t) {
        c.clear_outputs();
        run(make_plan(p, *table, l2), t, exec_of(1));
        return output_bits{std::string(c.out.memory.bytes())};
      };
      // Scores are natural ones then, so that scaling them rounds otherwise.
      if (!c.p.has_output(MH_OUTPUT_SCORES)) CHECK(results(c.p, c.t) == results(alone, tensors));
    }
  }
}

TEST_CASE("a request has the same bits alone and in a batch") {
  for (const kernel_table* table : tables()) {
    for (const char* text :
         {"f32 b5 h4/2 q70 kv300 d40 lens align=br causal lse weights", "f32 b5 h8/2 q1 kv1500 d64 lens align=br lse",
          "f32 b5 h4/2 q3 kv700 d17 lens offsets causal window=300,0 mask bias sinks alibi softcap=9 lse weights meanw "
          "colsums scores=biased",
          "bf16 b5 h4/2 q50 kv700 d64 lens data=masked lse", "bf16 b5 h8/2 q2 kv700 d64 lens align=br causal lse",
          "f64 b5 h4/2 q50 kv200 d24 lens keymask lse colsums", "f32 b5 h1 q3 kv300 d40 mask bias lse",
          "f32 b5 h4/2 q1 kv1500 d64 causal align=br lse", "f32 b6 h4/2 q145 kv350 d16 lens meanw colsums"}) {
      test_case all(parse_problem(text)), alone(parse_problem(text));
      INFO(std::string(text));
      INFO(std::string(table->isa));
      run(make_plan(all.p, *table, l2), all.t, exec_of(0));
      alone.p.batch = 1;
      for (int64_t b = 0; b < all.p.batch; ++b) {
        const auto from = [&](const tensor& x, auto& pointer) {
          if (x.base != nullptr)
            pointer = reinterpret_cast<std::remove_reference_t<decltype(pointer)>>(x.place({b, 0, 0, 0}));
        };
        from(all.q, alone.t.q);
        from(all.k, alone.t.k);
        from(all.v, alone.t.v);
        from(all.mask, alone.t.mask);
        from(all.bias, alone.t.bias);
        from(all.key_mask, alone.t.key_mask);
        alone.t.seqused_k = all.lens.base == nullptr ? nullptr : all.lens.place({0, b, 0, 0});
        alone.t.q_offset = all.offsets.base == nullptr ? nullptr : all.offsets.place({0, b, 0, 0});
        run(make_plan(alone.p, *table, l2), alone.t, exec_of(0));
        bool same = true;
        for (size_t i = 0; i < all.outputs().size(); ++i) {
          const tensor& x = *all.outputs()[i];
          const tensor& y = *alone.outputs()[i];
          if (x.base == nullptr) continue;
          x.each([&](const index4& at) {
            if (at[0] == b)
              same = same && std::memcmp(x.place(at), y.place({0, at[1], at[2], at[3]}), tensor::size_of(x.type)) == 0;
          });
        }
        CHECK(same);
      }
    }
  }
}

// Softmax does not change where all scores of a row grow by the same. In f32 -1e4 takes 1e-3 of a score, -1e9 all.
TEST_CASE("a bias that all keys of a row have counts in the lse alone") {
  for (const kernel_table* table : tables()) {
    for (const char* text :
         {"f32 b1 h2 q1 kv90 d64 bias lse", "f32 b1 h4/2 q2 kv2100 d40 bias lse",
          "f32 b1 h2 q9 kv130 d64 softcap=4 bias lse", "f32 b1 h2 q40 kv130 d64 bias lse",
          "f32 b1 h4/2 q90 kv300 d32 causal align=br mask bias=bf16 lse weights", "bf16 b1 h4/2 q2 kv300 d64 bias lse",
          "bf16 b1 h2 q90 kv300 d64 bias lse weights", "f16 b1 h2 q70 kv300 d64 bias lse"}) {
      for (const double c : {-1e4, -1e9, 3e5}) {
        INFO(std::string(text));
        INFO(std::string(table->isa));
        INFO(c);
        test_case far(parse_problem(text)), usual(parse_problem(text));
        far.bias.each([&](const index4& at) { far.bias.set(at, at[2] % 2 == 0 ? c : 0); });
        usual.bias.each([&](const index4& at) { usual.bias.set(at, 0); });
        const double shift = far.bias.get({0, 0, 0, 0});  // c as its type has it
        const plan plan = make_plan(far.p, *table, l2);
        run(plan, far.t, exec_of(0));
        run(plan, usual.t, exec_of(0));
        const double rounding =
            std::map<int32_t, double>{{MH_DTYPE_F32, 2e-5}, {MH_DTYPE_F16, 2e-3}, {MH_DTYPE_BF16, 1.6e-2}}.at(
                far.p.dtype);
        double error = 0;
        bool same = true;
        const auto compare = [&](const tensor& x, const tensor& y, double added, double of) {
          if (x.base == nullptr) return;
          x.each([&](const index4& at) {
            const double want = y.get(at);
            if (at[2] % 2 == 0 && std::isfinite(want)) {
              error = std::max(error, std::fabs(x.get(at) - added - want) / (of + std::fabs(added) * 1e-7));
            } else {
              same = same && std::memcmp(x.place(at), y.place(at), tensor::size_of(x.type)) == 0;
            }
          });
        };
        compare(far.out, usual.out, 0, rounding);
        compare(far.lse, usual.lse, shift, rounding);
        compare(far.weights, usual.weights, 0, rounding);
        CHECK(error < 1);
        CHECK(same);
      }
    }
  }
}

TEST_CASE("keys that are not in use are not looked at") {
  constexpr int64_t used = 13;
  for (const kernel_table* table : tables()) {
    for (const char* text :
         {"f32 b1 h1 q5 kv90 d8 lens lse weights meanw colsums scores=biased", "f32 b1 h1 q40 kv90 d8 lens",
          "bf16 b1 h1 q5 kv90 d16 lens scores=biased", "bf16 b1 h1 q60 kv90 d16 lens weights"}) {
      INFO(std::string(text));
      INFO(std::string(table->isa));
      test_case c(parse_problem(text));
      c.lens.set({0, 0, 0, 0}, used);
      const size_t bytes = static_cast<size_t>(used * c.p.head_dim) * tensor::size_of(c.k.type);
      guarded_memory k(bytes, true, 0), v(bytes, true, 0);
      c.t.k = k.data;
      c.t.v = v.data;
      run(make_plan(c.p, *table, l2), c.t, exec_of(1));
      if (c.scores.base != nullptr) CHECK(c.scores.get({0, 0, 4, used - 1}) == 0);
      if (c.scores.base != nullptr) CHECK(c.scores.get({0, 0, 4, used}) == -std::numeric_limits<double>::infinity());
    }
  }
}

TEST_CASE("one plan serves several callers at once") {
  for (const char* text : busy_lines) {
    INFO(std::string(text));
    const problem_line line = parse_problem(text);
    test_case first(line);
    const plan plan = make_plan(first.p, current_isa(), l2);
    const output_bits want = run_bits(first, plan, exec_of(1));
    std::atomic<int> wrong{0};
    on_threads(4, [&](int64_t caller) {
      test_case c(line);  // same line, same data
      for (int i = 0; i < 3; ++i) wrong += run_bits(c, plan, exec_of(static_cast<int32_t>(caller))) != want;
    });
    CHECK(wrong == 0);
  }
}

// parallel_for calls each index once, and no worker twice at a time.
void check_parallel_for(int64_t n, const mh_exec& exec, bool shares) {
  struct calls {
    std::vector<std::atomic<int>> of_item, of_worker;
    std::atomic<int> shared{0};
  };
  calls all{std::vector<std::atomic<int>>(static_cast<size_t>(n)),
            std::vector<std::atomic<int>>(static_cast<size_t>(usable_threads(exec)))};
  parallel_for(
      n, usable_threads(exec), exec, watched_call(), phase_project,
      [](void* arg, int64_t item, int64_t worker) {
        calls& c = *static_cast<calls*>(arg);
        ++c.of_item[static_cast<size_t>(item)];
        if (++c.of_worker.at(static_cast<size_t>(worker)) != 1) ++c.shared;
        --c.of_worker[static_cast<size_t>(worker)];
      },
      &all, shares);
  CHECK(std::ranges::all_of(all.of_item, [](const std::atomic<int>& times) { return times == 1; }));
  CHECK(all.shared == 0);
}

TEST_CASE("a host's parallel_for that drops tasks") {
  test_case c(parse_problem("f32 b2 h4/2 q90 kv100 d24 lse"));
  const plan plan = make_plan(c.p, *tables().back(), l2);
  const output_bits serial = run_bits(c, plan, exec_of(1));
  hook_body last = [](int64_t n, const auto& call) { call(n - 1); }, none = [](int64_t, const auto&) {};
  CHECK(serial == run_bits(c, plan, exec_with(last, 4)));
  CHECK_THROWS_WITH_AS(run_bits(c, plan, exec_with(none, 4)),
                       "exec.parallel_for called none of 4 tasks, must call each of them once", error);
}

TEST_CASE("parallel_for calls each index once, and no worker twice at a time") {
  for (const int64_t n : {0, 1, 2, 1000})
    for (const bool shares : {false, true}) check_parallel_for(n, exec_of(3), shares);
}

TEST_CASE("a crew: calls with the members that are there, none twice") {
  struct calls {
    std::array<std::atomic<int>, 5> of_member{};
    int64_t told = 0;                  // written by the caller before a call, read by members
    std::array<int64_t, 5> answers{};  // the other way round
    std::atomic<int> others{0};
    std::atomic<bool> begun{false};
    int awaited = 0;  // the caller stays until so many came
  } all;
  const auto answer = [](void* arg, int64_t i) {
    calls& c = *static_cast<calls*>(arg);
    ++c.of_member.at(static_cast<size_t>(i));
    if (i > 0) ++c.others;
    c.answers.at(static_cast<size_t>(i)) = c.told;
    if (i == 0) c.begun = true;
    const auto late = std::chrono::steady_clock::now() + std::chrono::seconds(10);
    while (c.others < c.awaited && std::chrono::steady_clock::now() < late) std::this_thread::yield();
  };
  crew crew(4);
  CHECK(crew.is_deserted());
  all.told = 1;
  crew.call(5, answer, &all);  // alone
  CHECK(all.of_member[0] == 1);
  CHECK(all.others == 0);

  for (int shift = 0; shift < 10; ++shift) {
    CHECK(crew.send_for(5) == 4);
    CHECK(crew.send_for(5) == 0);  // they are on their way
    std::vector<std::thread> members;
    all.begun = false;
    for (int i = 0; i < 4; ++i) {
      members.emplace_back([&] {
        while (!all.begun) std::this_thread::yield();
        crew.serve();
      });
    }
    for (std::atomic<int>& times : all.of_member) times = 0;
    all.others = 0;
    all.awaited = 4;
    ++all.told;
    crew.call(5, answer, &all);
    CHECK(std::ranges::all_of(all.of_member, [](const std::atomic<int>& times) { return times == 1; }));
    CHECK(std::ranges::all_of(all.answers, [&](int64_t told) { return told == all.told; }));
    all.awaited = 0;
    for (int64_t k = 0; !crew.is_deserted(); ++k) {
      const auto n = 2 + k % 4;
      for (std::atomic<int>& times : all.of_member) times = 0;
      all.answers = {};
      ++all.told;
      crew.call(n, answer, &all);
      CHECK(all.of_member[0] == 1);
      for (size_t i = 1; i < 5; ++i) {
        CHECK(all.of_member.at(i) <= (static_cast<int64_t>(i) < n ? 1 : 0));
        CHECK(all.answers.at(i) == (all.of_member.at(i) > 0 ? all.told : 0));
      }
      if (k > 1000) crew.dismiss();
    }
    for (std::thread& member : members) member.join();
    CHECK(crew.is_deserted());
    crew.engage();
  }

  // Who is not called leaves by itself; who is dismissed does not even begin.
  CHECK(crew.send_for(2) == 1);
  crew.serve();
  CHECK(crew.is_deserted());
  crew.dismiss();
  CHECK(crew.send_for(5) == 4);
  for (int i = 0; i < 4; ++i) crew.serve();
  CHECK(crew.is_deserted());
}

#if MH_WITH_TBB
// Spreads `threads` calls that wait for each other, and so come from as many threads; the numbers of these.
std::set<int64_t> numbers_of_meeting(int threads) {
  struct meeting {
    const mh_exec exec;
    const int expected;
    std::vector<std::atomic<int64_t>> number = std::vector<std::atomic<int64_t>>(static_cast<size_t>(expected));
    std::atomic<int> here{0}, gate{0};  // the gate orders this and the calls, as in scheduler.cpp
    std::atomic<bool> missed{false};    // a call left before all were here: its thread may come once more
  };
  for (int attempts = 1;; ++attempts) {
    meeting all{exec_of(threads), threads};
    all.gate.store(0, std::memory_order_release);
    spread(
        threads, all.exec,
        [](void* arg, int64_t call) {
          meeting& m = *static_cast<meeting*>(arg);
          (void)m.gate.load(std::memory_order_acquire);
          m.number[static_cast<size_t>(call)] = thread_number(call, m.expected, m.exec);
          const auto late = std::chrono::steady_clock::now() + std::chrono::milliseconds(200);
          for (++m.here; m.here < m.expected && std::chrono::steady_clock::now() < late;) std::this_thread::yield();
          if (m.here < m.expected) m.missed = true;
          m.gate.fetch_add(0);
        },
        &all);
    (void)all.gate.load(std::memory_order_acquire);
    const bool met = all.here == threads && !all.missed;
    if (!met && attempts < 50) continue;  // whose threads did not come in time are left out
    REQUIRE(met);
    return {all.number.begin(), all.number.end()};
  }
}

std::set<int64_t> numbers_up_to(int64_t n) {
  std::set<int64_t> all;
  for (int64_t i = 0; i < n; ++i) all.insert(i);
  return all;
}

void check_same_bits_on(int threads) {
  for (const char* text : {"f32 b2 h8 q1 kv700 d64", "f32 b2 h5 q40 kv40 d64", "f32 b1 h5 q60 kv60 d16 causal"}) {
    test_case c(parse_problem(text));
    const plan plan = make_plan(c.p, current_isa(), l2);
    const output_bits serial = run_bits(c, plan, exec_of(1));
    for (int i = 0; i < 20; ++i) CHECK(serial == run_bits(c, plan, exec_of(threads)));
  }
}

TEST_CASE("with more threads of oneTBB than there may be CPUs") {
  const tbb::global_control many(tbb::global_control::max_allowed_parallelism, 5);
  tbb::task_arena arena(5);
  arena.execute([] {
    CHECK(numbers_of_meeting(5) == numbers_up_to(5));
    for (int i = 0; i < 40; ++i) {
      numbers_of_meeting(5);  // calls are laid before their threads where these came to those before
      check_parallel_for(i % 3 == 0 ? 5 : 100, exec_of(5), i % 2 == 0);
    }
    check_same_bits_on(5);
  });
}

TEST_CASE("calls that follow each other closely, of one thread and of several") {
  const auto many = [] {
    for (int i = 0; i < 500; ++i) check_parallel_for(2 + i % 30, exec_of(i % 50 == 0 ? 1 : 2), i % 2 == 0);
  };
  many();
  std::vector<std::thread> callers;
  for (int i = 0; i < 3; ++i) callers.emplace_back(many);
  for (std::thread& caller : callers) caller.join();
  check_same_bits_on(2);
}

TEST_CASE("a host that lets oneTBB have one thread") {
  const auto all_is_done = [] {
    for (int i = 0; i < 100; ++i) check_parallel_for(2 + i, exec_of(2), i % 2 == 0);
    check_same_bits_on(2);
  };
  all_is_done();  // threads may stand by
  const tbb::global_control one(tbb::global_control::max_allowed_parallelism, 1);
  all_is_done();
  std::thread(all_is_done).join();
}

TEST_CASE("fewer threads than oneTBB has are numbered too") {
  const int all = tbb::this_task_arena::max_concurrency();
  for (const int threads : {all - 1, (all + 1) / 2}) {
    if (threads < 2) continue;
    CAPTURE(threads);
    for (int i = 0; i < 20; ++i) {
      CHECK(numbers_of_meeting(threads) == numbers_up_to(threads));
      check_parallel_for(i % 3 == 0 ? threads : 100, exec_of(threads), i % 2 == 0);
    }
    check_same_bits_on(threads);
  }
}
#endif

// --- memory ----------------------------------------------------------------------------------------------------------

TEST_CASE("with the caller's workspace nothing is allocated") {
  // But once in a thread's life, for what it gives back to a profile when it ends.
  begin_profile({sizeof(mh_profile_options), 0, 0, 0, 0});
  test_case first(parse_problem(busy_lines[0]));
  run(make_plan(first.p, current_isa(), l2), first.t, exec_of(1));
  end_profile();
  for (const char* text : busy_lines) {
    INFO(std::string(text));
    test_case c(parse_problem(text));
    const plan plan = make_plan(c.p, current_isa(), l2);
    const output_bits want = run_bits(c, plan, exec_of(1));
    hook_body in_order = [](int64_t n, const auto& call) {
      for (int64_t i = 0; i < n; ++i) call(i);
    };
    for (const int32_t threads : {1, 2, 3}) {
      const auto size = static_cast<size_t>(workspace_bytes(plan, threads));
      REQUIRE(size > 0);
      CHECK(size % 64 == 0);
      // What the workspace holds before does not matter, and nothing beyond it is touched.
      guarded_memory memory(size, true, poison_byte);
      mh_exec exec = exec_with(in_order, threads);
      exec.workspace = memory.data;
      exec.workspace_size = size;
      for (const bool profiled : {false, true}) {
        CAPTURE(profiled);
        if (profiled) begin_profile({sizeof(mh_profile_options), 0, 0, 0, 0});
        c.clear_outputs();
        const int64_t before = allocations;
        run(plan, c.t, exec);
        const int64_t after = allocations;
        if (profiled) end_profile();
        CHECK(after == before);
        CHECK(output_bits{c.output_bytes()} == want);
      }

      c.clear_outputs();
      const output_bits untouched{c.output_bytes()};
      exec.workspace_size = size - 1;
      try {
        run(plan, c.t, exec);
        FAIL("a workspace that is too small was accepted");
      } catch (const error& e) {
        CHECK(e.status() == MH_INVALID_ARGUMENT);
        CHECK(std::string(e.what()).find(std::to_string(size)) != std::string::npos);
      }
      CHECK(output_bits{c.output_bytes()} == untouched);
    }
  }
}

#if MH_COUNTS_ALLOCATIONS
TEST_CASE("the count of allocations counts") {
  const int64_t before = allocations;
  void* volatile kept = std::malloc(10);  // volatile: or the compiler leaves out both calls
  std::free(kept);
  int* volatile number = new int;
  delete number;
  CHECK(allocations == before + 2);
}
#endif

// --- floating-point state --------------------------------------------------------------------------------------------

TEST_CASE("the floating-point state of a host's threads stays theirs, and does not matter") {
  const uint64_t own = fp_state();
  for (const char* text : {"f32 b2 h4/2 q130 kv300 d64 causal align=br lse weights meanw colsums",
                           "f32 b1 h8/2 q1 kv5000 d64 data=denormal lse"}) {
    INFO(std::string(text));
    test_case c(parse_problem(text));
    const plan plan = make_plan(c.p, current_isa(), l2);
    const output_bits want = run_bits(c, plan, exec_of(1));
    for (const uint64_t state : fp_states) {
      std::atomic<int> changed{0};
      hook_body pool = [&](int64_t n, const auto& call) {
        on_threads(n, [&](int64_t i) {
          set_fp_state(state);
          call(i);
          changed += fp_state() != state;
          set_fp_state(own);
        });
      };
      CHECK(run_bits(c, plan, exec_with(pool, 3)) == want);
      CHECK(changed == 0);
    }
  }
}

// --- the reference itself --------------------------------------------------------------------------------------------

TEST_CASE("16-bit floats") {
  const struct {
    double value;
    int f16, bf16;
  } known[] = {{0, 0, 0},
               {1, 0x3c00, 0x3f80},
               {-2, 0xc000, 0xc000},
               {1.5, 0x3e00, 0x3fc0},
               {65504, 0x7bff, 0x4780},
               {HUGE_VAL, 0x7c00, 0x7f80},
               {std::ldexp(1, -24), 1, 0x3380}};
  for (const auto& x : known) {
    CHECK(f16_bits(x.value) == x.f16);
    CHECK(bf16_bits(x.value) == x.bf16);
    CHECK(f16_value(static_cast<uint16_t>(x.f16)) == x.value);
  }
  CHECK(f16_bits(65520) == 0x7c00);                   // halfway to 2^16: to even, which is infinity
  CHECK(f16_bits(1 + std::ldexp(1, -11)) == 0x3c00);  // ties to even
  CHECK(f16_bits(1 + std::ldexp(3, -11)) == 0x3c02);
  CHECK(std::isnan(f16_value(f16_bits(std::nan("")))));
  CHECK(std::isnan(bf16_value(bf16_bits(std::nan("")))));
  for (int bits = 0; bits < 0x7c00; ++bits) REQUIRE(f16_bits(f16_value(static_cast<uint16_t>(bits))) == bits);
  for (int bits = 0; bits < 0x7f80; ++bits) REQUIRE(bf16_bits(bf16_value(static_cast<uint16_t>(bits))) == bits);
}

// Numbers that can be checked by hand: head_dim 1, q 1, scale 1, so that the scores are the keys.
attention_result by_hand(const std::string& options, const std::vector<double>& keys, int64_t q_len) {
  test_case c(parse_problem("f64 b1 h1 q" + std::to_string(q_len) + " kv" + std::to_string(keys.size()) +
                            " d1 scale=1 " + options));
  c.q.each([&](const index4& i) { c.q.set(i, 1); });
  c.k.each([&](const index4& i) { c.k.set(i, keys[static_cast<size_t>(i[2])]); });
  c.v.each([&](const index4& i) { c.v.set(i, static_cast<double>(i[2] + 1)); });
  if (c.sinks.base != nullptr) c.sinks.set({0, 0, 0, 0}, std::log(2.0));
  if (c.slopes.base != nullptr) c.slopes.set({0, 0, 0, 0}, std::log(2.0));
  return reference(c.p, c.t);
}

TEST_CASE("the reference computes what can be computed by hand") {
  const double ln2 = std::log(2.0), ln3 = std::log(3.0), ln5 = std::log(5.0);
  const auto near = [](double x) { return doctest::Approx(x).epsilon(1e-14); };
  attention_result r = by_hand("", {0, ln3}, 1);  // weights 1/4, 3/4
  CHECK(r.weights[0] == near(0.25));
  CHECK(r.out[0] == near(0.25 * 1 + 0.75 * 2));
  CHECK(r.lse[0] == near(2 * ln2));
  r = by_hand("sinks lse2", {0, ln5}, 1);  // 1, 5 and the sink's 2
  CHECK(r.weights[1] == near(5.0 / 8));
  CHECK(r.out[0] == near((1.0 + 5 * 2) / 8));
  CHECK(r.lse[0] == near(3));
  r = by_hand("causal align=tl", {0, ln3, ln5}, 3);
  CHECK(r.out[0] == 1);
  CHECK(r.out[1] == near(1.75));
  CHECK(r.column_sums[0] == near(1 + 1.0 / 4 + 1.0 / 9));
  r = by_hand("causal align=br", {0, ln3, ln5}, 2);
  CHECK(r.out[0] == near(1.75));
  r = by_hand("causal align=br", {0, ln3}, 3);  // the first row attends nothing
  CHECK((r.out[0] == 0 && r.lse[0] == -HUGE_VAL && r.weights[0] == 0 && r.weights[1] == 0));
  CHECK(r.out[1] == 1);
  r = by_hand("sinks causal align=br", {0, ln3}, 3);
  CHECK((r.out[0] == 0 && r.lse[0] == near(ln2)));
  r = by_hand("window=0,1 align=off:1", {0, 0, 0, 0}, 4);  // row 0 attends keys 1 and 2, row 3 none
  CHECK((r.out[0] == 2.5 && r.out[1] == 3.5 && r.out[2] == 4 && r.out[3] == 0));
  r = by_hand("alibi align=tl", {0, 0, 0}, 2);  // 2^-distance
  CHECK(r.weights[0] == near(4.0 / 7));
  CHECK(r.weights[3] == near(1.0 / 4));
  r = by_hand("alibi=signed align=tl", {0, 0, 0}, 2);  // 2^(j - p)
  CHECK(r.weights[2] == near(4.0 / 7));
  r = by_hand("softcap=2 scores=capped", {-1e9, 1, 1e9}, 1);
  CHECK((r.scores[0] == -2 && r.scores[2] == 2));
  CHECK(r.scores[1] == near(2 * std::tanh(0.5)));
  r = by_hand("", {}, 1);
  CHECK((r.out[0] == 0 && r.lse[0] == -HUGE_VAL));
}

}  // namespace
}  // namespace manyhead::test
