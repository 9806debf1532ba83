// The streaming softmax: per row the largest score so far, the sum of weights, and the weighted values, for lanes over
// rows.
#pragma once

#include "exponential.hpp"
#include "kernel_api.hpp"

namespace manyhead::MH_ISA {
namespace {

// A row keeps its maximum until a new one exceeds it by 8 in log2 units: then at most 256 times too large, weights lose
// nothing in f32, and most tiles after the first leave the accumulators alone.
inline constexpr double lazy_rescale = 8.0;

// NV vectors of rows, as many as a panel has.
template <class T, int NV>
struct softmax_rows {
  static constexpr int64_t w = lanes<T>;
  static constexpr int64_t width = NV * w;
  T* row_max;  // [width], `lowest` before the first key
  T* row_sum;  // [width]
  T* out;      // [v_dim][width]
  int64_t v_dim;

  // Takes in a tile's maxima, kept lower by `below`; sums and values so far are scaled to the new ones, other sums
  // too. `started`: out holds something.
  MH_INLINE void raise(const T* tile_max, T exp_scale, bool started, T* others = nullptr, T below = 0) const {
    const vec<T> lower(below);
    for (int v = 0; v < NV; ++v) {
      const vec<T> old = vec<T>::load_aligned(row_max + v * w);
      const vec<T> top = vec<T>::load_aligned(tile_max + v * w);
      const auto higher = top > old + vec<T>(static_cast<T>(lazy_rescale) / exp_scale + below);
      if (!xsimd::any(higher)) continue;
      const vec<T> now = xsimd::select(higher, top - lower, old);
      const vec<T> factor = exp2_of<T>((old - now) * vec<T>(exp_scale));
      now.store_aligned(row_max + v * w);
      (vec<T>::load_aligned(row_sum + v * w) * factor).store_aligned(row_sum + v * w);
      if (others != nullptr) (vec<T>::load_aligned(others + v * w) * factor).store_aligned(others + v * w);
      if (!started) continue;
      for (int64_t d = 0; d < v_dim; ++d) {
        T* p = out + d * width + v * w;
        (vec<T>::load_aligned(p) * factor).store_aligned(p);
      }
    }
  }

  // Scores become weights and are added up; keep(k, x) puts away those of keys k, k + 1, ..., x[key * NV + vector], and may
  // round them before they are added.
  // AtOnce keys are given at a time while there are that many, then one. The largest score's weight is exactly 1.
  template <bool Scaled, int AtOnce, int Degree, class Keep>
  MH_INLINE void weigh(const T* s, int64_t keys, T exp_scale, const Keep& keep) const {
    vec<T> sum[NV];
    vec<T> top[NV];
    const vec<T> scale(exp_scale);
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) {
      sum[v] = vec<T>(T(0));
      top[v] = vec<T>::load_aligned(row_max + v * w);
    }
    const auto few = [&]<int Keys>(int64_t k) MH_INLINE_LAMBDA {
      constexpr int n = Keys * NV;
      vec<T> x[n];
#pragma GCC unroll 16
      for (int i = 0; i < n; ++i) {
        x[i] = vec<T>::load_aligned(s + (k + i / NV) * width + i % NV * w) - top[i % NV];
        if constexpr (Scaled) x[i] = x[i] * scale;
      }
      exp2_of<T, n, Degree>(x);
      keep(k, x);
#pragma GCC unroll 16
      for (int i = 0; i < n; ++i) sum[i % NV] = sum[i % NV] + x[i];
    };
    int64_t k = 0;
    for (; k + AtOnce <= keys; k += AtOnce) few.template operator()<AtOnce>(k);
    for (; k < keys; ++k) few.template operator()<1>(k);
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) (vec<T>::load_aligned(row_sum + v * w) + sum[v]).store_aligned(row_sum + v * w);
  }

