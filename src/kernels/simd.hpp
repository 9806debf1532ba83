// The vector layer: what xsimd offers under short names, and the few functions it lacks. Intrinsics stand
// behind named functions that have a generic body too.
//
// T is the arithmetic type, float or double. Everything lives in an unnamed namespace of its ISA: nothing compiled here
// may be picked by the linker for another instruction set.
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#include <xsimd/xsimd.hpp>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>

#include "neon_direct.hpp"
#endif

#ifndef MH_INLINE  // emulated vectors have their own (meson.build)
#define MH_INLINE __attribute__((always_inline)) inline
#define MH_INLINE_LAMBDA __attribute__((always_inline))
#endif

namespace manyhead::MH_ISA {
namespace {

template <class T>
using vec = xsimd::batch<T, MH_ARCH>;

template <class T>
inline constexpr int64_t lanes = static_cast<int64_t>(vec<T>::size);

// Rows this many bytes apart, or a multiple of it, lie in one set of L1, which holds 8 lines (12 of 48 KB): in [batch, length,
// heads, head_dim] those of 16 heads of 64 or 8 of 128, in a bias those of 1024 keys.
inline constexpr int64_t set_stride = 4096;

// An unsigned integer as wide as T: the bits of a T, and the words of a visibility tile (mask.hpp).
template <class T>
struct bits_of;
template <>
struct bits_of<float> {
  using type = uint32_t;
};
template <>
struct bits_of<double> {
  using type = uint64_t;
};
template <class T>
using bits = typename bits_of<T>::type;
template <class T>
using signed_vec = xsimd::batch<std::make_signed_t<bits<T>>, MH_ARCH>;

MH_INLINE constexpr int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }
MH_INLINE constexpr int64_t max_of(int64_t a, int64_t b) { return a > b ? a : b; }
// To multiples of a power of two, without divisions.
template <int64_t Step>
MH_INLINE constexpr int64_t round_down(int64_t n) {
  static_assert(Step > 0 && (Step & (Step - 1)) == 0);
  return n & -Step;
}
template <int64_t Step>
MH_INLINE constexpr int64_t round_up(int64_t n) {
  return round_down<Step>(n + Step - 1);
}

template <class T>
inline constexpr T infinity = static_cast<T>(__builtin_inf());

// 0, 1, 2, ... in a vector.
template <class T>
struct alignas(64) lane_table {
  T of[lanes<T>];
  constexpr lane_table() : of{} {
    for (int64_t l = 0; l < lanes<T>; ++l) of[l] = static_cast<T>(l);
  }
};
template <class T>
MH_INLINE vec<T> lane_numbers() {
  static constexpr lane_table<T> table{};
  return vec<T>::load_aligned(table.of);
}

// The running maximum before any key: lower than every score but -inf, and finite so that (s - max) is never NaN for s
// = -inf.
template <class T>
inline constexpr T lowest = sizeof(T) == 4 ? static_cast<T>(-3.402823466e38F) : static_cast<T>(-1.7976931348623157e308);

template <class T>
MH_INLINE vec<T> load(const T* p) {
  return vec<T>::load_unaligned(p);
}

template <class T>
MH_INLINE void store(T* p, vec<T> x) {
  x.store_unaligned(p);
}

#if defined(__AVX512BW__)
// The first n of N elements of a vector.
template <int64_t N>
using mask_of = std::conditional_t<N == 8, __mmask8, std::conditional_t<N == 16, __mmask16, __mmask32>>;
template <int64_t N>
MH_INLINE mask_of<N> first_of(int64_t n) {
  return static_cast<mask_of<N>>((uint64_t{1} << max_of(0, min_of(n, N))) - 1);
}
#endif

// The first n of N elements, and zeros for the others.
template <int64_t N, class S>
MH_INLINE void load_some(const S* p, int64_t n, S (&to)[N]) {
#if defined(__AVX512BW__)
  constexpr int64_t each = min_of(N, 64 / static_cast<int64_t>(sizeof(S)));  // of a vector
#pragma GCC unroll 2
  for (int64_t i = 0; i < N; i += each) {
    const mask_of<each> which = first_of<each>(n - i);
    if constexpr (sizeof(S) == 8) _mm512_store_si512(to + i, _mm512_maskz_loadu_epi64(which, p + i));
    if constexpr (sizeof(S) == 4) _mm512_store_si512(to + i, _mm512_maskz_loadu_epi32(which, p + i));
    if constexpr (sizeof(S) == 2 && each == 32) _mm512_store_si512(to + i, _mm512_maskz_loadu_epi16(which, p + i));
    if constexpr (sizeof(S) == 2 && each == 16)
      _mm256_store_si256(reinterpret_cast<__m256i*>(to + i), _mm256_maskz_loadu_epi16(which, p + i));
  }
#else
  memset(to, 0, sizeof(to));
  memcpy(to, p, static_cast<size_t>(min_of(n, N)) * sizeof(S));
#endif
}

// The first n of N elements, the others stay.
template <int64_t N, class S>
MH_INLINE void store_some(S* p, int64_t n, const S (&from)[N]) {
#if defined(__AVX512BW__)
  const mask_of<N> which = first_of<N>(n);
  if constexpr (sizeof(S) == 8) _mm512_mask_storeu_epi64(p, which, _mm512_load_si512(from));
  if constexpr (sizeof(S) == 4) _mm512_mask_storeu_epi32(p, which, _mm512_load_si512(from));
  if constexpr (sizeof(S) == 2)
    _mm256_mask_storeu_epi16(p, which, _mm256_load_si256(reinterpret_cast<const __m256i*>(from)));
#else
  for (int64_t i = 0; i < n; ++i) p[i] = from[i];
#endif
}

// The larger of two, NaN where x is NaN: x86's instruction returns its second operand then (xsimd's max has had either
// order).
template <class T>
MH_INLINE vec<T> at_least(vec<T> low, vec<T> x) {
#if XSIMD_WITH_EMULATED || !defined(__x86_64__)
  return xsimd::select(x < low, low, x);
#elif defined(__AVX512F__)
  if constexpr (sizeof(T) == 4) return _mm512_max_ps(low, x);
  if constexpr (sizeof(T) == 8) return _mm512_max_pd(low, x);
#elif defined(__AVX2__)
  if constexpr (sizeof(T) == 4) return _mm256_max_ps(low, x);
  if constexpr (sizeof(T) == 8) return _mm256_max_pd(low, x);
#else
  if constexpr (sizeof(T) == 4) return _mm_max_ps(low, x);
  if constexpr (sizeof(T) == 8) return _mm_max_pd(low, x);
#endif
}

// The smaller of two, NaN where x is NaN, as at_least.
template <class T>
MH_INLINE vec<T> at_most(vec<T> high, vec<T> x) {
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4) return _mm512_min_ps(high, x);
  if constexpr (sizeof(T) == 8) return _mm512_min_pd(high, x);
#else
  return xsimd::select(x > high, high, x);
#endif
}

