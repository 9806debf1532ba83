// What the portable core decides and how it runs plans: decisions without running, same bits whatever the threads,
// neighbours and hosts, workspaces, the caller's floating-point state. Results themselves are kernel_test's business.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
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
#include <fstream>
#include <functional>
#include <map>
#include <new>
#include <numeric>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#if MH_WITH_TBB
#include <tbb/global_control.h>
#include <tbb/task_arena.h>
#endif

#include "crew.hpp"
#include "deal.hpp"
#include "error.hpp"
#include "host_fp_state.hpp"
#include "json.hpp"
#include "machine.hpp"
#include "plan.hpp"
#include "pool.hpp"
#include "profile.hpp"
#include "registry.hpp"
#include "schedule.hpp"
#include "scheduler.hpp"
#include "test_case.hpp"

// --- counting allocations
// ---------------------------------------------------------------------------------------------- The C library's
// functions are replaced, so that nothing escapes; sanitizers replace them themselves, then nothing is counted.
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

constexpr int64_t l2 = 1 << 20;

// Every ISA of this CPU. Under a sanitizer kernels are a hundred times slower and one ISA has to do: scheduling is the
// same for all, and kernel_test still runs each one's kernels.
std::vector<const kernel_table*> tables() {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  return {&current_isa()};
#endif
  std::vector<const kernel_table*> list;
  for (int32_t i = 0; i < isa_count(); ++i)
    if (isa_supported(i)) list.push_back(isa_table(i));
  return list;
}

problem problem_of(const std::string& text) { return test_case(parse_problem(text), false).p; }
plan plan_of(const std::string& text) { return make_plan(problem_of(text), current_isa(), l2); }

mh_exec exec_of(int32_t threads) {
  mh_exec exec{};
  exec.struct_size = sizeof exec;
  exec.threads = threads;
  return exec;
}

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

// --- lines of text ---------------------------------------------------------------------------------------------------

TEST_CASE("a line that is not understood is refused") {
  CHECK_THROWS_AS(parse_problem(""), std::exception);
  CHECK_THROWS_AS(parse_problem("f33 b1 h1 q1 kv1 d1"), std::exception);
  CHECK_THROWS_AS(parse_problem("f32 b1 h1 q1 d1"), std::exception);
  for (const char* word : {"casual", "v", "window=1", "window=1,x", "align=left", "align=off:", "scores=all",
                           "softcap=", "data=odd", "bias=f8", "d1x", "strides=", "bcast=x"}) {
    INFO(std::string(word));
    CHECK_THROWS_AS(parse_problem(std::string("f32 b1 h1 q1 kv1 d1 ") + word), std::exception);
  }
  const problem_line line = parse_problem(
      "bf16 b2 h8/2 q3 kv40 d16 v24 causal align=off:-5 window=7,-1 softcap=0.5 scale=-2e-3 bias=f16 lse2 bshd");
  const mh_problem& p = line.problem;
  CHECK(p.dtype == MH_DTYPE_BF16);
  CHECK((p.batch == 2 && p.heads == 8 && p.kv_heads == 2 && p.q_len == 3 && p.kv_len == 40 && p.head_dim == 16 &&
         p.v_dim == 24));
  CHECK(
      (p.causal == 1 && p.align == MH_ALIGN_OFFSET && p.q_offset == -5 && p.window_left == 7 && p.window_right == -1));
  CHECK((p.flags == (MH_FLAG_WINDOW | MH_FLAG_SCALE) && p.softcap == 0.5 && p.scale == -2e-3));
  CHECK((p.inputs == MH_INPUT_BIAS && p.bias_dtype == MH_DTYPE_F16 && p.outputs == MH_OUTPUT_LSE &&
         p.lse_base == MH_LSE_BASE2));
  CHECK((p.k_strides[0] == 40 * 2 * 16 && p.k_strides[1] == 16 && p.k_strides[2] == 2 * 16 && p.k_strides[3] == 1));
}

// Everything that the one-line syntax can say.
void check_same(const problem& a, const problem& b, bool strides) {
  CHECK(a.extra_keys == b.extra_keys);
  for (const auto field : {&mh_problem::batch, &mh_problem::heads, &mh_problem::kv_heads, &mh_problem::q_len,
                           &mh_problem::kv_len, &mh_problem::head_dim, &mh_problem::v_dim, &mh_problem::q_offset,
                           &mh_problem::window_left, &mh_problem::window_right})
    CHECK(a.*field == b.*field);
  for (const auto field : {&mh_problem::dtype, &mh_problem::causal, &mh_problem::align, &mh_problem::alibi_mode,
                           &mh_problem::lse_base, &mh_problem::scores_stage, &mh_problem::index_type})
    CHECK(a.*field == b.*field);
  for (const auto field : {&mh_problem::flags, &mh_problem::inputs, &mh_problem::outputs}) CHECK(a.*field == b.*field);
  if (a.has_input(MH_INPUT_BIAS)) CHECK(a.bias_dtype == b.bias_dtype);
  CHECK(a.scale == b.scale);
  CHECK(a.softcap == b.softcap);
  if (!strides) return;
  for (const auto field :
       {&mh_problem::q_strides, &mh_problem::k_strides, &mh_problem::v_strides, &mh_problem::out_strides})
    CHECK(std::memcmp(a.*field, b.*field, sizeof(a.*field)) == 0);
}

TEST_CASE("a plan's line is the problem it was made from") {
  for (const problem_line& line : read_problems(MH_PROBLEMS_FILE)) {
    const test_case c(line, false);
    const std::string text = describe(make_plan(c.p, current_isa(), l2), false);
    INFO(std::string(text));
    const problem_line again = parse_problem(text.substr(0, text.find(": ")));
    const test_case d(again, false);
    check_same(c.p, d.p, text.find(" strided") == text.npos);
    CHECK(text.find(std::string("@") + current_isa().isa) != text.npos);
  }
}

TEST_CASE("a plan's JSON is JSON") {
  for (const problem_line& line : read_problems(MH_PROBLEMS_FILE)) {
    const std::string text = describe(make_plan(test_case(line, false).p, current_isa(), l2), true);
    INFO(std::string(text));
    CHECK(is_json(text));
    for (const char* key :
         {"\"kernel\"", "\"isa\"", "\"block_q\"", "\"last_rows\"", "\"block_kv\"", "\"chunks\"", "\"tasks\"",
          "\"asks_in_order\"", "\"flops\"", "\"bytes\"", "\"tiles_skipped\"", "\"threads\"", "\"balance\""})
      CHECK(text.find(key) != text.npos);
  }
}

// --- decisions -------------------------------------------------------------------------------------------------------

TEST_CASE("a plan covers its problem") {
  for (const problem_line& line : read_problems(MH_PROBLEMS_FILE)) {
    const problem p = test_case(line, false).p;
    for (const kernel_table* table : tables()) {
      for (const int64_t cache : {int64_t{1} << 14, l2, int64_t{1} << 24}) {
        const plan a = make_plan(p, *table, cache);
        CAPTURE(line.text);
        CHECK(describe(a, true) == describe(make_plan(p, *table, cache), true));  // same input, same plan
        const int64_t rows = p.group() * p.q_len;
        CHECK((a.block_q >= 1 && a.block_kv >= 1 && a.chunks >= 1));
        const int64_t whole = rows - a.last_rows;
        CHECK((a.last_rows >= 0 && (a.last_rows == 0 || whole > 0) && a.last_rows <= most_decode_rows));
        CHECK((a.row_blocks * a.block_q >= whole && (a.row_blocks - 1) * a.block_q < std::max<int64_t>(whole, 1)));
        CHECK(a.chunk_keys % a.block_kv == 0);
        CHECK((a.chunks * a.chunk_keys >= p.kv_len && (a.chunks - 1) * a.chunk_keys < std::max<int64_t>(p.kv_len, 1)));
        CHECK(a.tasks == p.batch * p.kv_heads * a.row_blocks * a.chunks);
        CHECK((a.tiles_skipped >= 0 && a.tiles_skipped <= 1));
        constexpr uint32_t of_weights = MH_OUTPUT_WEIGHTS | MH_OUTPUT_MEAN_WEIGHTS | MH_OUTPUT_COLUMN_SUMS;
        CHECK((a.keeps != keeping::nothing) == ((p.outputs & of_weights) != 0));
      }
    }
  }
}

