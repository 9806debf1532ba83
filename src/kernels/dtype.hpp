// One trait per storage type: how it lies in memory and how it becomes the arithmetic type `real` and back. Kernels
// compute in `real` and never name a storage type; widening is exact, narrowing rounds to nearest even.
#pragma once

#include "kernel_api.hpp"
#include "transpose.hpp"

namespace manyhead::MH_ISA {
namespace {

// widen_pair: 2 * lanes elements at once, in the order that costs least: one vector after the other, or, with
// pairs_apart, even and odd elements apart.

struct f32 {
  using storage = float;
  using real = float;
  static MH_INLINE float widen(float x) { return x; }
  static MH_INLINE vec<float> widen(const float* p) { return load(p); }
  static constexpr bool pairs_apart = false;
  static MH_INLINE void widen_pair(const float* p, vec<float>& a, vec<float>& b) {
    a = load(p);
    b = load(p + lanes<float>);
  }
  static MH_INLINE float narrow(float x) { return x; }
  static MH_INLINE void narrow(vec<float> x, float* p) { store(p, x); }
};

struct f64 {
  using storage = double;
  using real = double;
  static MH_INLINE double widen(double x) { return x; }
  static MH_INLINE vec<double> widen(const double* p) { return load(p); }
  static constexpr bool pairs_apart = false;
  static MH_INLINE void widen_pair(const double* p, vec<double>& a, vec<double>& b) {
    a = load(p);
    b = load(p + lanes<double>);
  }
  static MH_INLINE double narrow(double x) { return x; }
  static MH_INLINE void narrow(vec<double> x, double* p) { store(p, x); }
};

using word_vec = xsimd::batch<uint32_t, MH_ARCH>;

// lanes<float> 16-bit elements as 32-bit integers.
MH_INLINE xsimd::batch<uint32_t, MH_ARCH> load_16(const uint16_t* p) {
#if defined(__AVX512F__)
  return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__AVX2__)
  return _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  alignas(64) uint32_t wide[lanes<float>];
  for (int64_t i = 0; i < lanes<float>; ++i) wide[i] = p[i];
  return xsimd::batch<uint32_t, MH_ARCH>::load_aligned(wide);
#endif
}

// The reverse, of 32-bit integers that fit 16 bits.
MH_INLINE void store_16(xsimd::batch<uint32_t, MH_ARCH> x, uint16_t* p) {
#if defined(__AVX512F__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(x));
#elif defined(__AVX2__)
  const __m256i pairs = _mm256_permute4x64_epi64(_mm256_packus_epi32(x, x), 0x08);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(pairs));
#else
  alignas(64) uint32_t wide[lanes<float>];
  x.store_aligned(wide);
  for (int64_t i = 0; i < lanes<float>; ++i) p[i] = static_cast<uint16_t>(wide[i]);
#endif
}

// Words, as transpose<float> does it.
MH_INLINE void transpose_words(word_vec (&x)[lanes<float>]) {
  vec<float> f[lanes<float>];
#pragma GCC unroll 16
  for (int i = 0; i < lanes<float>; ++i) f[i] = xsimd::bitwise_cast<float>(x[i]);
  transpose<float>(f);
#pragma GCC unroll 16
  for (int i = 0; i < lanes<float>; ++i) x[i] = xsimd::bitwise_cast<uint32_t>(f[i]);
}

