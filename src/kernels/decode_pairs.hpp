// The two products of the decode route by an instruction that adds two products of bf16 to each float (VDPBF16PS): half as many
// as multiply-adds would be, each in their time, and nothing is widened.
//
//   S[R rows][key] = reduce(sum over dims of q[R rows] * K[key])   lanes over R rows and lanes / R pairs of dims: as many dims of a
//                                                                  key, repeated for each row; R = 8, 4, 2 and 1
//   O[row] += P[row][pair of keys] * V[pair of keys]               lanes over dims; two rows of V joined, even and odd
//                                                                  dims apart (dtype.hpp: pairs_apart)
//
// With rows in the lanes a key is one sum of 16 lanes, not R of them: beside 32 products of a row with 16 keys of 64 dims, adding
// lanes up takes 6 instructions for each of 8 rows, 11 of 4, 45 of one. With lanes over dims alone, as multiply-adds have it, 8
// and 16 rows took 1.2 times as long.
//
// decode_scores.hpp and decode_values.hpp have the loops, where E = in_pairs takes this way. Weights are rounded, and what the unit
// cannot do is left to multiply-adds, row by row, as with a unit of tiles (decode_unit.hpp). BFDOT of AArch64 could do the same.
#pragma once

#include "matrix_unit.hpp"