TEST_CASE("scores are kept in bounded memory, and tasks of means take whole queries") {
  constexpr int64_t most_bytes = 4 << 20;
  for (const kernel_table* table : tables()) {
    for (const char* dtype : {"f32", "bf16", "f64"}) {
      for (const char* shape : {" b1 h8 q500 kv500 d64", " b1 h32/8 q300 kv2000 d64", " b1 h6/2 q300 kv9000 d64",
                                " b1 h7/1 q200 kv30000 d8", " b2 h64 q40 kv500 d16", " b1 h8 q1000 kv20000 d64",
                                " b100 h16/8 q3 kv500 d64", " b9 h71/1 q40 kv300 d16", " b8 h32 q128 kv8192 d64",
                                " b1 h32/4 q1000 kv40000 d64", " b1 h5/1 q4000 kv200 d128"}) {
        for (const char* outputs : {" weights", " meanw", " colsums", " meanw colsums"}) {
          const problem p = problem_of(dtype + std::string(shape) + outputs);
          const plan a = make_plan(p, *table, l2);
          CAPTURE(describe(a, false));
          const int64_t real = p.is_f64() ? 8 : 4, row_bytes = a.call.kept_pitch * real;
          CHECK(a.block_q <= (a.kernel == route_matrix ? 32 : 16) * a.panel_rows);
          // Of split keys of few rows, beside more numbers of K and V.
          CHECK((a.keeps == keeping::of_task || a.kept_bytes <= 4 * l2 || (a.chunks > 1 && a.call.rows <= 16)));
          CHECK(a.column_bytes <= 64 + p.batch * p.heads * p.kv_len * real * (1 + a.call.rows / (4 * a.panel_rows)));
          if (a.keeps != keeping::of_task) continue;
          CHECK(a.scratch_bytes == a.kept_at + a.kept_rows * row_bytes);
          CHECK(a.kept_rows - a.last_rows <= a.block_q);
          const int64_t least = a.kernel == route_decode   ? a.block_q
                                : a.kernel == route_matrix ? a.panel_rows
                                                           : a.lanes();
          CHECK((a.kept_rows - a.last_rows) * row_bytes <= std::max(most_bytes, least * row_bytes));
          CHECK((!means(p) || a.weighed_rows % p.group() == 0));
          CHECK((a.weighed_blocks - 1) * a.weighed_rows < a.call.rows - a.last_rows);
        }
      }
    }
  }
}

TEST_CASE("plans of any lengths tell sizes that no machine has, not negative ones") {
  for (const kernel_table* table : tables()) {
    for (const char* text :
         {"f64 b0 h3/1 q1 kv102000000000000000 d1 weights meanw colsums",
          "f16 b1 h71/1 q3 kv1020000000000000 d1 weights meanw",
          "bf16 b1 h17/1 q3 kv9000000000000000 d1 weights colsums",
          "bf16 b1 h1024/1 q200 kv1100000000000 d1 weights colsums", "f32 b3 h2048/1 q113 kv137000000000 d1 colsums",
          "f32 b1 h19319075468/1 q4194304 kv0 d8 weights meanw", "f32 b2 h96186043474/1 q16 kv1 d64 meanw"}) {
      INFO(std::string(text));
      const plan a = make_plan(problem_of(text), *table, l2);
      CHECK((a.scratch_bytes >= 0 && a.shared_bytes >= 0 && workspace_bytes(a, 1024) >= 0));
    }
  }
}

TEST_CASE("borders along the keys are the same for every shape and cache") {
  for (const kernel_table* table : tables()) {
    for (const char* dtype : {"f32", "f64", "bf16", "f16"}) {
      for (const char* dims : {" d16", " d64", " d128", " d160 v128", " d576 v512"}) {
        // Of each route, with up to 2 rows and more, and on the unit.
        std::map<std::tuple<int32_t, bool, bool>, int64_t> tile_keys, chunk_keys;
        for (const char* shape :
             {" b1 h1 q1 kv10000", " b1 h1 q64 kv10000", " b7 h8/2 q3 kv9000", " b1 h1 q1 kv40", " b2 h4 q300 kv500",
              " b1 h4/1 q30 kv70000", " b2 h2/1 q1 kv700", " b2 h2 q2 kv7000"}) {
          for (const int64_t cache : {int64_t{1} << 15, l2, int64_t{1} << 25}) {
            const plan other = make_plan(problem_of(dtype + std::string(shape) + dims), *table, cache);
            CAPTURE(describe(other, false));
            const std::tuple<int32_t, bool, bool> kind{other.kernel, other.call.rows <= 2, other.unit_steps};
            CHECK(tile_keys.emplace(kind, other.block_kv).first->second == other.block_kv);
            if (other.kernel == route_matrix) CHECK(other.block_kv == 128);
            if (other.chunks > 1) CHECK(chunk_keys.emplace(kind, other.chunk_keys).first->second == other.chunk_keys);
          }
        }
      }
    }
  }
}

TEST_CASE("one row and two decode with larger tiles, as far as a tile of K goes into cache") {
  struct {
    const char* line;
    int64_t keys;
  } const tiles[] = {
      {"f32 b2 h8 q1 kv40 d64", 256},    {"f32 b1 h8 q2 kv4000 d128", 256},  {"f32 b1 h8/4 q1 kv4000 d256", 256},
      {"f32 b1 h8 q1 kv4000 d257", 128}, {"f32 b1 h8 q1 kv4000 d576", 64},   {"f32 b1 h8 q1 kv4000 d64 v512", 128},
      {"f64 b1 h8 q1 kv4000 d128", 256}, {"f64 b1 h8 q1 kv4000 d136", 128},  {"bf16 b1 h8 q1 kv4000 d32", 256},
      {"bf16 b1 h8 q1 kv4000 d64", 128}, {"f16 b1 h8 q2 kv4000 d64", 128},   {"f16 b1 h8 q1 kv4000 d128", 64},
      {"f32 b1 h8 q3 kv4000 d64", 64},   {"f32 b1 h12/4 q1 kv4000 d64", 64}, {"f32 b1 h8/4 q2 kv4000 d64", 64},
  };
  for (const auto& x : tiles) {
    const plan plan = plan_of(x.line);
    const int64_t keys = plan.unit_steps ? std::min<int64_t>(4 * x.keys, 256) : x.keys;
    if (plan.kernel == route_decode) CHECK_MESSAGE(plan.block_kv == keys, x.line << ": " << plan.block_kv);
  }
  // By pairs a tile of K may have four times the bytes, and is asked for into L2, but by Zen 5 from memory.
  for (const kernel_table* table : tables()) {
    const bool by_pairs = table->dtype[MH_DTYPE_BF16].unit_steps == steps_of_pairs;
    for (const cpu_core core : {cpu_core::zen4, cpu_core::zen5, cpu_core::other}) {
      const auto plan_for = [&](const char* line) { return make_plan(problem_of(line), *table, l2, core); };
      const plan one = plan_for("bf16 b1 h8 q1 kv4000 d128"), two = plan_for("bf16 b1 h8 q2 kv4000 d256");
      CHECK((one.block_kv == (by_pairs ? 256 : 64) && two.block_kv == (by_pairs ? 128 : 64)));
      CHECK(one.asks_l1 == (core == cpu_core::zen5 || (core != cpu_core::zen4 && !by_pairs)));
      const plan from_l3 = make_plan(one.p, *table, l2, core, int64_t{1} << 30);
      CHECK(from_l3.asks_l1 == (core != cpu_core::zen4 && !by_pairs));
      CHECK(plan_for("bf16 b1 h8 q3 kv4000 d128").asks_l1 == (core != cpu_core::zen4));
      CHECK(plan_for("f16 b1 h8 q1 kv4000 d128").block_kv == 64);
    }
  }
}