struct bf16 {
  using storage = uint16_t;
  using real = float;
  static MH_INLINE float widen(uint16_t x) {
    const uint32_t u = static_cast<uint32_t>(x) << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
  }
  static MH_INLINE vec<float> widen(const uint16_t* p) { return widen(load_16(p)); }
  // From the low halves of words.
  static MH_INLINE vec<float> widen(word_vec x) { return xsimd::bitwise_cast<float>(x << 16); }
  static constexpr bool pairs_apart = true;
  static MH_INLINE void widen_pair(const uint16_t* p, vec<float>& even, vec<float>& odd) {
    widen_pair(load(reinterpret_cast<const float*>(p)), even, odd);
  }
  static MH_INLINE void widen_pair(vec<float> pairs, vec<float>& even, vec<float>& odd) {
    const word_vec x = xsimd::bitwise_cast<uint32_t>(pairs);
    even = xsimd::bitwise_cast<float>(x << 16);
    odd = xsimd::bitwise_cast<float>(x & word_vec(0xffff0000U));
  }
  static MH_INLINE uint16_t narrow(float f) {
    uint32_t u;
    memcpy(&u, &f, 4);
    if ((u & 0x7fffffffU) > 0x7f800000U) return static_cast<uint16_t>((u >> 16) | 0x40U);  // NaN stays NaN
    return static_cast<uint16_t>((u + 0x7fffU + ((u >> 16) & 1U)) >> 16);
  }
  static MH_INLINE word_vec narrow(vec<float> f) {
    const word_vec u = xsimd::bitwise_cast<uint32_t>(f);
    const word_vec rounded = u + word_vec(0x7fffU) + ((u >> 16) & word_vec(1U));
    return xsimd::select(xsimd::batch_bool_cast<uint32_t>(f == f), rounded, u | word_vec(0x400000U)) >> 16;
  }
  static MH_INLINE void narrow(vec<float> f, uint16_t* p) { store_16(narrow(f), p); }
};

struct f16 {
  using storage = uint16_t;
  using real = float;
  // Shifting the half's bits left by 13 puts exponent and mantissa in place with a bias that is 112 too low;
  // multiplying by 2^112 mends it, denormals included.
  static MH_INLINE float widen(uint16_t x) {
    const uint32_t magnitude = static_cast<uint32_t>(x & 0x7fffU) << 13;
    float f;
    memcpy(&f, &magnitude, 4);
    f *= 0x1p112F;
    uint32_t u;
    memcpy(&u, &f, 4);
    if ((x & 0x7c00U) == 0x7c00U) u = magnitude | 0x7f800000U;  // inf, NaN
    u |= static_cast<uint32_t>(x & 0x8000U) << 16;
    memcpy(&f, &u, 4);
    return f;
  }
  static MH_INLINE vec<float> widen(const uint16_t* p) {
#if defined(__AVX512F__)
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__AVX2__)
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
    return widen(load_16(p));
#endif
  }
  // From the low halves of words whose high halves are 0.
  static MH_INLINE vec<float> widen(word_vec x) {
#if defined(__AVX512F__)
    return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(x));
#else
    using B = word_vec;
    const B magnitude = (x & B(0x7fffU)) << 13;
    const B scaled = xsimd::bitwise_cast<uint32_t>(xsimd::bitwise_cast<float>(magnitude) * vec<float>(0x1p112F));
    const auto special = (x & B(0x7c00U)) == B(0x7c00U);
    const B mended = xsimd::select(special, magnitude | B(0x7f800000U), scaled);
    return xsimd::bitwise_cast<float>(mended | ((x & B(0x8000U)) << 16));
#endif
  }
  static constexpr bool pairs_apart = false;
  static MH_INLINE void widen_pair(const uint16_t* p, vec<float>& a, vec<float>& b) {
    a = widen(p);
    b = widen(p + lanes<float>);
  }
  static MH_INLINE uint16_t narrow(float f) {
    uint32_t u;
    memcpy(&u, &f, 4);
    const uint32_t sign = (u >> 16) & 0x8000U;
    u &= 0x7fffffffU;
    if (u > 0x7f800000U) return static_cast<uint16_t>(sign | 0x7e00U);
    if (u >= 0x477ff000U) return static_cast<uint16_t>(sign | 0x7c00U);  // 65520 and up round to inf
    if (u < 0x38800000U) {  // below 2^-14: adding 0.5 leaves the denormal's mantissa, rounded, in the low bits
      float g;
      memcpy(&g, &u, 4);
      g += 0.5F;
      memcpy(&u, &g, 4);
      return static_cast<uint16_t>(sign | (u - 0x3f000000U));
    }
    return static_cast<uint16_t>(sign | ((u - 0x38000000U + 0xfffU + ((u >> 13) & 1U)) >> 13));
  }
  static MH_INLINE word_vec narrow(vec<float> f) {
#if defined(__AVX512F__)
    return _mm512_cvtepu16_epi32(_mm512_cvtps_ph(f, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__AVX2__)
    return _mm256_cvtepu16_epi32(_mm256_cvtps_ph(f, _MM_FROUND_TO_NEAREST_INT));
#else
    alignas(64) float wide[lanes<float>];
    alignas(64) uint32_t narrowed[lanes<float>];
    f.store_aligned(wide);
    for (int64_t i = 0; i < lanes<float>; ++i) narrowed[i] = narrow(wide[i]);
    return word_vec::load_aligned(narrowed);
#endif
  }
  static MH_INLINE void narrow(vec<float> f, uint16_t* p) {
#if defined(__AVX512F__)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(f, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__AVX2__)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(f, _MM_FROUND_TO_NEAREST_INT));
#else
    alignas(64) float wide[lanes<float>];
    f.store_aligned(wide);
    for (int64_t i = 0; i < lanes<float>; ++i) p[i] = narrow(wide[i]);
#endif
  }
};

