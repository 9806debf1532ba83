// manyhead.hpp as a C++ program uses it. What the C functions compute is checked elsewhere; here, that the view hands
// them the right thing, throws what they say, and refuses shapes that do not agree.
#include "manyhead/manyhead.hpp"

#include <doctest/doctest.h>

#include <pthread.h>
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>
#include <vector>

#include "calls.hpp"
#include "host_fp_state.hpp"
#include "random_numbers.hpp"

namespace {

using manyhead::test::numbers;
using manyhead::test::random_bits;

template <typename Function>
std::string thrown_by(Function&& function, mh_status expected = MH_INVALID_ARGUMENT) {
  try {
    function();
  } catch (const manyhead::error& e) {
    CHECK(e.status() == expected);
    return e.what();
  }
  return "nothing was thrown";
}

bool has(const std::string& text, const char* part) { return text.find(part) != text.npos; }

constexpr int64_t B = 2, H = 4, G = 2, M = 3, N = 5, D = 8, V = 6;

struct arrays {
  std::vector<float> q = numbers(B * H * M * D, 1), k = numbers(B * G * N * D, 2), v = numbers(B * G * N * V, 3);
  std::vector<float> out = std::vector<float>(B * H * M * V, NAN);

  manyhead::arguments<float> arguments() {
    return {.q = {q, {B, H, M, D}}, .k = {k, {B, G, N, D}}, .v = {v, {B, G, N, V}}, .out = {out, {B, H, M, V}}};
  }
};

}  // namespace

TEST_CASE("the example of the header") {
  std::vector<float> q(2 * 8 * 128 * 64), k(2 * 2 * 128 * 64), v(k), out(q.size());  // and fill them
  v.assign(v.size(), 3.0f);
  manyhead::arguments<float> a{
      .q = {q, {2, 8, 128, 64}},  // [batch, heads, q_len, head_dim]
      .k = {k, {2, 2, 128, 64}},  // [batch, kv_heads, kv_len, head_dim]
      .v = {v, {2, 2, 128, 64}},  // [batch, kv_heads, kv_len, v_dim]
      .out = {out, {2, 8, 128, 64}},
      .causal = true,
  };
  manyhead::attention(a);  // throws manyhead::error
  CHECK(out.front() == doctest::Approx(3));
  CHECK(out.back() == doctest::Approx(3));

  out.assign(out.size(), 0.0f);
  manyhead::plan plan(a);  // the same in two steps: once the plan,
  plan.run(a);             // many times the run, also from several threads, with other data of the same layout
  CHECK(out.front() == doctest::Approx(3));
  CHECK(has(plan.describe(), "f32 b2 h8/2 q128 kv128 d64 causal"));
  CHECK(has(plan.describe(MH_FORMAT_JSON), "{"));
  CHECK(plan.workspace_size(1) <= plan.workspace_size(8));
}