TEST_CASE("short queries against long keys are split") {
  CHECK(plan_of("f32 b1 h32/1 q1 kv16384 d128").chunks > 16);
  CHECK(plan_of("f32 b1 h1 q8 kv4096 d64").chunks > 4);
  CHECK(plan_of("f32 b1 h1 q1 kv100 d64").chunks == 1);
  CHECK(plan_of("f32 b1 h8 q1024 kv2048 d64").chunks == 1);
  CHECK(plan_of("f32 b1 h8 q1 kv100 d64").kernel == route_decode);
  CHECK(plan_of("f32 b1 h8 q1000 kv100 d64").kernel != route_decode);
}

TEST_CASE("few rows decode, more of them the larger the head") {
  // The most rows of a head that decode, with vectors of 16 and of 8 floats: one vector of rows, and what the second allows,
  // of 16 in 16 bits alone.
  struct limit {
    int64_t dim, one[2], two[2];
  };
  const int64_t lanes = current_isa().lanes;
  if (lanes < 8) return;
  const auto plan_for = [](const std::string& dtype, int64_t rows, int64_t dim, int64_t keys) {
    const std::string q = " q" + std::to_string(rows), kv = " kv" + std::to_string(keys),
                      d = " d" + std::to_string(dim);
    return plan_of(dtype + " b1 h8" + q + kv + d);
  };
  const auto decodes = [&](const std::string& dtype, int64_t rows, int64_t dim, int64_t keys = 24) {
    return plan_for(dtype, rows, dim, keys).kernel == route_decode;
  };
  for (const limit& x : {limit{16, {5, 4}, {0, 0}}, limit{32, {8, 6}, {0, 9}}, limit{64, {12, 7}, {18, 11}},
                         limit{128, {14, 8}, {23, 13}}, limit{256, {16, 8}, {26, 13}}, limit{512, {16, 8}, {27, 14}}}) {
    const int narrow = lanes == 8 ? 1 : 0;
    for (int64_t rows = 1; rows <= 2 * lanes; ++rows) {
      const int64_t most = rows <= lanes ? x.one[narrow] : x.two[narrow];
      for (const char* dtype : {"f32", "bf16", "f16"}) {
        const bool one_vector = lanes == 16 && dtype == std::string("f32");
        const int64_t keys = dtype == std::string("f32") ? 40 : 24;  // in 16 bits a matrix unit takes more
        if (plan_for(dtype, rows, x.dim, keys).unit_steps) continue;
        CHECK_MESSAGE(decodes(dtype, rows, x.dim, keys) == (rows <= (one_vector ? std::min(most, lanes) : most)),
                      std::string(dtype) << ", " << rows << " rows, head_dim " << x.dim);
      }
    }
  }
  // With few keys more of them, in f32: heads of 64.
  struct few {
    int64_t keys, wide, narrow;
  };
  for (const few& x : {few{16, 14, 15}, few{17, 12, 13}, few{32, 12, 13}, few{33, 12, 11}}) {
    for (int64_t rows = 9; rows <= 16; ++rows) {
      CHECK_MESSAGE(decodes("f32", rows, 64, x.keys) == (rows <= (lanes == 8 ? x.narrow : x.wide)),
                    rows << " rows, " << x.keys << " keys");
      const plan of_16_bits = plan_for("bf16", rows, 64, x.keys);
      if (of_16_bits.kernel != route_matrix && !of_16_bits.unit_steps)
        CHECK(decodes("bf16", rows, 64, x.keys) == decodes("bf16", rows, 64));
    }
  }
}

TEST_CASE("K and V are copied only where kernels cannot read them in place, or only with L1 misses") {
  for (const char* line :
       {"f32 b1 h2 q100 kv100 d64", "f32 b1 h2 q100 kv100 d64 bshd", "f64 b1 h2 q100 kv100 d24 strides=packed",
        "f32 b1 h2 q100 kv100 d33 strides=odd", "f32 b1 h2 q100 kv100 d64 strides=negative", "f32 b1 h1 q1 kv100 d64",
        "f16 b1 h2 q1 kv100 d64", "f32 b1 h6 q500 kv500 d64 bshd", "f32 b1 h4 q100 kv500 d64 bshd",
        "f32 b1 h4 q500 kv500 d64", "f32 b1 h1 q500 kv500 d256 bshd", "f32 b1 h4 q1 kv500 d64 bshd",
        "f16 b1 h2 q1 kv100 d40", "f32 b1 h2 q1 kv100 d33"})
    CHECK_MESSAGE(!plan_of(line).copy_kv, line);
  for (const char* line :
       {"bf16 b1 h2 q100 kv100 d64", "f16 b1 h2 q1 kv100 d1", "f32 b1 h2 q1 kv100 d64 v1",
        "f32 b1 h2 q100 kv100 d64 strides=lastdim", "f32 b1 h2 q100 kv100 d64 strides=transposed",
        "f64 b1 h2 q100 kv100 d64 strides=reversed", "f32 b1 h2 q100 kv100 d64 strides=zero",
        "f32 b1 h4 q500 kv500 d64 bshd", "f64 b1 h2 q500 kv500 d64 bshd", "f32 b1 h12 q500 kv500 d64 bshd causal"})
    CHECK_MESSAGE(plan_of(line).copy_kv, line);
}

TEST_CASE(
    "memory is asked for ahead where K and V are not in cache, far from it where there is nothing to hide it behind") {
  for (const char* line : {"f32 b1 h4/1 q1 kv2048 d128", "bf16 b8 h4/2 q2 kv1024 d128", "f16 b1 h4 q1 kv8192 d128",
                           "f32 b8 h12 q128 kv128 d64", "f32 b1 h4 q1 kv8192 d128", "f64 b1 h4 q1 kv8192 d128"})
    CHECK_MESSAGE(plan_of(line).prefetch, line);
  for (const char* line :
       {"f32 b1 h4/1 q1 kv512 d128", "f32 b1 h12 q1 kv512 d64", "f64 b1 h6 q1 kv512 d64", "f32 b1 h2 q512 kv512 d64"})
    CHECK_MESSAGE(!plan_of(line).prefetch, line);
}