  // Weights in place of the scores.
  template <int Degree>
  MH_INLINE void weigh_in_place(T* s, int64_t keys, T exp_scale) const {
    const auto keep = [=](int64_t k, const auto& x) MH_INLINE_LAMBDA {
      constexpr int n = sizeof(x) / sizeof(x[0]);
#pragma GCC unroll 16
      for (int i = 0; i < n; ++i) x[i].store_aligned(s + k * width + i * w);
    };
    constexpr int at_once = max_of(1, exp2_vectors / NV);
    if (exp_scale == T(1)) return weigh<false, at_once, Degree>(s, keys, exp_scale, keep);
    weigh<true, at_once, Degree>(s, keys, exp_scale, keep);
  }
  MH_INLINE void weigh_tile(T* s, int64_t keys, T exp_scale, bool fast) const {
    if (fast) return weigh_in_place<fast_exp2_degree<T>>(s, keys, exp_scale);
    weigh_in_place<exp2_degree<T>>(s, keys, exp_scale);
  }

  // The same, but slots at -inf become -0 (they are not to be multiplied), the others are multiplied by their row's factor.
  // The same exponential, so that rows whose factor is 1 have the same bits.
  MH_INLINE void weigh_tile_with_care(T* s, int64_t keys, T exp_scale, bool fast, const T* factors) const {
    const auto keep = [=](int64_t k, const auto& x) MH_INLINE_LAMBDA {
      for (int v = 0; v < NV; ++v) {
        T* at = s + k * width + v * w;
        const auto closed = vec<T>::load_aligned(at) == vec<T>(-infinity<T>);
        xsimd::select(closed, vec<T>(T(-0.0)), x[v] * vec<T>::load_aligned(factors + v * w)).store_aligned(at);
      }
    };
    if (fast) return weigh<true, 1, fast_exp2_degree<T>>(s, keys, exp_scale, keep);
    weigh<true, 1, exp2_degree<T>>(s, keys, exp_scale, keep);
  }
};

// Where a row ends: what its values are multiplied with, and its state (kernel_api.hpp: partial_states).
struct row_end {
  double factor;
  double top, total;
};

// a * b + c, rounded once where the instruction set can: left to themselves, compilers do so in one place and not in another,
// and a row must end with the same bits wherever it does.
MH_INLINE double multiply_add(double a, double b, double c) {
#if defined(__FMA__) || defined(__aarch64__)
  return __builtin_fma(a, b, c);
#else
  return a * b + c;
#endif
}

// top: the row's maximum in score units, a T; sum: of its weights, 0 for none; sink: natural units, -inf for none.
template <class T>
MH_INLINE row_end finish_row(T top, T sum, double exp_scale, double sink) {
  const bool has_keys = sum > 0 || sum != sum;
  double high = static_cast<double>(top);
  double total = has_keys ? static_cast<double>(sum) : 0;
  double share = 1;                // what the weights so far count relative to high
  if (sink != -__builtin_inf()) {  // NaN too, which shows
    // What is higher has a weight of exactly 1, so that no rounding of a large sink counts.
    const double score = sink / (exp_scale * ln2);
    if (has_keys && score <= high) {
      total += ::exp2((score - high) * exp_scale);
    } else {
      share = has_keys ? ::exp2((high - score) * exp_scale) : 0;
      total = multiply_add(total, share, 1 + (sink - sink));  // NaN for an infinite one
      high = score;
    }
  }
  if (total == 0) return {0, 0, 0};
  return {has_keys ? share / total : 0, high, total};
}

MH_INLINE double lse_of(const row_end& e, double exp_scale, int32_t base) {
  if (e.total == 0) return -__builtin_inf();
  // Each by itself: a top near the largest double would run over in units of log2.
  const double unit = base == MH_LSE_BASE2 ? 1 : ln2;
  return multiply_add(e.top, exp_scale * unit, ::log2(e.total) * unit);
}

}  // namespace
}  // namespace manyhead::MH_ISA