namespace manyhead::MH_ISA {
namespace {

// Whether steps of D take it.
template <class D>
inline constexpr bool unit_takes_pairs = unit_takes_columns && std::is_same_v<D, bf16>;

// The elements of K and V, as loops see them that multiply pairs.
struct in_pairs {
  using storage = uint16_t;
};
template <class E>
inline constexpr bool paired = std::is_same_v<E, in_pairs>;

MH_INLINE word_vec load_words(const uint16_t* p) {
#if defined(__AVX512BF16__) && !defined(__SANITIZE_ADDRESS__)
  // By an intrinsic or memcpy g++ 12 sends some by way of the stack. But steps with tiles take 1.06 times as long this way.
  __m512i x;
  asm("vmovdqu64 %1, %0" : "=v"(x) : "m"(*reinterpret_cast<const __m512i_u*>(p)));
  return x;
#else
  word_vec x;
  memcpy(&x, p, sizeof(x));
  return x;
#endif
}

// The bits of a float, as weights in pairs lie in the place of scores.
MH_INLINE uint32_t word_of(const float* p) {
  uint32_t x;
  memcpy(&x, p, sizeof(x));
  return x;
}

// sum + both products of each pair.
MH_INLINE vec<float> add_products(vec<float> sum, word_vec a, word_vec b) {
#if defined(__AVX512BF16__)
  return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(__m512i(a)), reinterpret_cast<__m512bh>(__m512i(b)));
#else
  const word_vec high(0xffff0000U);
  const auto widen = [](word_vec x) { return xsimd::bitwise_cast<float>(x); };
  return xsimd::fma(widen(a & high), widen(b & high), xsimd::fma(widen(a << 16), widen(b << 16), sum));
#endif
}

// Vectors of pairs of R rows: lanes / R pairs of each, one row after the other; and as many pairs of another row, R times.
template <int R>
MH_INLINE word_vec repeat_pairs(const uint16_t* p) {
#if defined(__AVX512F__)
  if constexpr (R == 8) {
    long long x;
    memcpy(&x, p, sizeof(x));
    return _mm512_set1_epi64(x);
  } else if constexpr (R == 4) {
    return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  } else if constexpr (R == 2) {
    return _mm512_broadcast_i32x8(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  } else {
    return load_words(p);
  }
#else
  constexpr int64_t size = 4 * lanes<float> / R;
  alignas(64) char all[R * size];
#pragma GCC unroll 8
  for (int i = 0; i < R; ++i) memcpy(all + i * size, p, size);
  return word_vec::load_aligned(reinterpret_cast<const uint32_t*>(all));
#endif
}

// x[key]: sums of R rows, lanes / R partial ones of each. to[row * stride + key] = their sums times `scale`.
template <int R>
MH_INLINE void put_sums(vec<float> (&x)[lanes<float>], vec<float> scale, float* to, int64_t stride) {
#if defined(__AVX512F__)
  // four[i]: quarter q has what row first + q * step is of keys 4 i to 4 i + 3.
  const auto put_quarters = [&](const __m512(&four)[4], int first, int step) MH_INLINE_LAMBDA {
    const __m512 a = _mm512_shuffle_f32x4(four[0], four[1], 0x88), b = _mm512_shuffle_f32x4(four[0], four[1], 0xdd),
                 c = _mm512_shuffle_f32x4(four[2], four[3], 0x88), d = _mm512_shuffle_f32x4(four[2], four[3], 0xdd);
    const __m512 row[4] = {_mm512_shuffle_f32x4(a, c, 0x88), _mm512_shuffle_f32x4(b, d, 0x88),
                           _mm512_shuffle_f32x4(a, c, 0xdd), _mm512_shuffle_f32x4(b, d, 0xdd)};
#pragma GCC unroll 4
    for (int q = 0; q < 4; ++q) store<float>(to + (first + q * step) * stride, vec<float>(row[q]) * scale);
  };
  if constexpr (R == 1) {
    store<float>(to, sums_of<float>(x) * scale);
  } else if constexpr (R == 8) {
    // Quarter q: rows 2 q and 2 q + 1 of a key, and of the next; then of the even rows and of the odd ones.
    __m512 two[8], four[2][4];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      const __m512 p = x[2 * i], q = x[2 * i + 1];
      two[i] = _mm512_add_ps(_mm512_shuffle_ps(p, q, 0x88), _mm512_shuffle_ps(p, q, 0xdd));
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      four[0][i] = _mm512_shuffle_ps(two[2 * i], two[2 * i + 1], 0x88);
      four[1][i] = _mm512_shuffle_ps(two[2 * i], two[2 * i + 1], 0xdd);
    }
    put_quarters(four[0], 0, 2);
    put_quarters(four[1], 1, 2);
  } else if constexpr (R == 4) {
    const __m512 four[4] = {quarter_sums(x), quarter_sums(x + 4), quarter_sums(x + 8), quarter_sums(x + 12)};
    put_quarters(four, 0, 1);
  } else {
    __m512 eight[2];  // quarters: row 0 of 4 keys, row 1 of them, the same of 4 more
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      const __m512 p = quarter_sums(x + 8 * i), q = quarter_sums(x + 8 * i + 4);
      eight[i] = _mm512_add_ps(_mm512_shuffle_f32x4(p, q, 0x88), _mm512_shuffle_f32x4(p, q, 0xdd));
    }
    store<float>(to, vec<float>(_mm512_shuffle_f32x4(eight[0], eight[1], 0x88)) * scale);
    store<float>(to + stride, vec<float>(_mm512_shuffle_f32x4(eight[0], eight[1], 0xdd)) * scale);
  }
#else
  constexpr int w = static_cast<int>(lanes<float>);
  transpose<float>(x);
  for (int r = 0; r < R; ++r) {
    vec<float> sum = x[r * w / R];
    for (int i = 1; i < w / R; ++i) sum = sum + x[r * w / R + i];
    store<float>(to + r * stride, sum * scale);
  }
#endif
}

// Elements of two rows in pairs, the even and the odd ones apart.
MH_INLINE void join_rows(word_vec first, word_vec second, word_vec& even, word_vec& odd) {
#if defined(__AVX512BW__)
  constexpr __mmask32 upper = 0xaaaaaaaaU;
  even = _mm512_mask_blend_epi16(upper, first, _mm512_slli_epi32(second, 16));
  odd = _mm512_mask_blend_epi16(upper, _mm512_srli_epi32(first, 16), second);
#else
  even = (first & word_vec(0xffffU)) | (second << 16);
  odd = (first >> 16) | (second & word_vec(0xffff0000U));
#endif
}

}  // namespace
}  // namespace manyhead::MH_ISA