TEST_CASE("arguments become the problem and the tensors of the C interface") {
  arrays x;
  manyhead::arguments<float> a = x.arguments();
  const auto mask = std::vector<uint8_t>(H * N, 1), key_mask = std::vector<uint8_t>(B * N, 1);
  const auto bias = numbers(M * N, 4), slopes = numbers(B * H, 5), sinks = numbers(H, 6);
  const std::vector<int32_t> used{5, 4}, offsets{2, 1};
  std::vector<float> lse(B * H * M), weights(B * H * M * N), mean(B * M * N), sums(B * H * N), scores(weights.size());
  a.scale = 0.0;
  a.softcap = 3;
  a.fast_exp = true;
  a.causal = true;
  a.align = MH_ALIGN_OFFSET;
  a.window_left = 4;
  a.mask = {mask, {1, H, 1, N}};
  a.bias = {bias, {1, 1, M, N}};
  a.key_mask = {key_mask, {B, N}};
  a.seqused_k = used;
  a.q_offsets = offsets;
  a.alibi_slopes = slopes;
  a.alibi_mode = MH_ALIBI_SIGNED;
  a.sinks = sinks;
  a.lse = {lse, {B, H, M}};
  a.lse_base = MH_LSE_BASE2;
  a.weights = {weights, {B, H, M, N}};
  a.mean_weights = {mean, {B, M, N}};
  a.column_sums = {sums, {B, H, N}};
  a.scores = {scores, {B, H, M, N}};
  a.scores_stage = MH_SCORES_BIASED;

  const mh_problem p = a.problem();
  CHECK(p.struct_size == sizeof p);
  CHECK(p.kv_heads == G);
  CHECK(p.v_dim == V);
  CHECK(p.flags == (MH_FLAG_SCALE | MH_FLAG_STRIDES | MH_FLAG_WINDOW | MH_FLAG_FAST_EXP));
  CHECK(p.window_right == -1);
  CHECK(p.mask_strides[0] == 0);
  CHECK(p.mask_strides[1] == N);
  CHECK(p.mask_strides[2] == 0);
  CHECK(p.bias_strides[1] == 0);
  CHECK(p.bias_strides[2] == N);
  CHECK(p.alibi_batch_stride == H);
  CHECK(p.q_strides[0] == H * M * D);
  const mh_tensors t = a.tensors();
  CHECK(t.seqused_k == used.data());
  CHECK(t.scores == scores.data());
  manyhead::attention(a);
  for (int64_t row = 0; row < B * H * M; ++row) {  // weights and the sink share the denominator that lse tells
    double sum = std::exp2(std::log2(std::exp(1.0)) * sinks[static_cast<size_t>(row / M % H)] -
                           static_cast<double>(lse[static_cast<size_t>(row)]));
    for (int64_t j = 0; j < N; ++j) sum += static_cast<double>(weights[static_cast<size_t>(row * N + j)]);
    CHECK(sum == doctest::Approx(1));
  }

  a.alibi_slopes = std::span(slopes).first(H);
  CHECK(a.problem().alibi_batch_stride == 0);
}

TEST_CASE("other element and index types") {
  const std::vector<manyhead::bf16> ones(4, manyhead::bf16{0x3f80});
  std::vector<manyhead::bf16> out(4);
  manyhead::attention(manyhead::arguments<manyhead::bf16>{
      .q = {ones, {1, 1, 2, 2}}, .k = {ones, {1, 1, 2, 2}}, .v = {ones, {1, 1, 2, 2}}, .out = {out, {1, 1, 2, 2}}});
  CHECK(out == ones);

  const std::vector<double> x(4, 2.0);
  const std::vector<int64_t> used{1};
  std::vector<double> result(4), weights(4);
  const manyhead::arguments<double, int64_t> a{.q = {x, {1, 1, 2, 2}},
                                               .k = {x, {1, 1, 2, 2}},
                                               .v = {x, {1, 1, 2, 2}},
                                               .out = {result, {1, 1, 2, 2}},
                                               .seqused_k = used,
                                               .weights = {weights, {1, 1, 2, 2}}};
  CHECK(a.problem().index_type == MH_INDEX_I64);
  CHECK(a.problem().dtype == MH_DTYPE_F64);
  manyhead::attention(a, manyhead::with_threads(1));
  CHECK(result == x);
  CHECK(weights == std::vector<double>{1, 0, 1, 0});
  CHECK(manyhead::dtype_of<manyhead::f16> == MH_DTYPE_F16);
}

TEST_CASE("strided views") {
  arrays x, y;
  manyhead::attention(x.arguments());
  // out as [batch, q_len, heads, v_dim]
  manyhead::arguments<float> a = y.arguments();
  a.out = {y.out.data(), {B, H, M, V}, {M * H * V, V, H * V, 1}};
  manyhead::attention(a);
  for (int64_t b = 0; b < B; ++b) {
    for (int64_t h = 0; h < H; ++h) {
      for (int64_t i = 0; i < M * V; ++i) {
        const int64_t row = i / V, column = i % V;
        REQUIRE(y.out[static_cast<size_t>(((b * M + row) * H + h) * V + column)] ==
                x.out[static_cast<size_t>((b * H + h) * M * V + i)]);
      }
    }
  }
}