TEST_CASE("cores that bring rows better when asked otherwise are") {
  using enum cpu_core;
  const auto asks_own = [](const char* line, cpu_core core) {
    return make_plan(problem_of(line), current_isa(), l2, core).asks_own;
  };
  CHECK(asks_own("f32 b2 h4/1 q1 kv2048 d128", zen5));
  CHECK(!asks_own("f32 b2 h4/1 q1 kv2048 d128", zen4));
  CHECK(!asks_own("f32 b2 h4/1 q1 kv2048 d128", other));
  CHECK(asks_own("f32 b2 h4/2 q1 kv2048 d128 bshd", zen5));
  CHECK(!asks_own("f32 b2 h4/2 q1 kv2048 d128 bshd", intel));  // rows of other heads lie between
  CHECK(!asks_own("f32 b2 h4/2 q1 kv2048 d128 strides=packed", zen5));
  const auto in_order = [](const char* line, cpu_core core) {
    return make_plan(problem_of(line), current_isa(), l2, core).asks_in_order;
  };
  for (const char* dtype : {"f32", "bf16", "f16"}) {
    CHECK(in_order((dtype + std::string(" b2 h4/1 q1 kv2048 d128")).c_str(), zen5));
    // More rows than a pass takes would ask for a line twice; by pairs it takes eight.
    const std::string five = dtype + std::string(" b2 h5/1 q1 kv2048 d128");
    CHECK(in_order(five.c_str(), zen5) == make_plan(problem_of(five.c_str()), current_isa(), l2, zen5).unit_steps);
    CHECK(!in_order((dtype + std::string(" b2 h9/1 q1 kv2048 d128")).c_str(), zen5));
    CHECK(in_order((dtype + std::string(" b2 h10/2 q1 kv2048 d128 bshd")).c_str(), zen5));
    CHECK(!in_order((dtype + std::string(" b2 h4/2 q1 kv2048 d128 strides=packed")).c_str(), zen5));
    for (const cpu_core core : {zen4, intel, other}) {
      CHECK(!in_order((dtype + std::string(" b2 h4/1 q1 kv2048 d128")).c_str(), core));
      CHECK(!in_order((dtype + std::string(" b2 h4/2 q1 kv2048 d128 bshd")).c_str(), core));
    }
  }
  for (const kernel_table* table : tables()) {
    const bool by_pairs = table->dtype[MH_DTYPE_BF16].unit_steps == steps_of_pairs;
    const auto whole_v_rows = [&](const char* line, cpu_core core, int64_t l3) {
      return make_plan(problem_of(line), *table, l2, core, l3).whole_v_rows;
    };
    CHECK(whole_v_rows("bf16 b2 h4/1 q1 kv2048 d128", zen5, l2) == by_pairs);
    CHECK(!whole_v_rows("bf16 b2 h4/1 q1 kv2048 d128", zen5, 64 * l2));
    CHECK(!whole_v_rows("bf16 b2 h5/1 q1 kv2048 d128", zen5, l2));
    CHECK(!whole_v_rows("bf16 b2 h4/1 q1 kv2048 d128", zen4, l2));
    CHECK(whole_v_rows("f32 b2 h4/1 q1 kv2048 d128", zen5, l2));
    CHECK(!whole_v_rows("f32 b2 h4/1 q1 kv2048 d128", zen4, l2));
  }
  // Intel: in a third of L3 alone, and not for passes of four long rows.
  constexpr int64_t mb = 1 << 20;
  const auto on_intel = [](const char* line, int64_t l3) {
    return make_plan(problem_of(line), current_isa(), l2, intel, l3);
  };
  CHECK(on_intel("f32 b1 h12 q4 kv1024 d64", 19 * mb).asks_own);  // 6 MB
  CHECK(!on_intel("f32 b1 h12 q4 kv1024 d64", 17 * mb).asks_own);
  CHECK(on_intel("f32 b1 h6 q2 kv1024 d128", 19 * mb).asks_own);
  for (const char* rows : {"3", "4"})
    CHECK(!on_intel(("f32 b1 h6 q" + std::string(rows) + " kv1024 d128").c_str(), 19 * mb).asks_own);
  CHECK(!on_intel("f32 b1 h8 q3 kv400 d64", 1000 * mb).prefetch);  // 1.6 MB, twice L2 is 2
  CHECK(on_intel("f32 b1 h8 q4 kv400 d64", 1000 * mb).prefetch);
  CHECK(on_intel("bf16 b1 h8 q2 kv800 d64", 1000 * mb).prefetch);
  const bool wide = current_isa().lanes >= 16;
  CHECK(on_intel("f32 b1 h16 q3 kv400 d64", 1000 * mb).prefetch == wide);  // 3.2 MB
  for (const char* line : {"f32 b1 h16 q3 kv400 d64", "f16 b1 h16 q3 kv800 d64", "f64 b1 h16 q7 kv400 d64"})
    CHECK(on_intel(line, 1000 * mb).adds_rows == wide);
  CHECK(!on_intel("f32 b1 h1 q3 kv400 d64", 1000 * mb).adds_rows);
  CHECK(!on_intel("f32 b1 h16 q99 kv500 d64", 1000 * mb).adds_rows);  // the last three find K and V in cache
  CHECK(make_plan(problem_of("f32 b1 h16 q3 kv400 d64"), current_isa(), l2, zen5).adds_rows == wide);
  CHECK(!make_plan(problem_of("f16 b1 h16 q3 kv800 d64"), current_isa(), l2, zen5).adds_rows);
  CHECK(!make_plan(problem_of("f32 b1 h16 q3 kv400 d64"), current_isa(), l2, zen4).adds_rows);
  const problem bf16 = problem_of("bf16 b2 h4/1 q1 kv2048 d128");
  CHECK(make_plan(bf16, current_isa(), l2, other).asks_l1);
  CHECK(make_plan(bf16, current_isa(), l2, zen5).asks_l1);
  CHECK(!make_plan(bf16, current_isa(), l2, zen4).asks_l1);
}

TEST_CASE("cores that bring what lies in half of L3 are not asked to") {
  using enum cpu_core;
  const int64_t l3 = 32 * l2;
  const auto asks = [](const char* line, cpu_core core, int64_t l3_bytes, const kernel_table& table = current_isa()) {
    return make_plan(problem_of(line), table, l2, core, l3_bytes).prefetch;
  };
  CHECK(asks("f32 b1 h8 q2 kv2047 d128", other, l3));
  CHECK(asks("f32 b1 h8 q2 kv2047 d128", zen5, 0));
  CHECK(!asks("f32 b1 h8 q2 kv2047 d128", zen5, l3));
  CHECK(asks("f32 b1 h8 q2 kv2048 d128", zen5, l3));
  CHECK(asks("bf16 b1 h8 q2 kv2047 d128", zen5, l3));
  CHECK(asks("f32 b1 h8 q64 kv400 d128", zen5, l3));
  CHECK(!asks("f32 b1 h8 q2 kv2047 d128 bshd", intel, l3));
  CHECK(asks("f32 b1 h8 q2 kv2047 d128 bshd", other, l3));
  CHECK(asks("f32 b1 h8 q2 kv2047 d128 bshd", intel, 0));
  CHECK(asks("f32 b1 h8 q2 kv2048 d128 bshd", intel, l3));
  CHECK(asks("f32 b1 h8 q3 kv2047 d128 bshd", intel, l3));
  CHECK(asks("f32 b1 h8 q2 kv2047 d128", intel, l3));        // rows one behind the other
  CHECK(!asks("f32 b1 h9 q2 kv1800 d128 bshd", intel, l3));  // 4608 bytes apart
  CHECK(asks("bf16 b1 h16 q2 kv2047 d128 bshd", intel, l3));
  for (const kernel_table* table : tables()) {
    const bool wide = table->lanes >= 16;
    CAPTURE(table->isa);
    CHECK(!asks("f32 b1 h8 q1 kv2047 d128", zen4, l3, *table));
    CHECK(asks("f32 b1 h8 q3 kv2047 d128", zen4, l3, *table) == !wide);
    CHECK(asks("f32 b1 h8 q4 kv2047 d128", zen4, l3, *table));
    CHECK(asks("bf16 b1 h8 q4 kv2047 d128", zen4, l3, *table) == !wide);
    CHECK(!asks("bf16 b1 h8 q1 kv4095 d128", zen4, l3, *table));
    CHECK(asks("bf16 b1 h8 q1 kv4096 d128", zen4, l3, *table));
  }
}

TEST_CASE("skipped tiles and attended pairs are counted right") {
  const mh_tensors none{};
  for (const char* text :
       {"f32 b1 h1 q700 kv700 d64", "f32 b1 h1 q700 kv700 d64 causal", "f32 b2 h4/2 q300 kv900 d64 causal align=br",
        "f32 b2 h4/2 q300 kv900 d64 causal align=tl", "f32 b1 h2 q900 kv300 d64 causal align=br",
        "f32 b1 h1 q800 kv800 d64 window=50,10", "f32 b1 h3/1 q500 kv800 d64 window=70,-1 align=off:-100",
        "f32 b1 h1 q500 kv800 d64 causal align=off:5000", "f32 b1 h1 q500 kv800 d64 causal align=off:-5000",
        "f32 b1 h1 q400 kv402 d64 extra=2 causal align=tl", "f64 b1 h1 q300 kv300 d8 causal window=99,0"}) {
    const plan plan = plan_of(text);
    const problem& p = plan.p;
    CAPTURE(describe(plan, false));
    double pairs = 0, used = 0;
    const int64_t tiles = (p.kv_len + plan.block_kv - 1) / plan.block_kv, rows = p.group() * p.q_len;
    const int64_t panel = std::min(plan.block_q, plan.panel_rows);
    int64_t panels = 0;
    for (int64_t begin = 0; begin < rows; begin += panel, ++panels) {
      std::vector<bool> needed(static_cast<size_t>(tiles));
      for (int64_t row = begin; row < std::min(begin + panel, rows); ++row)
        for (int64_t j = 0; j < p.kv_len; ++j) {
          if (!attends(p, none, 0, row % p.group(), row / p.group(), j)) continue;
          ++pairs;
          needed[static_cast<size_t>(j / plan.block_kv)] = true;
        }
      used += static_cast<double>(std::count(needed.begin(), needed.end(), true));
    }
    pairs *= static_cast<double>(p.batch * p.kv_heads);  // of one kv head, with all its query heads
    CHECK(plan.flops == doctest::Approx(2 * static_cast<double>(p.head_dim + p.v_dim) * pairs));
    // Extra keys lie behind the others, and a panel goes through all tiles between its first and its last.
    if (p.extra_keys == 0) CHECK(plan.tiles_skipped == doctest::Approx(1 - used / static_cast<double>(tiles * panels)));
  }
  const double causal = plan_of("f32 b1 h1 q4096 kv4096 d64 causal").tiles_skipped;
  CHECK((causal > 0.45 && causal < 0.5));
  CHECK(plan_of("f32 b1 h1 q4096 kv4096 d64 window=100,0").tiles_skipped > 0.9);
}

