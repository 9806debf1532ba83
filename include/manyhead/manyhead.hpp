// manyhead for C++20: a view of manyhead.h with RAII, spans and exceptions. Header only; link with libmanyhead.
//
//   std::vector<float> q(2 * 8 * 128 * 64), k(2 * 2 * 128 * 64), v(k), out(q.size());   // and fill them
//   manyhead::arguments<float> a{
//       .q = {q, {2, 8, 128, 64}},  // [batch, heads, q_len, head_dim]
//       .k = {k, {2, 2, 128, 64}},  // [batch, kv_heads, kv_len, head_dim]
//       .v = {v, {2, 2, 128, 64}},  // [batch, kv_heads, kv_len, v_dim]
//       .out = {out, {2, 8, 128, 64}},
//       .causal = true,
//   };
//   manyhead::attention(a);   // throws manyhead::error
//
//   manyhead::plan plan(a);   // the same in two steps: once the plan,
//   plan.run(a);              // many times the run, also from several threads, with other data of the same layout
//
// What the arguments mean stands in manyhead.h.
#ifndef MANYHEAD_MANYHEAD_HPP
#define MANYHEAD_MANYHEAD_HPP

#if __cplusplus < 201709L && !defined(_MSVC_LANG)
#error "manyhead.hpp needs C++20 (-std=c++20); manyhead.h is for C and any C++"
#endif

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "manyhead/manyhead.h"