TEST_CASE("what is wrong is thrown") {
  arrays x;
  const auto changed = [&](auto change) {
    return thrown_by([&] {
      manyhead::arguments<float> a = x.arguments();
      change(a);
      manyhead::attention(a);
    });
  };
  CHECK(has(changed([](auto& a) { a.softcap = -2; }), "softcap is -2"));
  CHECK(has(changed([](auto& a) { a.causal = true; }), "MH_ALIGN_TOP_LEFT or MH_ALIGN_BOTTOM_RIGHT"));
  CHECK(has(changed([](auto& a) { a.v.dims[2] = N - 1; }), "v has shape"));
  CHECK(has(changed([](auto& a) { a.v.dims[2] = 1; }), "v has shape"));  // of what is optional a size of 1 is broadcast
  CHECK(has(changed([](auto& a) { a.k.dims[3] = 1; }), "k has shape"));
  CHECK(has(changed([](auto& a) { a.out.dims[1] = 1; }), "out has shape"));
  CHECK(has(changed([](auto& a) { a.k.dims[1] = 0; }), "k.dims[1]"));
  CHECK(has(changed([](auto& a) { a.k = {}; }), "k is missing"));
  CHECK(has(changed([](auto& a) { a.out.data = nullptr; }), "out is NULL"));
  const std::vector<float> three(3);
  const std::vector<int32_t> none;
  CHECK(has(changed([&](auto& a) { a.seqused_k = none; }), "seqused_k has 0 elements, must have 2"));
  CHECK(has(changed([&](auto& a) { a.sinks = three; }), "sinks has 3 elements, must have 4"));
  CHECK(has(changed([&](auto& a) { a.alibi_slopes = three; }), "alibi_slopes has 3 elements"));
  CHECK(has(thrown_by([&] { manyhead::view<const float, 2>(three, {2, 2}); }), "shape [2, 2] does not fit 3 elements"));
  CHECK(has(thrown_by([&] { manyhead::view<const float, 2>(three, {-1, 1}); }), "shape [-1, 1]"));
  CHECK(has(thrown_by([&] { manyhead::view<const float, 3>(three, {INT64_MAX, INT64_MAX, 2}); }), "does not fit"));
  CHECK(has(thrown_by([&] { manyhead::check(mh_set_isa("abacus")); }), "abacus"));
  CHECK(std::isnan(x.out.front()));

  const manyhead::plan plan(x.arguments());
  manyhead::arguments<float> other = x.arguments();
  other.scale = 0.5;
  CHECK(has(thrown_by([&] { plan.run(other); }), "more than pointers"));
  const manyhead::plan of_problem(x.arguments().problem());
  CHECK(has(thrown_by([&] { of_problem.run(x.arguments()); }), "made of an mh_problem"));
  mh_exec exec = manyhead::with_threads(-1);
  CHECK(has(thrown_by([&] { plan.run(x.arguments(), exec); }), "threads is -1"));
  CHECK(std::isnan(x.out.front()));
}