// --- the schedule ----------------------------------------------------------------------------------------------------

TEST_CASE("the last rows of a head take the decode route where they would fill little of a panel") {
  const auto last_rows = [](const kernel_table* table, const std::string& line, cpu_core core = cpu_core::other) {
    return make_plan(problem_of(line), *table, l2, core).last_rows;
  };
  for (const kernel_table* table : tables()) {
    CAPTURE(table->isa);
    const int64_t lanes = table->lanes, one = lanes > 4 ? 1 : 0;
    const auto f32 = [&](int64_t q, const char* more) { return "f32 b2 h4 q" + std::to_string(q) + " kv60" + more; };
    CHECK(last_rows(table, f32(3 * lanes + 1, " d64")) == one);
    CHECK(last_rows(table, "f64 b2 h4 q" + std::to_string(3 * lanes + 1) + " kv60 d64") == (lanes > 8 ? 1 : 0));
    CHECK(last_rows(table, f32(3 * lanes, " d64")) == 0);
    CHECK(last_rows(table, f32(4 * lanes - 1, " d64")) == 0);
    // Of groups the rows count, not the queries.
    CHECK(last_rows(table, "f32 b2 h12/4 q" + std::to_string(lanes + 1) + " kv60 d64") == 3 * one);
    CHECK(last_rows(table, f32(3 * lanes + 1, " d64 weights")) == one);
    CHECK(last_rows(table, f32(3 * lanes + 1, " d64 lse")) == one);
    // Rows shorter than a vector would be copied once more.
    CHECK(last_rows(table, f32(3 * lanes + 1, " d3")) == 0);
    if (lanes == 16) {
      for (const int64_t few : {1, 5, 6, 7, 9, 10, 15}) {
        CHECK(last_rows(table, f32(48 + few, " d64")) == (few <= 6 ? few : 0));
        CHECK(last_rows(table, f32(48 + few, " d64"), cpu_core::zen4) == (few <= 9 ? few : 0));
      }
    }
    if (table->dtype[MH_DTYPE_BF16].attention[route_matrix] != nullptr) {
      CHECK(last_rows(table, "bf16 b1 h4 q97 kv97 d64") == one);
      const bool by_pairs = table->dtype[MH_DTYPE_BF16].unit_steps == steps_of_pairs;
      CHECK(last_rows(table, "bf16 b1 h4 q112 kv112 d64") == (by_pairs ? 16 : 0));
      CHECK(last_rows(table, "bf16 b1 h4 q120 kv112 d64") == (by_pairs ? 24 : 0));
      CHECK(last_rows(table, "bf16 b1 h4 q121 kv112 d64") == 0);
      CHECK(last_rows(table, "bf16 b1 h4 q113 kv112 d80") == (by_pairs ? 17 : 0));
      CHECK(last_rows(table, "bf16 b1 h4 q114 kv112 d80") == 0);
    }
  }
}

TEST_CASE("a schedule cuts row blocks at the borders of their panels, and covers each row once") {
  for (const kernel_table* table : tables()) {
    const int64_t lanes = table->lanes;
    for (const int64_t q : {1, 2, 9, 47, 48, 49, 64, 65, 100, 129, 192, 193, 207, 256, 577, 1024}) {
      for (const char* options :
           {" kv20 d64", " kv300 d64", " kv300 d64 causal align=tl", " kv4000 d64 causal align=br"}) {
        const problem p = problem_of("f32 b2 h6/3 q" + std::to_string(q) + options);
        const plan plan = make_plan(p, *table, l2);
        const int64_t rows = p.group() * q, whole = rows - plan.last_rows, panel = plan.panel_rows;
        // Where the panels of an uncut block begin: the widest ones, but the last four vectors as two and two.
        std::vector<bool> borders(static_cast<size_t>(rows + 1));
        for (int64_t block = 0; block < whole; block += plan.block_q) {
          const int64_t end = std::min(block + plan.block_q, whole);
          for (int64_t row = block; row < end;) {
            borders[static_cast<size_t>(row)] = true;
            const int64_t vectors = (end - row + lanes - 1) / lanes;
            row += vectors == 4 && panel == 3 * lanes ? 2 * lanes : panel;
          }
        }
        for (const int64_t workers : {1, 2, 3, 16, 64, 1000000}) {
          const schedule order(plan, workers);
          CHECK(order.tasks() <= most_tasks(plan));
          std::vector<int> done(static_cast<size_t>(2 * 3 * plan.chunks * rows));
          for (int64_t i = 0; i < order.tasks(); ++i) {
            const kernel_task t = order.at(i);
            const int64_t heads = t.kv_head_end - t.kv_head_begin;
            REQUIRE((t.batch >= 0 && t.batch < plan.entries && t.kv_head_begin >= 0 && heads >= 1 &&
                     t.kv_head_end <= plan.entry_heads && heads <= plan.heads_at_once && t.chunk >= 0 &&
                     t.chunk < plan.chunks));
            REQUIRE((t.row_begin < t.row_end && t.row_begin < whole && t.row_end <= rows &&
                     std::min(t.row_end, whole) - t.row_begin <= plan.block_q));
            CHECK(borders[static_cast<size_t>(t.row_begin)]);
            for (int64_t head = t.kv_head_begin; head < t.kv_head_end; ++head) {
              for (int64_t row = t.row_begin; row < t.row_end; ++row)
                ++done[static_cast<size_t>(((t.batch * plan.entry_heads + head) * plan.chunks + t.chunk) * rows + row)];
            }
          }
          CHECK(std::all_of(done.begin(), done.end(), [](int n) { return n == 1; }));
        }
      }
    }
  }
}

TEST_CASE("heads of few rows and keys share tasks, as long as each worker gets eight") {
  const auto heads_at_once = [](const char* line) { return plan_of(line).heads_at_once; };
  // Tiles of K and V in half of L2 where all of them are in L2, else whole heads that fit into L1; 32 rows.
  CHECK(heads_at_once("f32 b1 h12 q1 kv8 d64") == 12);
  CHECK(heads_at_once("f32 b1 h32 q4 kv8 d64") == 8);
  if (current_isa().lanes >= 8) CHECK(heads_at_once("f32 b1 h32/8 q2 kv8 d64") == 4);  // else 8 rows do not decode
  CHECK(heads_at_once("f32 b1 h12 q1 kv128 d64") == l2 / 2 / (128 * 128 * 4));
  CHECK(heads_at_once("bf16 b1 h24 q1 kv128 d64") == l2 / 2 / (128 * 128 * 2));
  CHECK(heads_at_once("f32 b64 h32 q1 kv16 d64") == 4);
  CHECK(heads_at_once("f32 b64 h32 q1 kv65 d16") == 3);
  CHECK(heads_at_once("f32 b64 h32 q4 kv65 d16") == 1);
  CHECK(heads_at_once("f32 b1 h12 q64 kv64 d64") == 1);
  const plan plan = plan_of("f32 b8 h24 q1 kv8 d64");
  REQUIRE(plan.heads_at_once == 32);
  const auto tasks = [&](int64_t workers) { return schedule(plan, workers).tasks(); };
  CHECK(tasks(1) == 6);
  CHECK(tasks(2) == 16);  // of 12 heads each
  CHECK(tasks(4) == 32);
  CHECK(tasks(24) == 8 * 24);
}

