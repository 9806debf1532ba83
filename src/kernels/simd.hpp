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
#endif

#if defined(__aarch64__)
// xsimd takes NEON's instructions from tables of function pointers, of which GCC makes calls: one for each sum, product
// and comparison of vectors. The same without a table, for what the kernels use.
namespace xsimd::kernel {
#define MH_DIRECT(op, result, T, intrinsic)                                               \
  template <>                                                                             \
  XSIMD_INLINE result<T, neon64> op(batch<T, neon64> const& a, batch<T, neon64> const& b, \
                                    requires_arch<neon>) noexcept {                       \
    return intrinsic(a, b);                                                               \
  }
#define MH_DIRECT_SELECT(T, suffix)                                                                   \
  template <>                                                                                         \
  XSIMD_INLINE batch<T, neon64> select(batch_bool<T, neon64> const& which, batch<T, neon64> const& a, \
                                       batch<T, neon64> const& b, requires_arch<neon>) noexcept {     \
    return vbslq_##suffix(which, a, b);                                                               \
  }
#define MH_DIRECT_CAST(To, From, arch, intrinsic)                                                     \
  template <>                                                                                         \
  XSIMD_INLINE batch<To, neon64> bitwise_cast(batch<From, neon64> const& x, batch<To, neon64> const&, \
                                              requires_arch<arch>) noexcept {                         \
    return intrinsic(x);                                                                              \
  }
#define MH_DIRECT_INTEGERS(T, suffix)                 \
  MH_DIRECT(add, batch, T, vaddq_##suffix)            \
  MH_DIRECT(sub, batch, T, vsubq_##suffix)            \
  MH_DIRECT(bitwise_and, batch, T, vandq_##suffix)    \
  MH_DIRECT(bitwise_or, batch, T, vorrq_##suffix)     \
  MH_DIRECT(bitwise_xor, batch, T, veorq_##suffix)    \
  MH_DIRECT(bitwise_andnot, batch, T, vbicq_##suffix) \
  MH_DIRECT_SELECT(T, suffix)
#define MH_DIRECT_ORDER(T, suffix)             \
  MH_DIRECT(eq, batch_bool, T, vceqq_##suffix) \
  MH_DIRECT(lt, batch_bool, T, vcltq_##suffix) \
  MH_DIRECT(gt, batch_bool, T, vcgtq_##suffix) \
  MH_DIRECT(min, batch, T, vminq_##suffix)     \
  MH_DIRECT(max, batch, T, vmaxq_##suffix)
MH_DIRECT(add, batch, float, vaddq_f32)
MH_DIRECT(sub, batch, float, vsubq_f32)
MH_DIRECT(mul, batch, float, vmulq_f32)
MH_DIRECT_SELECT(float, f32)
MH_DIRECT_ORDER(float, f32)
MH_DIRECT_INTEGERS(uint32_t, u32)
MH_DIRECT_INTEGERS(int32_t, s32)
MH_DIRECT_INTEGERS(uint64_t, u64)
MH_DIRECT_INTEGERS(int64_t, s64)
MH_DIRECT_ORDER(uint32_t, u32)
MH_DIRECT_ORDER(int32_t, s32)
MH_DIRECT_CAST(uint32_t, float, neon, vreinterpretq_u32_f32)
MH_DIRECT_CAST(float, uint32_t, neon, vreinterpretq_f32_u32)
MH_DIRECT_CAST(uint32_t, int32_t, neon, vreinterpretq_u32_s32)
MH_DIRECT_CAST(int32_t, uint32_t, neon, vreinterpretq_s32_u32)
MH_DIRECT_CAST(uint64_t, int64_t, neon, vreinterpretq_u64_s64)
MH_DIRECT_CAST(int64_t, uint64_t, neon, vreinterpretq_s64_u64)
MH_DIRECT_CAST(uint64_t, double, neon64, vreinterpretq_u64_f64)
MH_DIRECT_CAST(double, uint64_t, neon64, vreinterpretq_f64_u64)
#undef MH_DIRECT_ORDER
#undef MH_DIRECT_INTEGERS
#undef MH_DIRECT_CAST
#undef MH_DIRECT_SELECT
#undef MH_DIRECT
}  // namespace xsimd::kernel
#endif

#define MH_INLINE __attribute__((always_inline)) inline
#define MH_INLINE_LAMBDA __attribute__((always_inline))

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

// Rows of memory that are needed soon. The hardware looks ahead only while there are loads that miss; arithmetic on
// what is in cache would let memory idle, so lines are asked for, evenly, all through it.
struct upcoming {
  const char* base;
  int64_t stride, bytes;  // of a row
  int64_t rows;
};

// The layer's weights, where products ask for what they are at, so many bytes before they get there: 2, 4 and 16 KB are slower.
inline constexpr int64_t weights_ahead = 8192;

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

// 2^x is made of 2^n, n = round(x), and a polynomial in f = x - n: minimax polynomials of relative error 1.9e-9 (degree
// 6) and 3.1e-18 (degree 11) on [-1/2, 1/2], from our own Remez exchange, with 1 as the constant term.
template <class T>
inline constexpr int exp2_degree = sizeof(T) == 4 ? 6 : 11;
template <class T>
inline constexpr int fast_exp2_degree = sizeof(T) == 4 ? 3 : exp2_degree<T>;  // with MH_FLAG_FAST_EXP
// The terms from the highest down. Degree 5 has a relative error of 9.2e-8, degree 4 of 2.8e-6, degree 3 of 1.02e-4.
template <class T, int Degree>
inline constexpr T exp2_terms[] = {T(4.435282706957277151e-10), T(7.074105613508142796e-9), T(1.017819802167193084e-7),
                                   T(1.321543308967639918e-6),  T(1.525273348998852565e-5), T(1.540353046251443206e-4),
                                   T(1.333355814678992172e-3),  T(9.618129107588335244e-3), T(5.550410866481992160e-2),
                                   T(2.402265069591015620e-1),  T(6.931471805599453305e-1), T(1)};
template <>
inline constexpr float exp2_terms<float, 6>[] = {1.53458121613e-4F,
                                                 1.33999311772e-3F,
                                                 9.61848895633e-3F,
                                                 5.55032877711e-2F,
                                                 2.40226468906e-1F,
                                                 6.93147205737e-1F,
                                                 1.0F};
template <>
inline constexpr float exp2_terms<float, 5>[] = {1.32647271957e-3F, 9.67151263977e-3F, 5.55073374326e-2F,
                                                 2.40222420854e-1F, 6.93146977599e-1F, 1.0F};
template <>
inline constexpr float exp2_terms<float, 4>[] = {9.58282966e-3F, 5.59064001e-2F, 2.40240991e-1F, 6.93124175e-1F, 1.0F};
template <>
inline constexpr float exp2_terms<float, 3>[] = {5.50089403987e-2F, 2.42210999131e-1F, 6.93282902241e-1F, 1.0F};

// The same with n = floor(x), f in [0, 1]: 2.1e-9, 8.2e-8, 2.9e-6 and 8.6e-5. Each term rounded to float before the next is found.
template <int Degree>
inline constexpr float exp2_terms_up[] = {
    2.15659849e-4F, 1.24822883e-3F, 9.67377517e-3F, 5.54861836e-2F, 2.40229085e-1F, 6.93147063e-1F, 1.0F};
template <>
inline constexpr float exp2_terms_up<5>[] = {1.86695263e-3F, 9.01748054e-3F, 5.57995141e-2F,
                                             2.40164593e-1F, 6.93151295e-1F, 1.0F};
template <>
inline constexpr float exp2_terms_up<4>[] = {1.34266065e-2F, 5.22425994e-2F, 2.41280138e-1F, 6.93044841e-1F, 1.0F};
template <>
inline constexpr float exp2_terms_up<3>[] = {7.70669952e-2F, 2.27645069e-1F, 6.95116758e-1F, 1.0F};

// What follows works on N vectors at once, step by step: one is a chain of a dozen dependent instructions of 4 cycles
// each, and the scheduler sees too few chains ahead to fill the ports from them.

// x = n + f: 2^(n - Shift), and f in place of x. Adding 1.5 * 2^23 + 127 leaves n + 127 in the low bits of the sum, so a
// shift makes the power of two.
template <class T, int N, int Shift = 0>
MH_INLINE void split_power(vec<T> (&x)[N], vec<T> (&power)[N]) {
  const vec<T> round(static_cast<T>(sizeof(T) == 4 ? 12582912.0 + 127.0 - Shift : 6755399441055744.0 + 1023.0 - Shift));
#pragma GCC unroll 16
  for (int i = 0; i < N; ++i) power[i] = x[i] + round;
#pragma GCC unroll 16
  for (int i = 0; i < N; ++i) x[i] = x[i] - (power[i] - round);
#pragma GCC unroll 16
  for (int i = 0; i < N; ++i)
    power[i] = xsimd::bitwise_cast<T>(xsimd::bitwise_cast<bits<T>>(power[i]) << (sizeof(T) == 4 ? 23 : 52));
}

// The polynomial with the first `Terms` terms of `Of`, times 2^Shift.
template <const auto& Of, int Terms, int Shift = 0, class T, int N>
MH_INLINE void series_of(const xsimd::batch<T, MH_ARCH> (&x)[N], xsimd::batch<T, MH_ARCH> (&p)[N]) {
  using B = vec<T>;
  constexpr T up = static_cast<T>(int64_t{1} << Shift);
#pragma GCC unroll 16
  for (int i = 0; i < N; ++i) p[i] = xsimd::fma(B(Of[0] * up), x[i], B(Of[1] * up));
#pragma GCC unroll 16
  for (int t = 2; t < Terms; ++t) {
#pragma GCC unroll 16
    for (int i = 0; i < N; ++i) p[i] = xsimd::fma(p[i], x[i], B(Of[t] * up));
  }
}

#if defined(__AVX512DQ__)
// AVX-512 takes floats apart in one instruction, f = x - floor(x), and puts them together in another, p 2^floor(x): with
// the comparison 4 instructions less than below. Where results that are denormal become 0 by themselves (flush_denormals)
// the comparison goes too; elsewhere each of them would cost some 200 cycles.
template <int N, int Degree, bool Flushed>
MH_INLINE void exp2_by_floor(vec<float> (&x)[N]) {
  static_assert(sizeof(exp2_terms_up<Degree>) == (Degree + 1) * sizeof(float), "there are terms of this degree");
  vec<float> f[N], p[N];
#pragma GCC unroll 16
  for (int i = 0; i < N; ++i) f[i] = _mm512_reduce_ps(x[i], _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  series_of<exp2_terms_up<Degree>, Degree + 1>(f, p);
#pragma GCC unroll 16
  for (int i = 0; i < N; ++i) {
    if constexpr (Flushed) {
      x[i] = _mm512_scalef_ps(p[i], x[i]);
    } else {
      const __mmask16 counts = _mm512_cmp_ps_mask(x[i], _mm512_set1_ps(-100), _CMP_NLT_UQ);  // or is NaN
      x[i] = _mm512_maskz_scalef_ps(counts, p[i], x[i]);
    }
  }
}
#endif

// While it lives, results that would be denormal are 0.
class flush_denormals {
#if defined(__AVX512DQ__)
 public:
  flush_denormals() { _mm_setcsr(before_ | _MM_FLUSH_ZERO_ON); }
  ~flush_denormals() { _mm_setcsr(before_); }
  flush_denormals(const flush_denormals&) = delete;
  flush_denormals& operator=(const flush_denormals&) = delete;

 private:
  const uint32_t before_ = _mm_getcsr();
#endif
};

// Within 1 ulp for x in [-100, 127] (double: [-996, 1023]); 0 below, NaN for NaN: multiplying by the power of two
// (rather than adding exponents) keeps it. It could reach to -126, but sums of such weights times values are denormal,
// and each multiply-add of one takes some 150 cycles: steep ALiBi slopes took four times as long. Next to a weight of
// about 1, which every row has, 2^-100 is nothing. The power is made 2^26 too small, and 0 where that has no exponent,
// the polynomial as much too large: this costs nothing.
template <class T, int N, int Degree = exp2_degree<T>, bool Flushed = false>
MH_INLINE void exp2_of(vec<T> (&x)[N]) {
#if defined(__AVX512DQ__)
  if constexpr (sizeof(T) == 4) return exp2_by_floor<N, Degree, Flushed>(x);
#endif
  constexpr int shift = 26;
  const vec<T> least(static_cast<T>(shift - (sizeof(T) == 4 ? 127 : 1023)));
  vec<T> power[N], p[N];
#pragma GCC unroll 16
  for (int i = 0; i < N; ++i) x[i] = at_least<T>(least, x[i]);
  split_power<T, N, shift>(x, power);
  series_of<exp2_terms<T, Degree>, Degree + 1, shift>(x, p);
#pragma GCC unroll 16
  for (int i = 0; i < N; ++i) x[i] = p[i] * power[i];
}

template <class T>
MH_INLINE vec<T> exp2_of(vec<T> x) {
  vec<T> one[1] = {x};
  exp2_of<T, 1>(one);
  return one[0];
}

// Exponentials worked on at once. Each holds two registers (three at times), and constants take a dozen.
#if defined(__AVX512F__) || defined(__aarch64__)
inline constexpr int exp2_vectors = 6;
#elif XSIMD_WITH_EMULATED
inline constexpr int exp2_vectors = 1;  // compiles in half the time
#else
inline constexpr int exp2_vectors = 2;
#endif

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

// a / b where b is from 1 to 2^100 and a is not larger. Dividing 16 floats takes 16 cycles; a reciprocal of 14 bits with a
// Newton step takes 4, and its error, 2^-28, is lost in the rounding of the product.
template <class T>
MH_INLINE vec<T> quotient(vec<T> a, vec<T> b) {
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4) {
    const vec<T> r = _mm512_rcp14_ps(b);
    return a * xsimd::fma(xsimd::fnma(b, r, vec<T>(T(1))), r, r);
  }
#endif
  return a / b;
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

// tanh(x) = x P(x^2) / Q(x^2) in f32 for |x| <= 8.6, from where on it is 1: relative error 2.8e-8, from our own fit (Lawson's
// iteration), in float arithmetic 3.2e-7, 3.6e-7 without FMA; next to 1 it may be 2 units in the last place above. P and Q from
// the highest term down. 16 instructions, where exponentials take 19.
inline constexpr float tanh_limit = 8.6F;
inline constexpr float tanh_upper[] = {1.408238148314922e-8F, 2.112231231876649e-5F, 3.526397282257676e-3F,
                                       1.3406871259212494e-1F, 1.0F};
inline constexpr float tanh_lower[] = {8.070599051279714e-7F, 3.336263180244714e-4F, 2.599388360977173e-2F,
                                       4.67401921749115e-1F, 1.0F};
template <int N>
MH_INLINE void tanh_by_quotient(vec<float> (&x)[N]) {
  vec<float> square[N], p[N], q[N];
#pragma GCC unroll 16
  for (int i = 0; i < N; ++i)
    x[i] = at_most<float>(vec<float>(tanh_limit), at_least<float>(vec<float>(-tanh_limit), x[i]));
#pragma GCC unroll 16
  for (int i = 0; i < N; ++i) square[i] = x[i] * x[i];
  series_of<tanh_upper, 5>(square, p);
  series_of<tanh_lower, 5>(square, q);
#pragma GCC unroll 16
  for (int i = 0; i < N; ++i) x[i] = quotient<float>(x[i] * p[i], q[i]);
}

// Of x / tanh_units. In f64 (e - 1) / (e + 1), e = 2^x = 2^n (1 + f P(f)), P the polynomial of exp2 without its 1: e - 1 is
// 2^n f P(f) + (2^n - 1), which keeps its relative precision near 0, where n is 0.
template <class T>
inline constexpr double tanh_units = sizeof(T) == 4 ? 1.0 : 2.8853900817779268147;  // 2 log2 e
template <class T, int N>
MH_INLINE void tanh_of(vec<T> (&x)[N]) {
  if constexpr (sizeof(T) == 4) return tanh_by_quotient(x);
  vec<T> power[N], p[N];
#pragma GCC unroll 16
  for (int i = 0; i < N; ++i) x[i] = at_most<T>(vec<T>(T(90)), at_least<T>(vec<T>(T(-90)), x[i]));  // gives 1 there
  split_power<T, N>(x, power);
  series_of<exp2_terms<T, exp2_degree<T>>, exp2_degree<T>>(x, p);
#pragma GCC unroll 16
  for (int i = 0; i < N; ++i) x[i] = xsimd::fma(x[i] * p[i], power[i], power[i] - vec<T>(T(1)));
#pragma GCC unroll 16
  for (int i = 0; i < N; ++i) x[i] = quotient<T>(x[i], x[i] + vec<T>(T(2)));
}

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

// Lanes of two vectors one after another, a0 b0 a1 b1 ..., over both; and the reverse, even and odd lanes apart. Done
// once a row, not once a key.
template <class T>
MH_INLINE void interleave(vec<T>& a, vec<T>& b) {
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4) {
    const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const __m512 x = _mm512_permutex2var_ps(a, low, b);
    b = _mm512_permutex2var_ps(a, _mm512_add_epi32(low, _mm512_set1_epi32(8)), b);
    a = x;
    return;
  }
#endif
  constexpr int64_t w = lanes<T>;
  alignas(64) T apart[2 * w], mixed[2 * w];
  a.store_aligned(apart);
  b.store_aligned(apart + w);
  for (int64_t i = 0; i < 2 * w; ++i) mixed[i] = apart[i / 2 + i % 2 * w];
  a = vec<T>::load_aligned(mixed);
  b = vec<T>::load_aligned(mixed + w);
}
template <class T>
MH_INLINE void deinterleave(vec<T>& a, vec<T>& b) {
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4) {
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512 x = _mm512_permutex2var_ps(a, even, b);
    b = _mm512_permutex2var_ps(a, _mm512_add_epi32(even, _mm512_set1_epi32(1)), b);
    a = x;
    return;
  }
#endif
  constexpr int64_t w = lanes<T>;
  alignas(64) T apart[2 * w], mixed[2 * w];
  a.store_aligned(mixed);
  b.store_aligned(mixed + w);
  for (int64_t i = 0; i < 2 * w; ++i) apart[i / 2 + i % 2 * w] = mixed[i];
  a = vec<T>::load_aligned(apart);
  b = vec<T>::load_aligned(apart + w);
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