TEST_CASE("plans and layers move, and C structs get their defaults") {
  static_assert(std::is_nothrow_move_constructible_v<manyhead::plan> && !std::is_copy_constructible_v<manyhead::plan>);
  static_assert(std::is_nothrow_move_constructible_v<manyhead::layer> &&
                !std::is_copy_constructible_v<manyhead::layer>);
  arrays x;
  manyhead::plan first(x.arguments());
  const manyhead::plan second = std::move(first);
  CHECK(second.get() != nullptr);
  second.run(x.arguments());
  CHECK_FALSE(std::isnan(x.out.front()));

  constexpr int64_t E = 4;
  std::vector<float> identity(E * E), tokens = numbers(E, 9), out(E);
  for (size_t i = 0; i < E; ++i) identity[i * E + i] = 1;
  auto weights = manyhead::make<mh_mha_weights>();
  weights.embed_dim = E;
  weights.heads = 2;
  weights.w_q = weights.w_k = weights.w_v = weights.w_o = identity.data();
  const manyhead::layer layer(weights);
  auto call = manyhead::make<mh_mha_call>();
  call.batch = call.q_len = call.kv_len = 1;  // one token attends itself alone
  call.x_q = tokens.data();
  call.out = out.data();
  layer.run(call);
  for (size_t i = 0; i < E; ++i) CHECK(out[i] == doctest::Approx(tokens[i]));
  weights.heads = 3;
  CHECK(has(thrown_by([&] { manyhead::layer bad(weights); }), "heads"));
}

TEST_CASE("lines and profiles") {
  const mh_problem problem = manyhead::parse_problem("f32 b2 h4/2 q3 kv5 d8");
  CHECK((problem.kv_heads == 2 && problem.kv_len == 5));
  CHECK(manyhead::plan(problem).describe().starts_with("f32 b2 h4/2 q3 kv5 d8: attention/f32/"));
  CHECK(has(thrown_by([] { manyhead::parse_problem("f32 b2 h4/2 q3 kv5 e8"); }), "e8"));

  arrays x;
  {
    manyhead::profile profile;
    manyhead::attention(x.arguments());
    CHECK(has(thrown_by([] { manyhead::profile second; }), "a profile is running"));
    CHECK(profile.end().find("\"seconds\"") != std::string::npos);
    CHECK(profile.end(MH_PROFILE_TRACE).find("\"traceEvents\"") != std::string::npos);
  }
  {
    const manyhead::profile dropped;
  }
  const manyhead::profile again;
}

// Planned anew each time: of 1 / sqrt(48), a scale, the last bit depends on the rounding, and that of its product with log2(e).
struct planned_call : manyhead::test::attention_call {
  using attention_call::attention_call;
  mh_status run(const mh_exec& exec) {
    const manyhead::plan plan(problem);
    const mh_tensors t = tensors();
    return mh_plan_run(plan.get(), &t, &exec);
  }
};

// A layer, made anew each time, and a call of it.
struct made_call {
  static constexpr int64_t embed = 192;
  int32_t dtype;
  int64_t length;
  std::vector<char> w = random_bits(dtype, embed* embed, 4), x = random_bits(dtype, length* embed, 5), out = x;

  mh_status run(const mh_exec& exec) {
    std::fill(out.begin(), out.end(), '\xff');
    mh_mha_weights weights = manyhead::make<mh_mha_weights>();
    weights.dtype = dtype;
    weights.embed_dim = embed, weights.heads = 3;
    weights.w_q = weights.w_k = weights.w_v = weights.w_o = w.data();
    weights.b_q = weights.b_o = w.data();
    mh_mha_call call = manyhead::make<mh_mha_call>();
    call.batch = 1, call.q_len = call.kv_len = length;
    call.x_q = x.data(), call.out = out.data();
    return mh_mha_run(manyhead::layer(weights).get(), &call, &exec);
  }
};

constexpr mh_dtype dtypes[] = {MH_DTYPE_F32, MH_DTYPE_F64, MH_DTYPE_BF16, MH_DTYPE_F16};