// The larger of two, the first where the second is NaN: a running maximum stays a number, NaN shows in the sums.
template <class T>
MH_INLINE vec<T> larger(vec<T> top, vec<T> x) {
#if XSIMD_WITH_EMULATED || !defined(__x86_64__)
  return xsimd::select(x > top, x, top);
#elif defined(__AVX512F__)
  if constexpr (sizeof(T) == 4) return _mm512_max_ps(x, top);
  if constexpr (sizeof(T) == 8) return _mm512_max_pd(x, top);
#elif defined(__AVX2__)
  if constexpr (sizeof(T) == 4) return _mm256_max_ps(x, top);
  if constexpr (sizeof(T) == 8) return _mm256_max_pd(x, top);
#else
  if constexpr (sizeof(T) == 4) return _mm_max_ps(x, top);
  if constexpr (sizeof(T) == 8) return _mm_max_pd(x, top);
#endif
}

// Of all lanes. xsimd's goes through permutations by tables on AVX-512, and on AArch64 through functions that g++ 12 may call.
template <class T>
MH_INLINE T largest_of(vec<T> x) {
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4) return _mm512_reduce_max_ps(x);
  if constexpr (sizeof(T) == 8) return _mm512_reduce_max_pd(x);
#elif defined(__aarch64__) && !XSIMD_WITH_EMULATED
  if constexpr (sizeof(T) == 4) return vmaxvq_f32(x);
  if constexpr (sizeof(T) == 8) return vmaxvq_f64(x);
#else
  return xsimd::reduce_max(x);
#endif
}

// x, loaded once: g++ may load what FMAs multiply anew for each, and two loads a cycle are too few for two FMAs then.
template <class T>
MH_INLINE vec<T> held(vec<T> x) {
#if !XSIMD_WITH_EMULATED && defined(__x86_64__)
  asm("" : "+v"(x.data));
#endif
  return x;
}

// x may be wanted yet. Where a multiply-add is the last to take both x and a sum, clang writes the result over x and moves
// all sums of the loop back to their registers each turn; 8 and 8 more are too many of 16: one went through memory.
template <class T>
MH_INLINE void still_needed([[maybe_unused]] vec<T> x) {
#if !XSIMD_WITH_EMULATED && defined(__x86_64__) && defined(__clang__)
  asm volatile("" ::"v"(x.data));
#endif
}

// Bit i of the result: byte i of p is not zero. n <= 32 bytes are read, every `stride` apart.
MH_INLINE uint32_t nonzero_bytes(const uint8_t* p, int64_t stride, int64_t n) {
#if defined(__AVX512BW__) && defined(__AVX512VL__)
  if (stride == 1) {
    const __mmask32 in = n >= 32 ? 0xffffffffU : (1U << n) - 1U;
    const __m256i x = _mm256_maskz_loadu_epi8(in, p);
    return _mm256_test_epi8_mask(x, x);
  }
#elif defined(__AVX2__)
  if (stride == 1 && n == 32) {
    const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return ~static_cast<uint32_t>(_mm256_movemask_epi8(_mm256_cmpeq_epi8(x, _mm256_setzero_si256())));
  }
#elif defined(__SSE2__)
  if (stride == 1 && n == 32) {
    const __m128i zero = _mm_setzero_si128();
    const __m128i a = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    const __m128i b = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 16));
    return ~(static_cast<uint32_t>(_mm_movemask_epi8(_mm_cmpeq_epi8(a, zero))) |
             static_cast<uint32_t>(_mm_movemask_epi8(_mm_cmpeq_epi8(b, zero))) << 16);
  }
#endif
  uint32_t r = 0;
  for (int64_t i = 0; i < n; ++i) r |= static_cast<uint32_t>(p[i * stride] != 0) << i;
  return r;
}

}  // namespace
}  // namespace manyhead::MH_ISA