TEST_CASE("a decode step takes the heads of all batch entries as of one where nothing tells entries apart") {
  const auto entries = [](const char* line) {
    const plan p = plan_of(line);
    CHECK(p.entries * p.entry_heads == p.p.batch * p.p.kv_heads);
    CHECK(p.call.batch == p.entries);
    CHECK(p.call.kv_heads == p.entry_heads);
    CHECK(p.call.heads == p.entry_heads * p.p.group());
    return p.entries;
  };
  CHECK(entries("f32 b8 h1 q1 kv8 d64") == 1);
  CHECK(entries("f32 b8 h1 q1 kv8 d64 bshd") == 1);
  CHECK(entries("f32 b8 h4/2 q2 kv8 d64 lse") == 1);
  CHECK(entries("f32 b8 h4/1 q1 kv8 d64 lse") == 1);
  CHECK(entries("f32 b8 h1 q2 kv8 d64 causal align=br window=4,0") == 1);
  CHECK(entries("f32 b8 h2 q1 kv8 d64 mask") == 1);
  // Heads that do not follow, or that a step's inputs tell apart.
  CHECK(entries("f32 b8 h2 q2 kv8 d64 bshd") == 8);
  CHECK(entries("f32 b8 h2 q1 kv8 d64 strides=odd") == 8);
  for (const char* input : {"keymask", "lens", "offsets", "alibi align=br", "sinks"}) {
    CAPTURE(input);
    CHECK(entries(("f32 b8 h1 q1 kv8 d64 " + std::string(input)).c_str()) == 8);
  }
  for (const char* shared : {"mask bcast=b", "mask bcast=h", "bias bcast=b", "bias bcast=h"}) {
    CAPTURE(shared);
    CHECK(entries(("f32 b8 h2 q1 kv8 d64 " + std::string(shared)).c_str()) == 8);
  }
  CHECK(entries("f32 b8 h2 q1 kv8 d64 mask bias bcast=bh") == 1);
  // Of one array alone.
  const problem follows = problem_of("f32 b8 h2 q1 kv8 d64 lse");
  for (int64_t(problem::* strides)[4] :
       {&problem::q_strides, &problem::k_strides, &problem::v_strides, &problem::out_strides}) {
    problem p = follows;
    (p.*strides)[0] *= 2;
    CHECK(make_plan(p, current_isa(), l2).entries == 8);
  }
  problem p = follows;
  p.lse_strides[0] *= 2;
  CHECK(make_plan(p, current_isa(), l2).entries == 8);
  CHECK(entries("f32 b8 h1 q1 kv8 d64 weights") == 8);
  CHECK(entries("f32 b8 h1 q64 kv64 d64") == 8);
}

TEST_CASE("heads side by side take turns where K and V are not in L2, in as few tasks as level the load") {
  const auto turns = [](const char* line) { return takes_turns(plan_of(line)); };
  CHECK(turns("f32 b1 h12 q1 kv1024 d64 bshd"));
  CHECK(turns("bf16 b4 h12/4 q1 kv1024 d64 bshd"));
  CHECK(!turns("f32 b1 h12 q1 kv1024 d64"));
  CHECK(!turns("f32 b1 h12/1 q1 kv4096 d64 bshd"));
  CHECK(!turns("f32 b1 h12 q1 kv128 d64 bshd"));
  CHECK(!turns("f32 b1 h12 q64 kv1024 d64 bshd"));
  CHECK(!turns("f32 b1 h12 q1 kv1024 d64 strides=lastdim"));
  CHECK(!turns("f32 b1 h12 q1 kv1024 d64 strides=odd"));
  using keys = std::pair<int64_t, int64_t>;  // of K, of V
  const auto turns_of = [](const char* line, cpu_core core, int64_t l3) {
    const plan p = make_plan(problem_of(line), current_isa(), l2, core, l3);
    return keys{p.k_turn, p.v_turn};
  };
  constexpr keys usual{16, 32};
  // With vectors of four floats three rows of f64 and five are no decode step.
  const keys of_more = current_isa().lanes > 4 ? usual : keys{0, 0};
  CHECK(turns_of("f32 b1 h12 q1 kv8192 d64 bshd", cpu_core::other, l2) == usual);
  // From memory in its order: the shorter the longer the rows of all heads are, but not too short for more rows.
  const auto in_order = [&](const char* line) { return turns_of(line, cpu_core::zen5, l2); };
  CHECK(turns_of("f32 b1 h12 q1 kv8192 d64 bshd", cpu_core::zen5, 1024 * l2) == keys{64, 64});
  CHECK(turns_of("f32 b1 h12 q5 kv8192 d64 bshd", cpu_core::zen5, 1024 * l2) == of_more);
  CHECK(turns_of("f32 b1 h17 q1 kv8192 d64 bshd", cpu_core::zen5, 1024 * l2) == usual);
  CHECK(in_order("bf16 b1 h4/4 q1 kv8192 d64 bshd") == usual);
  CHECK(in_order("bf16 b1 h8/8 q1 kv8192 d64 bshd") == keys{16, 16});
  CHECK(in_order("bf16 b1 h8/8 q1 kv8192 d128 bshd") == keys{8, 8});
  CHECK(in_order("f32 b1 h12 q1 kv8192 d64 bshd") == keys{4, 4});
  CHECK(in_order("f32 b1 h32 q1 kv8192 d64 bshd") == keys{4, 4});
  CHECK(in_order("f32 b1 h32 q2 kv8192 d128 bshd") == keys{2, 2});
  CHECK(in_order("f32 b1 h32 q3 kv8192 d128 bshd") == keys{8, 8});
  CHECK(in_order("f32 b1 h32 q5 kv8192 d128 bshd") == of_more);
  CHECK(in_order("f64 b1 h32 q3 kv8192 d128 bshd") == of_more);
  CHECK(in_order("f32 b1 h12 q1 kv8192 d64 strides=packed") == usual);
  CHECK(plan_of("f32 b1 h12 q4 kv1024 d64 bshd").heads_at_once == 12);
  CHECK(plan_of("f32 b1 h64 q4 kv1024 d64 bshd").heads_at_once == 32);
  CHECK(plan_of("f32 b1 h200 q1 kv1024 d64 bshd").heads_at_once == 128);
  const auto tasks = [](const char* line, int64_t workers) { return schedule(plan_of(line), workers).tasks(); };
  CHECK(tasks("f32 b1 h12 q1 kv1024 d64 bshd", 1) == 2);  // chunks of 512 keys
  CHECK(tasks("f32 b1 h12 q1 kv1024 d64 bshd", 2) == 2);
  CHECK(tasks("f32 b1 h12 q1 kv1500 d64 bshd", 2) == 3 * 2);  // else one of two gets two of three
  CHECK(tasks("f32 b1 h12 q1 kv1500 d64 bshd", 3) == 3);
  CHECK(tasks("f32 b3 h12 q1 kv512 d64 bshd", 2) == 3 * 2);
  CHECK(tasks("f32 b1 h12 q1 kv1024 d64 bshd", 64) == 2 * 12);
  CHECK(tasks("f32 b1 h12 q1 kv65536 d64 bshd", 64) == 128);
}

TEST_CASE("on few threads heads come one after another, the longest task of each first") {
  const plan plan = plan_of("f32 b1 h8 q2048 kv2048 d64 causal");
  const schedule order(plan, 2);
  CHECK(order.tasks() == plan.tasks);
  for (int64_t i = 1; i < order.tasks(); ++i) {
    const kernel_task before = order.at(i - 1), task = order.at(i);
    CHECK((task.kv_head_begin > before.kv_head_begin || task.row_end == before.row_begin));
  }
}

