// Lanes that change places: vectors transposed, sums of their lanes, two of them interleaved.
#pragma once

#include "simd.hpp"

namespace manyhead::MH_ISA {
namespace {

// W vectors of W lanes, transposed in place. xsimd's own for AVX-512 goes through memory, so here are the usual
// networks: pairs, pairs of pairs, then 128-bit quarters; 4 shuffles a vector for float, 3 for double, and no more
// registers than the vectors themselves.
#if defined(__AVX512F__)
template <class T>
MH_INLINE void transpose(vec<T> (&x)[lanes<T>]) {
  if constexpr (sizeof(T) == 4) {
    __m512 r[16];
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
      r[i] = _mm512_unpacklo_ps(x[i], x[i + 1]);
      r[i + 1] = _mm512_unpackhi_ps(x[i], x[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
      const __m512d a = _mm512_castps_pd(r[i]);
      const __m512d b = _mm512_castps_pd(r[i + 1]);
      const __m512d c = _mm512_castps_pd(r[i + 2]);
      const __m512d d = _mm512_castps_pd(r[i + 3]);
      r[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, c));
      r[i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, c));
      r[i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(b, d));
      r[i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(b, d));
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const __m512 even = _mm512_shuffle_f32x4(r[i], r[4 + i], 0x88);
      const __m512 odd = _mm512_shuffle_f32x4(r[i], r[4 + i], 0xdd);
      const __m512 even2 = _mm512_shuffle_f32x4(r[8 + i], r[12 + i], 0x88);
      const __m512 odd2 = _mm512_shuffle_f32x4(r[8 + i], r[12 + i], 0xdd);
      x[i] = _mm512_shuffle_f32x4(even, even2, 0x88);
      x[4 + i] = _mm512_shuffle_f32x4(odd, odd2, 0x88);
      x[8 + i] = _mm512_shuffle_f32x4(even, even2, 0xdd);
      x[12 + i] = _mm512_shuffle_f32x4(odd, odd2, 0xdd);
    }
  } else {
    __m512d r[8];
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
      r[i] = _mm512_unpacklo_pd(x[i], x[i + 1]);
      r[i + 1] = _mm512_unpackhi_pd(x[i], x[i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      const __m512d even = _mm512_shuffle_f64x2(r[i], r[2 + i], 0x88);
      const __m512d odd = _mm512_shuffle_f64x2(r[i], r[2 + i], 0xdd);
      const __m512d even2 = _mm512_shuffle_f64x2(r[4 + i], r[6 + i], 0x88);
      const __m512d odd2 = _mm512_shuffle_f64x2(r[4 + i], r[6 + i], 0xdd);
      x[i] = _mm512_shuffle_f64x2(even, even2, 0x88);
      x[2 + i] = _mm512_shuffle_f64x2(odd, odd2, 0x88);
      x[4 + i] = _mm512_shuffle_f64x2(even, even2, 0xdd);
      x[6 + i] = _mm512_shuffle_f64x2(odd, odd2, 0xdd);
    }
  }
}

// Of each quarter of 4 vectors, lane i of it: the sum of its lanes in x[i].
MH_INLINE __m512 quarter_sums(const vec<float>* x) {
  const auto pair = [](__m512 a, __m512 b) {
    return _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)));
  };
  const __m512d a = pair(x[0], x[1]), b = pair(x[2], x[3]);
  return _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
}

// Lane i of the result: the sum of the lanes of x[i], added up in the same order for every i. A tree that halves the
// number of vectors at each step, two shuffles and an addition a pair: 30 shuffles for 16 vectors, where a
// transposition has 64. xsimd has none for double here.
template <class T>
MH_INLINE vec<T> sums_of(const vec<T>* x) {
  if constexpr (sizeof(T) == 4) {
    const auto quarters = [](__m512 a, __m512 b) {
      return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
    };
    __m512 r[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) r[i] = quarter_sums(x + 4 * i);
    return quarters(quarters(r[0], r[1]), quarters(r[2], r[3]));
  } else {
    const auto pair = [](__m512d a, __m512d b) {
      return _mm512_add_pd(_mm512_unpacklo_pd(a, b), _mm512_unpackhi_pd(a, b));
    };
    const auto quarters = [](__m512d a, __m512d b) {
      return _mm512_add_pd(_mm512_shuffle_f64x2(a, b, 0x88), _mm512_shuffle_f64x2(a, b, 0xdd));
    };
    return quarters(quarters(pair(x[0], x[1]), pair(x[2], x[3])), quarters(pair(x[4], x[5]), pair(x[6], x[7])));
  }
}
#else
template <class T>
MH_INLINE void transpose(vec<T> (&x)[lanes<T>]) {
  xsimd::transpose(x, x + lanes<T>);
}

template <class T>
MH_INLINE vec<T> sums_of(const vec<T>* x) {
  return xsimd::haddp(x);
}
#endif

// Lanes of two vectors one after another, a0 b0 a1 b1 ..., over both; or the reverse, even and odd lanes apart. Done
// once a row, not once a key.
template <class T, bool Apart>
MH_INLINE void move_lanes(vec<T>& a, vec<T>& b) {
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4) {
    const __m512i first = Apart ? _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30)
                                : _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const __m512 x = _mm512_permutex2var_ps(a, first, b);
    b = _mm512_permutex2var_ps(a, _mm512_add_epi32(first, _mm512_set1_epi32(Apart ? 1 : 8)), b);
    a = x;
    return;
  }
#endif
  constexpr int64_t w = lanes<T>;
  alignas(64) T from[2 * w], to[2 * w];
  a.store_aligned(from);
  b.store_aligned(from + w);
  for (int64_t i = 0; i < 2 * w; ++i) {
    const int64_t apart = i / 2 + i % 2 * w;
    to[Apart ? apart : i] = from[Apart ? i : apart];
  }
  a = vec<T>::load_aligned(to);
  b = vec<T>::load_aligned(to + w);
}
template <class T>
MH_INLINE void interleave(vec<T>& a, vec<T>& b) {
  move_lanes<T, false>(a, b);
}
template <class T>
MH_INLINE void deinterleave(vec<T>& a, vec<T>& b) {
  move_lanes<T, true>(a, b);
}

}  // namespace
}  // namespace manyhead::MH_ISA