// The trait of memory that holds the arithmetic type itself.
template <class T>
struct plain_of;
template <>
struct plain_of<float> {
  using type = f32;
};
template <>
struct plain_of<double> {
  using type = f64;
};
template <class D>
using plain = typename plain_of<typename D::real>::type;

// n elements, `stride` apart, widened into contiguous memory. If n is not whole vectors the last one begins within the one
// before: of 24 rows of f16 against 2048 keys of 40 dims a third of the time went to the last eight, one by one.
template <class D>
MH_INLINE void widen_row(const typename D::storage* p, int64_t stride, int64_t n, typename D::real* to) {
  constexpr int64_t w = lanes<typename D::real>;
  if (stride != 1 || n < w) {
    int64_t i = 0;
    for (; sizeof(*p) < sizeof(*to) && i + w <= n; i += w) {  // one by one f16 takes ten instructions
      alignas(64) typename D::storage apart[w];
      for (int64_t l = 0; l < w; ++l) apart[l] = p[(i + l) * stride];
      store(to + i, D::widen(apart));
    }
    for (; i < n; ++i) to[i] = D::widen(p[i * stride]);
    return;
  }
  for (int64_t i = 0; i + w <= n; i += w) store(to + i, D::widen(p + i));
  if (n % w != 0) store(to + n - w, D::widen(p + n - w));
}

// The reverse.
template <class D>
MH_INLINE void narrow_row(const typename D::real* from, int64_t n, typename D::storage* p, int64_t stride) {
  if constexpr (sizeof(typename D::storage) == sizeof(typename D::real)) {
    if (stride == 1) {
      memcpy(p, from, static_cast<size_t>(n) * sizeof(*p));
      return;
    }
  }
  constexpr int64_t w = lanes<typename D::real>;
  if (stride != 1 || n < w) {
    for (int64_t i = 0; i < n; ++i) p[i * stride] = D::narrow(from[i]);
    return;
  }
  for (int64_t i = 0; i + w <= n; i += w) D::narrow(load(from + i), p + i);
  if (n % w != 0) D::narrow(load(from + n - w), p + n - w);
}

// What doubles are as floats: those beyond the largest float are that, as finite numbers hide nothing.
template <class T>
MH_INLINE T as_real(double x) {
  constexpr double most = sizeof(T) == 4 ? 3.4028234663852886e38 : 1.7976931348623157e308;
  if (x < -most && x > -__builtin_inf()) return static_cast<T>(-most);
  if (x > most && x < __builtin_inf()) return static_cast<T>(most);
  return static_cast<T>(x);
}

// A row of any dtype, known at run time only (biases, which may have another dtype than q, k and v).
template <class T>
MH_INLINE void widen_any(int32_t dtype, const void* base, int64_t offset, int64_t stride, int64_t n, T* to) {
  const auto widen = [&]<class D>() MH_INLINE_LAMBDA {
    const auto* const p = static_cast<const typename D::storage*>(base) + offset;
    if constexpr (std::is_same_v<typename D::real, T>) {
      widen_row<D>(p, stride, n, to);
    } else {
      for (int64_t i = 0; i < n; ++i) to[i] = as_real<T>(static_cast<double>(D::widen(p[i * stride])));
    }
  };
  switch (dtype) {
    case MH_DTYPE_F32:
      return widen.template operator()<f32>();
    case MH_DTYPE_F64:
      return widen.template operator()<f64>();
    case MH_DTYPE_BF16:
      return widen.template operator()<bf16>();
    default:
      return widen.template operator()<f16>();
  }
}

}  // namespace
}  // namespace manyhead::MH_ISA