TEST_CASE("tasks that make weights cover each row once, and of means whole queries of all heads") {
  for (const kernel_table* table : tables()) {
    for (const char* text :
         {"f32 b2 h6/3 q300 kv2500 d64 weights", "f32 b2 h6/2 q1300 kv1300 d64 causal meanw",
          "f32 b1 h71/1 q50 kv2500 d16 meanw", "f32 b2 h6/3 q301 kv2500 d64 colsums",
          "bf16 b2 h6/2 q2330 kv2330 d64 causal meanw", "f64 b1 h7 q2001 kv2001 d64 causal weights"}) {
      const plan plan = make_plan(problem_of(text), *table, l2);
      const problem& p = plan.p;
      REQUIRE(plan.keeps == keeping::of_task);
      const int64_t rows = p.group() * p.q_len;
      // Of rows that share a panel with one that is not finite denormal products may have other bits: the same panels for all.
      const int64_t tasks = schedule(plan, 1).tasks();
      for (const int64_t workers : {1, 2, 16, 1000}) {
        INFO(std::string(text), " ", std::string(table->isa), " ", workers);
        const schedule order(plan, workers);
        REQUIRE(order.tasks() == tasks);
        std::vector<int> done(static_cast<size_t>(p.batch * p.kv_heads * rows));
        for (int64_t i = 0; i < tasks; ++i) {
          const kernel_task t = order.at(i);
          REQUIRE((t.batch >= 0 && t.batch < p.batch && t.chunk == 0));
          REQUIRE((t.row_begin >= 0 && t.row_begin < t.row_end && t.row_end <= rows));
          const int64_t heads = t.kv_head_end - t.kv_head_begin;
          CHECK(heads == (means(p) ? p.kv_heads : 1));
          if (means(p)) CHECK((t.row_begin % p.group() == 0 && t.row_end % p.group() == 0));
          CHECK(t.row_begin == t.row_block * plan.weighed_rows);
          CHECK(t.row_end == (t.row_block + 1 < plan.weighed_blocks ? t.row_begin + plan.weighed_rows : rows));
          for (int64_t head = t.kv_head_begin; head < t.kv_head_end; ++head)
            for (int64_t row = t.row_begin; row < t.row_end; ++row)
              ++done[static_cast<size_t>((t.batch * p.kv_heads + head) * rows + row)];
        }
        CHECK(std::all_of(done.begin(), done.end(), [](int n) { return n == 1; }));
        const std::vector<double> costs = order.costs();
        CHECK(costs.size() == static_cast<size_t>(tasks));
        const double sum = std::accumulate(costs.begin(), costs.end(), 0.0);
        if (p.causal) CHECK(costs.back() * static_cast<double>(tasks) < sum);  // short ones come last
        CHECK(order.balance() >= 1);
      }
    }
  }
}

// The least load of the busiest worker over the mean that any order could reach, at the least: one worker gets k + 1 of
// the largest k * workers + 1 tasks.
double least_balance(std::vector<double> costs, int64_t workers) {
  std::sort(costs.begin(), costs.end(), std::greater<>());
  double sum = 0, least = 0;
  for (const double cost : costs) sum += cost;
  const auto step = static_cast<size_t>(workers);
  for (size_t k = 0; k * step < costs.size(); ++k) {
    double load = 0;
    for (size_t i = 0; i <= k; ++i) load += costs[k * step - i];
    least = std::max(least, load);
  }
  return std::max(1.0, least * static_cast<double>(workers) / sum);
}

// The rows of workloads.txt on machines that are larger than this one. A row has enough work for so many workers
// where each gets 20 MFLOP or reads 1 MB of K and V (a tenth of a millisecond and more), and four tasks of the smallest
// size (one panel, one chunk), and tasks of that size can be spread evenly at all. Not so: sdxl_self with AVX-512 on 256
// (3.4 panels of 48 rows each, 1.2 at best), gpt2_small on 128 (1.07), dec_mqa_16k on 64 (32 chunks of 512 keys; with
// chunks of 256 keys decoding was 3 to 18 % slower on two threads).
TEST_CASE("the load is balanced where there is enough work") {
  std::ifstream file(MH_WORKLOADS_FILE);
  std::vector<std::string> enough;
  for (std::string line; std::getline(file, line);) {
    if (line.empty() || line[0] == '#') continue;
    std::istringstream words(line);
    std::string name;
    mh_problem p{};
    p.struct_size = sizeof p;
    words >> name >> p.batch >> p.heads >> p.kv_heads >> p.q_len >> p.kv_len >> p.head_dim >> p.causal;
    REQUIRE(bool(words));
    for (const kernel_table* table : tables()) {
      const plan plan = make_plan(validate(p), *table, int64_t{2} << 20);
      for (const int64_t workers : {64, 128, 256}) {
        const schedule order(plan, workers);
        const double balance = order.balance(), share = 1 / static_cast<double>(workers);
        const double least = least_balance(schedule(plan, int64_t{1} << 20).costs(), workers);
        CAPTURE(name);
        CAPTURE(describe(plan, false, workers));
        CHECK(balance >= 1);
        CHECK(balance <= 1.2 * least);
        if (plan.flops * share < 20e6 && plan.bytes * share < 1e6) continue;
        if (most_tasks(plan) < 4 * workers || least > 1.05) continue;
        CHECK(balance <= 1.051);
        enough.push_back(name + "@" + table->isa + "x" + std::to_string(workers));
      }
    }
  }
  // The rule lets the large rows in.
  const std::vector<const kernel_table*> all = tables();
  for (const char* isa : {"avx512", "avx2"}) {
    if (std::none_of(all.begin(), all.end(), [&](const kernel_table* t) { return isa == std::string(t->isa); }))
      continue;
    for (const char* row : {"llama8b_2k", "gpt3_512"})
      for (const char* workers : {"x64", "x128", "x256"})
        CHECK(std::count(enough.begin(), enough.end(), row + std::string("@") + isa + workers) == 1);
    for (const char* row : {"sdxl_self@", "dec_llama_32k@"})
      for (const char* workers : {"x64", "x128"})
        CHECK(std::count(enough.begin(), enough.end(), row + std::string(isa) + workers) == 1);
    for (const char* row : {"gpt2_small@", "gpt2_large@", "dec_llama_b8@"})
      CHECK(std::count(enough.begin(), enough.end(), row + std::string(isa) + "x64") == 1);
  }
}

TEST_CASE("the balance of more tasks than are played through is bounded") {
  const plan small = plan_of("f32 b1 h8 q4096 kv4096 d64 causal");
  const plan large = plan_of("f32 b1000 h96 q4096 kv4096 d64 causal");
  CHECK(schedule(small, 1).balance() == 1);
  CHECK(schedule(small, 16).balance() < 1.05);
  CHECK((schedule(large, 256).balance() >= 1 && schedule(large, 256).balance() < 1.01));
  CHECK(schedule(plan_of("f32 b1 h8 q0 kv10 d64"), 4).balance() == 1);
}

TEST_CASE("threads have shares where cores keep their own in cache, or write beside each other") {
  const auto threads = [](const char* line) { return plan_of(line).share_threads; };
  // 2 x 12 x 1024 x 64 x 4 bytes and a little, in twice the L2 of so many cores.
  const auto least = static_cast<int64_t>(6.3e6 / (2 * static_cast<double>(l2))) + 1;
  CHECK(threads("f32 b1 h12 q1 kv1024 d64") == least);
  CHECK(threads("bf16 b1 h12 q1 kv1024 d64") == least / 2);
  CHECK(threads("f32 b1 h1 q1 kv16 d64") == 1);
  CHECK(threads("f32 b1 h16 q384 kv384 d64") < 1000);
  CHECK(threads("f32 b1 h12 q64 kv1024 d64 bias") > threads("f32 b1 h12 q64 kv1024 d64"));
  for (const char* more : {" causal", " window=10,0", " window=-1,10"})
    CHECK(threads((std::string("f32 b1 h12 q8 kv1024 d64 align=br") + more).c_str()) == INT64_MAX);
  CHECK(threads("f32 b1 h20 q448 kv1500 d64") == INT64_MAX);  // arithmetic
  // Heads side by side, where rows are many; causal too, if workers have several heads each, which then come one by one.
  CHECK(threads("f32 b16 h12 q128 kv128 d64") > 2);
  CHECK(threads("f32 b16 h12 q128 kv128 d64 bshd") == 1);
  CHECK(threads("f32 b16 h12 q128 kv128 d64 causal bshd") == 1);
  CHECK(threads("f32 b1 h12 q1024 kv1500 d64 bshd") == INT64_MAX);
  CHECK(threads("f32 b16 h12 q384 kv384 d64 bshd") > 2);
  CHECK(threads("f32 b8 h32 q1 kv4096 d64 bshd") > 2);
  const plan causal = plan_of("f32 b2 h8 q96 kv96 d64 causal bshd");
  CHECK(schedule(causal, 4).in_shares());
  CHECK(!schedule(causal, 1).in_shares());
  CHECK(!schedule(causal, 5).in_shares());
  CHECK(!schedule(causal, 3).in_shares());  // 16 heads are not as many for each
  const schedule order(causal, 4);
  for (int64_t i = 1; i < order.tasks(); ++i) {
    const kernel_task before = order.at(i - 1), now = order.at(i);
    CHECK(before.batch * 8 + before.kv_head_begin <= now.batch * 8 + now.kv_head_begin);
  }
}