TEST_CASE("a bias of another type than q, k and v") {
  const auto words = [](const std::vector<float>& x) {
    std::vector<manyhead::bf16> result;
    for (const float value : x) result.push_back(static_cast<manyhead::bf16>(std::bit_cast<uint32_t>(value) >> 16));
    return result;
  };
  const arrays x;
  const std::vector<manyhead::bf16> q = words(x.q), k = words(x.k), v = words(x.v);
  const std::vector<float> bias = numbers(M * N, 4);
  std::vector<manyhead::bf16> narrow = words(bias), out(x.out.size()), wanted(out);
  std::vector<float> wide;  // the same numbers
  for (const manyhead::bf16 word : narrow) wide.push_back(std::bit_cast<float>(static_cast<uint32_t>(word) << 16));
  const auto run = [&]<typename Bias>(const std::vector<Bias>& values, std::vector<manyhead::bf16>& to) {
    manyhead::attention(manyhead::arguments<manyhead::bf16, int32_t, Bias>{.q = {q, {B, H, M, D}},
                                                                           .k = {k, {B, G, N, D}},
                                                                           .v = {v, {B, G, N, V}},
                                                                           .out = {to, {B, H, M, V}},
                                                                           .bias = {values, {1, 1, M, N}}});
  };
  run(wide, out);
  run(narrow, wanted);
  CHECK(out == wanted);
}

TEST_CASE("partial results are merged") {
  arrays x;
  manyhead::arguments<float> a = x.arguments();
  std::vector<float> lse(B * H * M), outs(2 * B * H * M * V), lses(2 * B * H * M), out(x.out.size()),
      joined(lse.size());
  a.lse = {lse, {B, H, M}};
  manyhead::attention(a);
  const std::vector<float> whole = x.out, whole_lse = lse;
  const int64_t first = 2;  // keys of one part, the others are the other's
  for (int64_t part = 0; part < 2; ++part) {
    const int64_t begin = part == 0 ? 0 : first, keys = part == 0 ? first : N - first;
    a.k = {x.k.data() + begin * D, {B, G, keys, D}, {G * N * D, N * D, D, 1}};
    a.v = {x.v.data() + begin * V, {B, G, keys, V}, {G * N * V, N * V, V, 1}};
    manyhead::attention(a);
    std::copy(x.out.begin(), x.out.end(), outs.begin() + part * std::ssize(x.out));
    std::copy(lse.begin(), lse.end(), lses.begin() + part * std::ssize(lse));
  }
  const manyhead::states<float> s{.outs = {outs, {2, B, H, M, V}},
                                  .lses = {lses, {2, B, H, M}},
                                  .out = {out, {B, H, M, V}},
                                  .lse = {joined, {B, H, M}}};
  manyhead::merge(s);
  for (size_t i = 0; i < out.size(); ++i) CHECK(out[i] == doctest::Approx(whole[i]).epsilon(1e-5));
  for (size_t i = 0; i < lse.size(); ++i) CHECK(joined[i] == doctest::Approx(whole_lse[i]).epsilon(1e-5));
  manyhead::states<float> wrong = s;
  wrong.lses.dims[3] = M + 1;
  CHECK(has(thrown_by([&] { manyhead::merge(wrong); }), "lses has shape [2, 2, 4, 4], must be [2, 2, 4, 3]"));
}

TEST_CASE_TEMPLATE("partial results of the largest number are merged to it", T, float, double) {
  constexpr int64_t states = 7, rows = 500;  // shares are rounded: those of some rows add up to more than 1
  constexpr T largest = std::numeric_limits<T>::max();
  const std::vector<float> random = numbers(states * rows, 3);
  const std::vector<T> lses(random.begin(), random.end());
  std::vector<T> outs(states * rows * 2), out(rows * 2);
  for (size_t i = 0; i < outs.size(); ++i) outs[i] = i % 2 == 0 ? largest : -largest;
  manyhead::merge(manyhead::states<T>{
      .outs = {outs, {states, 1, 1, rows, 2}}, .lses = {lses, {states, 1, 1, rows}}, .out = {out, {1, 1, rows, 2}}});
  for (size_t i = 0; i < out.size(); ++i) {
    const T share = out[i] / (i % 2 == 0 ? largest : -largest);
    CHECK(share <= 1);
    CHECK(share > T(0.99999));
  }
}

