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

// States of rows (kernel_api.hpp: partial_states).
struct row_states {
  vec<double> top, total;
};

// Takes a sink into a row's state: natural units, -inf for none. total: of its keys' weights, 0 for none. Returns what these count
// for beside the new total: 1, less where the sink is the highest of all, 0 without keys.
MH_INLINE vec<double> add_sinks(row_states& rows, vec<double> sink, double exp_scale) {
  using B = vec<double>;
  const B zero(0.0), one(1.0);
  const auto no_keys = rows.total == zero;
  // What is higher has a weight of exactly 1, so that no rounding of a large sink counts.
  const B score = sink / B(exp_scale * ln2), difference = (score - rows.top) * B(exp_scale);
  const auto below = xsimd::bitwise_andnot(score <= rows.top, no_keys);
  const B lower = exp2_of<double>(xsimd::select(below, difference, -difference));
  const B share = xsimd::select(no_keys, zero, xsimd::select(below, one, lower));
  const B above = xsimd::fma(rows.total, share, one + (sink - sink));  // NaN for a sink that is infinite or NaN
  const auto none = sink == B(-__builtin_inf());
  rows.total = xsimd::select(none, rows.total, xsimd::select(below, rows.total + lower, above));
  rows.top = xsimd::select(none | below, rows.top, score);
  return xsimd::select(xsimd::bitwise_andnot(none, no_keys), one, share);
}

// Of rows with these states; of empty ones -inf.
MH_INLINE vec<double> lse_of(const row_states& rows, double exp_scale, int32_t base) {
  // Each by itself, and finite as it is in natural units: a top near the largest double runs over in units of log2.
  const double unit = base == MH_LSE_BASE2 ? 1 : ln2;
  const vec<double> lse = xsimd::fma(rows.top, vec<double>(exp_scale * unit), log2_of(rows.total) * vec<double>(unit));
  const vec<double> least(lowest<double>), none(-__builtin_inf());
  return xsimd::select(rows.total == vec<double>(0.0), none, at_most<double>(-least, at_least<double>(least, lse)));
}
MH_INLINE double lse_of(double top, double total, double exp_scale, int32_t base) {
  return lse_of({vec<double>(top), vec<double>(total)}, exp_scale, base).get(0);
}

}  // namespace
}  // namespace manyhead::MH_ISA