TEST_CASE("tasks that cost the same come head by head, others the longest of all heads first at the end") {
  for (const kernel_table* table : tables()) {
    CAPTURE(table->isa);
    const auto plan_for = [&](int64_t rows, const char* more) {
      const std::string q = std::to_string(rows);
      return make_plan(problem_of("f64 b1 h4 q" + q + " kv" + q + " d64" + more), *table, l2);  // one route for all
    };
    const auto by_heads = [](const plan& plan) {
      const schedule order(plan, 8);
      std::vector<int64_t> heads;
      for (int64_t i = 0; i < order.tasks(); ++i) heads.push_back(order.at(i).kv_head_begin);
      return std::ranges::is_sorted(heads) && heads.back() == 3;
    };
    const int64_t panel = plan_for(600, "").panel_rows;
    CHECK(by_heads(plan_for(16 * panel, "")));
    CHECK(!by_heads(plan_for(16 * panel, " causal")));
    for (const int64_t panels : {4, 16, 17, 20, 50})  // the last task of each head is short
      CHECK(!by_heads(plan_for(panels * panel + panel / 2, "")));
  }
}

// How often each item is taken when `workers` take in turn until nothing is left.
std::vector<int> taken_in_turn(int64_t items, int64_t workers, const dealing& how) {
  deal all(items, workers, how);
  std::vector<int> taken(static_cast<size_t>(items), 0);
  std::vector<bool> done(static_cast<size_t>(workers), false);
  for (int64_t left = workers; left > 0;) {
    for (int64_t w = 0; w < workers; ++w) {
      if (done[static_cast<size_t>(w)]) continue;
      deal::run run{};
      if (!all.take(w, run)) {
        done[static_cast<size_t>(w)] = true;
        --left;
        continue;
      }
      REQUIRE((run.begin < run.end && run.end <= items));
      for (int64_t i = run.begin; i < run.end; ++i) ++taken[static_cast<size_t>(i)];
    }
  }
  return taken;
}

TEST_CASE("each item is dealt once") {
  for (const int64_t items : {1, 2, 3, 7, 16, 63, 64, 65, 100, 1000}) {
    for (const int64_t workers : {2, 3, 16, 64, 65, 200}) {
      for (const int64_t step : {1, 3}) {
        for (const bool shares : {false, true}) {
          for (const bool in_halves : {false, true}) {
            INFO(items, " items, ", workers, " workers, step ", step, shares ? ", shares" : "",
                 in_halves ? ", halves" : "");
            const std::vector<int> taken = taken_in_turn(items, workers, {step, shares, in_halves});
            CHECK(std::ranges::all_of(taken, [](int times) { return times == 1; }));
          }
        }
      }
    }
  }
}

TEST_CASE("items dealt in order are taken in order, in halves fewer and fewer") {
  const auto runs = [](int64_t items, int64_t workers, const dealing& how, int64_t seat) {
    deal all(items, workers, how);
    std::vector<int64_t> ends;
    for (deal::run run{}; all.take(seat, run);) {
      CHECK(run.begin == (ends.empty() ? 0 : ends.back()));
      ends.push_back(run.end);
    }
    return ends;
  };
  CHECK(runs(5, 2, {2, false, false}, 1) == std::vector<int64_t>{2, 4, 5});
  CHECK(runs(16, 2, {1, false, true}, 0) == std::vector<int64_t>{4, 7, 9, 10, 11, 12, 13, 14, 15, 16});
  CHECK(runs(16, 1, {1, true, true}, 0) == std::vector<int64_t>{8, 12, 14, 15, 16});
}

TEST_CASE("a thread has the same share in every call, and then what is left of others'") {
  for (const int64_t items : {16, 17, 35, 1000}) {
    for (const int64_t seat : {0, 1, 3}) {
      deal all(items, 4, {1, true, false});
      std::vector<int64_t> order;
      for (deal::run run{}; all.take(seat, run);) order.push_back(run.begin);
      REQUIRE(static_cast<int64_t>(order.size()) == items);
      // Neighbours, from its quarter on, around.
      CHECK(order[0] == items * seat / 4);
      for (size_t i = 1; i < order.size(); ++i) CHECK(order[i] == (order[i - 1] + 1) % items);
    }
  }
  // What is left of a share that another has begun; one that nobody comes for is done by who is left.
  deal all(8, 4, {1, true, false});
  deal::run run{};
  CHECK((all.take(2, run) && run.begin == 4));
  CHECK((all.take(1, run) && run.begin == 2));
  CHECK((all.take(1, run) && run.begin == 3));
  CHECK((all.take(1, run) && run.begin == 5));
  CHECK((all.take(1, run) && run.begin == 6));
  CHECK((all.take(6, run) && run.begin == 7));  // threads beyond the shares have one as well
  CHECK((all.take(0, run) && run.begin == 0));
  CHECK((all.take(3, run) && run.begin == 1));
  CHECK(!all.take(0, run));
}

TEST_CASE("threads that take at once take each item once") {
  constexpr int64_t items = 20000;
  const auto check = [](int64_t workers, const dealing& how) {
    deal all(items, workers, how);
    std::vector<std::atomic<int>> taken(items);
    std::vector<std::thread> pool;
    for (int64_t w = 0; w < workers; ++w) {
      pool.emplace_back([&, w] {
        for (deal::run run{}; all.take(w, run);)
          for (int64_t i = run.begin; i < run.end; ++i) ++taken[static_cast<size_t>(i)];
      });
    }
    for (std::thread& thread : pool) thread.join();
    CHECK(std::ranges::all_of(taken, [](const std::atomic<int>& times) { return times == 1; }));
  };
  for (const int64_t workers : {3, 6, 70})
    for (const int64_t step : {1, 3})
      for (const bool shares : {false, true})
        for (const bool in_halves : {false, true}) check(workers, {step, shares, in_halves});
}

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
    CHECK((t.lanes == base.lanes && t.dtypes == base.dtypes && t.read == base.read));
    for (int32_t i = 0; i < t.dtypes; ++i) {
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
  set_max_threads(0);
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
          m.gate.fetch_add(0);
        },
        &all);
    (void)all.gate.load(std::memory_order_acquire);
    if (all.here < threads && attempts < 50) continue;  // whose threads did not come in time are left out
    REQUIRE(all.here == threads);
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

TEST_CASE("the floating-point state stays the caller's, and does not matter") {
  const uint64_t own = fp_state();
  for (const char* text : {"f32 b2 h4/2 q130 kv300 d64 causal align=br lse weights meanw colsums",
                           "f32 b1 h8/2 q1 kv5000 d64 data=denormal lse", "f32 b1 h2 q5 kv9 d8",
                           "f64 b1 h2 q5 kv9 d48"}) {  // 1 / sqrt(48) is rounded up, and its product with log2(e) down
    INFO(std::string(text));
    test_case c(parse_problem(text));
    const plan plan = make_plan(c.p, current_isa(), l2);
    const output_bits want = run_bits(c, plan, exec_of(1));
    for (const uint64_t state : fp_states) {
      uint64_t after = 0;
      for (const int32_t threads : {1, 0}) {
        c.clear_outputs();
        const mh_exec exec = exec_of(threads);
        set_fp_state(state);
        const problem checked = validate(c.line.problem);
        const problem_text told = to_text(checked);
        run(make_plan(checked, current_isa(), l2), c.t, exec);
        after = fp_state();
        set_fp_state(own);
        CHECK(std::string(told.text).find("scale") == std::string::npos);
        CHECK(after == state);
        CHECK(output_bits{c.output_bytes()} == want);
      }
      // The host's own threads, each in that state.
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