// In each state that a host may be in, on one thread and on all; and where the host's own function leaves the calling thread in it.
template <typename Call>
void check_fp_state(Call&& call) {
  using namespace manyhead::test;
  const uint64_t own = fp_state();
  REQUIRE(call.run(manyhead::with_threads(1)) == MH_OK);
  const std::vector<char> want = call.out;
  for (const uint64_t state : fp_states) {
    mh_exec of_host = manyhead::with_threads(3);
    of_host.parallel_for = [](void* left, int64_t n, mh_task_fn fn, void* arg) {
      for (int64_t i = 0; i < n; ++i) fn(arg, i);
      set_fp_state(*static_cast<const uint64_t*>(left));
    };
    uint64_t left = state;
    of_host.parallel_ctx = &left;
    for (const mh_exec& exec : {manyhead::with_threads(1), manyhead::with_threads(0), of_host}) {
      set_fp_state(state);
      const mh_status status = call.run(exec);
      const uint64_t after = fp_state();
      set_fp_state(own);
      CHECK(status == MH_OK);
      CHECK(after == state);
      CHECK(call.out == want);
    }
  }
}

TEST_CASE("the floating-point state stays the caller's, and does not matter") {
  for (const char* line : {"f32 b2 h4/2 q130 kv300 d64 causal align=br lse weights", "f32 b1 h2 q5 kv9 d8",
                           "f64 b1 h2 q5 kv9 d48", "bf16 b1 h2 q70 kv90 d64", "f16 b1 h2 q3 kv90 d64"}) {
    INFO(std::string(line));
    check_fp_state(planned_call(line));
  }
  check_fp_state(planned_call("f32 b1 h8/2 q1 kv5000 d64", true));
  for (const mh_dtype dtype : dtypes) {
    for (const int64_t length : {2, 70}) check_fp_state(made_call{dtype, length});
  }
}

#if defined(__linux__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
// How much of its stack a thread needs for this, its own data included.
template <typename Call>
size_t stack_of(Call&& call) {
  constexpr size_t size = 1 << 20;
  constexpr unsigned char untouched = 0xc3;
  std::vector<unsigned char> memory(size + 4096, untouched);
  auto* const stack = memory.data() + (4096 - reinterpret_cast<uintptr_t>(memory.data()) % 4096);
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  REQUIRE(pthread_attr_setstack(&attributes, stack, size) == 0);
  struct work {
    Call& call;
    mh_status status;
  } w{call, MH_INTERNAL_ERROR};
  pthread_t thread;
  const auto body = [](void* given) -> void* {
    auto* const each = static_cast<work*>(given);
    each->status = each->call.run(manyhead::with_threads(1));
    return nullptr;
  };
  REQUIRE(pthread_create(&thread, &attributes, body, &w) == 0);
  pthread_join(thread, nullptr);
  pthread_attr_destroy(&attributes);
  CHECK(w.status == MH_OK);
  return static_cast<size_t>(stack + size -
                             std::find_if(stack, stack + size, [](unsigned char x) { return x != untouched; }));
}

TEST_CASE("calls need no more stack than the header says") {
  for (const mh_dtype dtype : dtypes) {
    for (const char* shape :
         {" b1 h2 q200 kv600 d128 causal align=br softcap=20 mask bias lse weights", " b1 h8/2 q1 kv5000 d64",
          " b2 h8/2 q3 kv300 d128 mask bias lse weights", " b1 h2 q70 kv90 d40"}) {
      const std::string line = mh_dtype_name(dtype) + std::string(shape);
      const size_t used = stack_of(planned_call(line.c_str()));
      INFO(line);
      CHECK(used <= 128 << 10);
    }
    for (const int64_t length : {2, 70}) {
      const size_t used = stack_of(made_call{dtype, length});
      CAPTURE(dtype);
      CAPTURE(length);
      CHECK(used <= 128 << 10);
    }
  }
}
#endif