namespace manyhead {
inline namespace cpp {  // apart from names inside the library, should someone link both

class error : public std::runtime_error {
 public:
  error(mh_status status, const std::string& text) : std::runtime_error(text), status_(status) {}
  mh_status status() const noexcept { return status_; }

 private:
  mh_status status_;
};

// Throws what mh_last_error() says, unless status is MH_OK. For calls of manyhead.h itself.
inline void check(mh_status status) {
  if (status != MH_OK) throw error(status, mh_last_error());
}

// Any struct of manyhead.h with all defaults: make<mh_problem>(), make<mh_mha_weights>(), make<mh_exec>(), ...
template <typename Struct>
Struct make() noexcept {
  Struct s{};
  s.struct_size = sizeof s;
  return s;
}

// Elements are float, double, or 16 bits that only manyhead looks into.
enum class bf16 : uint16_t {};
enum class f16 : uint16_t {};
template <typename T>
inline constexpr int32_t dtype_of = -1;
template <>
inline constexpr int32_t dtype_of<float> = MH_DTYPE_F32;
template <>
inline constexpr int32_t dtype_of<double> = MH_DTYPE_F64;
template <>
inline constexpr int32_t dtype_of<bf16> = MH_DTYPE_BF16;
template <>
inline constexpr int32_t dtype_of<f16> = MH_DTYPE_F16;

// A strided array in someone's memory; without data it means "none". Strides count elements.
template <typename T, size_t Rank>
struct view {
  using indices = std::array<int64_t, Rank>;

  T* data = nullptr;
  indices dims{};
  indices strides{};

  view() = default;
  view(T* first, const indices& shape, const indices& steps) : data(first), dims(shape), strides(steps) {}
  // Contiguous; throws where `elements` are too few. May be made from a std::vector or std::array.
  view(std::span<T> elements, const indices& shape) : data(elements.data()), dims(shape) {
    int64_t size = 1;
    bool fits = true, empty = false;
    for (size_t i = Rank; i-- > 0;) {
      strides[i] = size;
      fits = fits && dims[i] >= 0 && !__builtin_mul_overflow(size, std::max<int64_t>(dims[i], 1), &size);
      empty = empty || dims[i] == 0;
    }
    if (!fits || (!empty && size > std::ssize(elements))) {
      throw error(MH_INVALID_ARGUMENT,
                  "shape [" + text(dims) + "] does not fit " + std::to_string(elements.size()) + " elements");
    }
  }

  explicit operator bool() const noexcept { return data != nullptr; }

  static std::string text(const indices& dims) {
    std::string result;
    for (const int64_t d : dims) result += (result.empty() ? "" : ", ") + std::to_string(d);
    return result;
  }
};

namespace detail {

// Strides of a view of the shape `dims`, which it must have; of an optional input, which is broadcast where it has 1.
template <typename T, size_t Rank>
void take(const char* name, const view<T, Rank>& a, const std::array<int64_t, Rank>& dims, int64_t* strides) {
  if (a.dims != dims) {
    throw error(MH_INVALID_ARGUMENT,
                std::string(name) + " has shape [" + a.text(a.dims) + "], must be [" + a.text(dims) + "]");
  }
  std::copy(a.strides.begin(), a.strides.end(), strides);
}
template <typename T, size_t Rank>
void take_broadcast(const char* name, view<T, Rank> a, const std::array<int64_t, Rank>& dims, int64_t* strides) {
  for (size_t i = 0; i < Rank; ++i) {
    if (a.dims[i] == 1 && dims[i] != 1) a.dims[i] = dims[i], a.strides[i] = 0;
  }
  take(name, a, dims, strides);
}
// A vector that may be left out. One that is there but empty is none.
template <typename T>
using vector = std::optional<std::span<const T>>;
// Whether it is there: with as many elements as expected.
template <typename T>
bool has_size(const char* name, const vector<T>& a, int64_t expected) {
  if (!a || std::ssize(*a) == expected) return a && expected > 0;
  throw error(MH_INVALID_ARGUMENT, std::string(name) + " has " + std::to_string(a->size()) + " elements, must have " +
                                       std::to_string(expected));
}
template <typename T>
const T* data_of(const vector<T>& a) noexcept {
  return a ? a->data() : nullptr;
}

}  // namespace detail

// float; of double, double.
template <typename T>
using real_of = std::conditional_t<std::is_same_v<T, double>, double, float>;

// Everything about one attention call. T: element of q, k, v, out. Index: int32_t or int64_t. Bias: element of the bias.
template <typename T, typename Index = int32_t, typename Bias = T>
struct arguments {
  static_assert(dtype_of<T> >= 0, "elements are float, double, manyhead::bf16 or manyhead::f16");
  static_assert(std::is_same_v<Index, int32_t> || std::is_same_v<Index, int64_t>);
  static_assert(dtype_of<Bias> >= 0, "so are those of a bias");
  using real = real_of<T>;

  view<const T, 4> q{};
  view<const T, 4> k{};
  view<const T, 4> v{};
  view<T, 4> out{};

  std::optional<double> scale{};  // none: 1 / sqrt(head_dim)
  double softcap = 0;
  bool fast_exp = false;  // MH_FLAG_FAST_EXP
  bool causal = false;
  mh_align align = MH_ALIGN_UNSET;
  int64_t q_offset = 0;
  int64_t window_left = -1;  // -1: no bound
  int64_t window_right = -1;

  // Optional inputs. A dimension of 1 is broadcast.
  view<const uint8_t, 4> mask{};
  view<const Bias, 4> bias{};
  view<const uint8_t, 2> key_mask{};
  detail::vector<Index> seqused_k{};    // [batch]
  detail::vector<Index> q_offsets{};    // [batch], with MH_ALIGN_OFFSET
  detail::vector<real> alibi_slopes{};  // [heads] or [batch, heads]
  mh_alibi_mode alibi_mode = MH_ALIBI_ABS;
  detail::vector<real> sinks{};  // [heads]

  // Optional outputs.
  view<real, 3> lse{};
  mh_lse_base lse_base = MH_LSE_NATURAL;
  view<real, 4> weights{};
  view<real, 3> mean_weights{};
  view<real, 3> column_sums{};
  view<real, 4> scores{};
  mh_score_stage scores_stage = MH_SCORES_RAW;

  // What manyhead.h is given. Throws where a shape does not agree with those of q, k and v.
  mh_problem problem() const {
    mh_problem p = make<mh_problem>();
    p.batch = q.dims[0], p.heads = q.dims[1], p.q_len = q.dims[2], p.head_dim = q.dims[3];
    p.kv_heads = k.dims[1], p.kv_len = k.dims[2], p.v_dim = v.dims[3];
    if (p.kv_heads < 1) throw error(MH_INVALID_ARGUMENT, "k is missing, or k.dims[1] is not at least 1");
    if (p.v_dim < 1) throw error(MH_INVALID_ARGUMENT, "v is missing, or v.dims[3] is not at least 1");
    p.dtype = dtype_of<T>, p.bias_dtype = dtype_of<Bias>;
    p.index_type = std::is_same_v<Index, int64_t> ? MH_INDEX_I64 : MH_INDEX_I32;
    p.flags = MH_FLAG_STRIDES | MH_FLAG_WINDOW | (scale ? MH_FLAG_SCALE : 0u) | (fast_exp ? MH_FLAG_FAST_EXP : 0u);
    p.scale = scale.value_or(0.0);
    p.softcap = softcap;
    p.causal = causal;
    p.align = align, p.q_offset = q_offset;
    p.window_left = window_left, p.window_right = window_right;
    p.alibi_mode = alibi_mode, p.lse_base = lse_base, p.scores_stage = scores_stage;
    const int64_t b = p.batch, h = p.heads, g = p.kv_heads, m = p.q_len, n = p.kv_len;
    detail::take("q", q, {b, h, m, p.head_dim}, p.q_strides);
    detail::take("k", k, {b, g, n, p.head_dim}, p.k_strides);
    detail::take("v", v, {b, g, n, p.v_dim}, p.v_strides);
    detail::take("out", out, {b, h, m, p.v_dim}, p.out_strides);
    if (mask) p.inputs |= MH_INPUT_MASK, detail::take_broadcast("mask", mask, {b, h, m, n}, p.mask_strides);
    if (bias) p.inputs |= MH_INPUT_BIAS, detail::take_broadcast("bias", bias, {b, h, m, n}, p.bias_strides);
    if (key_mask)
      p.inputs |= MH_INPUT_KEY_MASK, detail::take_broadcast("key_mask", key_mask, {b, n}, p.key_mask_strides);
    if (detail::has_size("seqused_k", seqused_k, b)) p.inputs |= MH_INPUT_SEQUSED_K;
    if (detail::has_size("q_offsets", q_offsets, b)) p.inputs |= MH_INPUT_Q_OFFSET;
    if (detail::has_size("sinks", sinks, h)) p.inputs |= MH_INPUT_SINKS;
    const bool shared_slopes = alibi_slopes && std::ssize(*alibi_slopes) == h;
    if (detail::has_size("alibi_slopes", alibi_slopes, shared_slopes ? h : b * h)) p.inputs |= MH_INPUT_ALIBI;
    if (alibi_slopes && !shared_slopes) p.alibi_batch_stride = h;
    if (lse) p.outputs |= MH_OUTPUT_LSE, detail::take("lse", lse, {b, h, m}, p.lse_strides);
    if (weights) p.outputs |= MH_OUTPUT_WEIGHTS, detail::take("weights", weights, {b, h, m, n}, p.weights_strides);
    if (mean_weights) {
      p.outputs |= MH_OUTPUT_MEAN_WEIGHTS,
          detail::take("mean_weights", mean_weights, {b, m, n}, p.mean_weights_strides);
    }
    if (column_sums) {
      p.outputs |= MH_OUTPUT_COLUMN_SUMS, detail::take("column_sums", column_sums, {b, h, n}, p.column_sums_strides);
    }
    if (scores) p.outputs |= MH_OUTPUT_SCORES, detail::take("scores", scores, {b, h, m, n}, p.scores_strides);
    return p;
  }

  mh_tensors tensors() const noexcept {
    mh_tensors t = make<mh_tensors>();
    t.q = q.data, t.k = k.data, t.v = v.data, t.out = out.data;
    t.mask = mask.data, t.bias = bias.data, t.key_mask = key_mask.data;
    t.seqused_k = detail::data_of(seqused_k), t.q_offset = detail::data_of(q_offsets);
    t.alibi_slopes = detail::data_of(alibi_slopes), t.sinks = detail::data_of(sinks);
    t.lse = lse.data, t.weights = weights.data, t.mean_weights = mean_weights.data;
    t.column_sums = column_sums.data, t.scores = scores.data;
    return t;
  }
};

// A handle of manyhead.h and the function that ends it.
template <auto Destroy>
struct destroyer {
  void operator()(auto* handle) const noexcept { Destroy(handle); }
};

// Exec for at most `threads` threads; 0 = mh_threads().
inline mh_exec with_threads(int32_t threads) noexcept {
  mh_exec exec = make<mh_exec>();
  exec.threads = threads;
  return exec;
}

// The whole text of a function of manyhead.h that fills a buffer as snprintf does: write(buffer, size, &needed).
template <typename Write>
std::string text_of(Write write) {
  size_t needed = 0;
  check(write(nullptr, 0, &needed));
  std::string text(needed - 1, ' ');
  check(write(text.data(), needed, &needed));
  return text;
}

// "f32 b1 h8 q128 kv128 d64 causal" as a problem (mh_problem_parse).
inline mh_problem parse_problem(const std::string& line) {
  auto problem = make<mh_problem>();
  check(mh_problem_parse(line.c_str(), &problem, nullptr));
  return problem;
}

class plan {
 public:
  explicit plan(const mh_problem& problem) : plan_(made_of(problem)) {}
  template <typename T, typename Index, typename Bias>
  explicit plan(const arguments<T, Index, Bias>& a) : of_arguments_(a.problem()), plan_(made_of(*of_arguments_)) {}

  void run(const mh_tensors& tensors, const mh_exec& exec = with_threads(0)) const {
    check(mh_plan_run(plan_.get(), &tensors, &exec));
  }
  // Of a plan made of arguments. Throws where `a` differs from them in more than its pointers.
  template <typename T, typename Index, typename Bias>
  void run(const arguments<T, Index, Bias>& a, const mh_exec& exec = with_threads(0)) const {
    const mh_problem p = a.problem();
    if (!of_arguments_) {
      throw error(MH_INVALID_ARGUMENT,
                  "the plan was made of an mh_problem, which may mean the same in other words: run it "
                  "with mh_tensors, as of arguments.tensors()");
    }
    if (std::memcmp(&p, &*of_arguments_, sizeof p) != 0) {  // it has no padding
      throw error(MH_INVALID_ARGUMENT,
                  "the arguments differ from those that the plan was made of in more than pointers");
    }
    run(a.tensors(), exec);
  }

  size_t workspace_size(int32_t threads = 0) const noexcept { return mh_plan_workspace_size(plan_.get(), threads); }

  std::string describe(mh_format format = MH_FORMAT_LINE) const {
    return text_of([&](char* text, size_t size, size_t* needed) {
      return mh_plan_describe(plan_.get(), format, text, size, needed);
    });
  }

  mh_plan* get() const noexcept { return plan_.get(); }

 private:
  static mh_plan* made_of(const mh_problem& problem) {
    mh_plan* made = nullptr;
    check(mh_plan_create(&problem, &made));
    return made;
  }

  std::optional<mh_problem> of_arguments_;
  std::unique_ptr<mh_plan, destroyer<mh_plan_destroy>> plan_;
};

template <typename T, typename Index, typename Bias>
void attention(const arguments<T, Index, Bias>& a, const mh_exec& exec = with_threads(0)) {
  const mh_problem p = a.problem();
  const mh_tensors t = a.tensors();
  check(mh_attention(&p, &t, &exec));
}

// Partial results over disjoint keys, and where they are joined (mh_merge_states). T: element of outs and out.
template <typename T>
struct states {
  static_assert(dtype_of<T> >= 0, "elements are float, double, manyhead::bf16 or manyhead::f16");
  view<const T, 5> outs{};                // [states, batch, heads, q_len, v_dim]
  view<const real_of<T>, 4> lses{};       // [states, batch, heads, q_len]
  view<T, 4> out{};                       // [batch, heads, q_len, v_dim]
  view<real_of<T>, 3> lse{};              // [batch, heads, q_len], or none
  mh_lse_base lse_base = MH_LSE_NATURAL;  // of lses and lse
};
template <typename T>
void merge(const states<T>& s, const mh_exec& exec = with_threads(0)) {
  mh_merge m = make<mh_merge>();
  const auto [n, b, h, rows, v_dim] = s.outs.dims;
  m.states = n, m.batch = b, m.heads = h, m.q_len = rows, m.v_dim = v_dim;
  m.dtype = dtype_of<T>, m.flags = MH_FLAG_STRIDES, m.lse_base = s.lse_base, m.exec = &exec;
  detail::take("outs", s.outs, {n, b, h, rows, v_dim}, m.outs_strides);
  detail::take("lses", s.lses, {n, b, h, rows}, m.lses_strides);
  detail::take("out", s.out, {b, h, rows, v_dim}, m.out_strides);
  if (s.lse) detail::take("lse", s.lse, {b, h, rows}, m.lse_strides);
  check(mh_merge_states(&m, s.outs.data, s.lses.data, s.out.data, s.lse.data));
}

// The multi-head layer. The weights are copied: their arrays are not needed afterwards.
class layer {
 public:
  explicit layer(const mh_mha_weights& weights) {
    mh_mha* made = nullptr;
    check(mh_mha_create(&weights, &made));
    mha_.reset(made);
  }
  void run(const mh_mha_call& call, const mh_exec& exec = with_threads(0)) const {
    check(mh_mha_run(mha_.get(), &call, &exec));
  }
  mh_mha* get() const noexcept { return mha_.get(); }

 private:
  std::unique_ptr<mh_mha, destroyer<mh_mha_destroy>> mha_;
};

// Profiles all calls of the process while it lives, or until end(). One at a time.
class profile {
 public:
  explicit profile(const mh_profile_options& options = make<mh_profile_options>()) {
    check(mh_profile_begin(&options));
  }
  ~profile() {
    if (running_) mh_profile_end();
  }
  profile(const profile&) = delete;
  profile& operator=(const profile&) = delete;

  // Ends it, the first time, and returns it as text.
  std::string end(mh_profile_format format = MH_PROFILE_SUMMARY) {
    if (running_) check(mh_profile_end());
    running_ = false;
    return text_of(
        [&](char* text, size_t size, size_t* needed) { return mh_profile_describe(format, text, size, needed); });
  }

 private:
  bool running_ = true;
};

}  // namespace cpp
}  // namespace manyhead

#endif  // MANYHEAD_MANYHEAD_HPP
