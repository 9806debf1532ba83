// 2^x and tanh, of N vectors at once; log2.
#pragma once

#include "simd.hpp"

namespace manyhead::MH_ISA {
namespace {

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

// The polynomial of the terms term(0) ... term(Terms - 1), from the highest down.
template <int Terms, class B, int N, class Term>
MH_INLINE void polynomial(const B (&x)[N], B (&p)[N], const Term& term) {
#pragma GCC unroll 16
  for (int i = 0; i < N; ++i) p[i] = xsimd::fma(term(0), x[i], term(1));
#pragma GCC unroll 16
  for (int t = 2; t < Terms; ++t) {
#pragma GCC unroll 16
    for (int i = 0; i < N; ++i) p[i] = xsimd::fma(p[i], x[i], term(t));
  }
}
// With the first `Terms` terms of `Of`, times 2^Shift.
template <const auto& Of, int Terms, int Shift = 0, class T, int N>
MH_INLINE void series_of(const xsimd::batch<T, MH_ARCH> (&x)[N], xsimd::batch<T, MH_ARCH> (&p)[N]) {
  constexpr T up = static_cast<T>(int64_t{1} << Shift);
  polynomial<Terms>(x, p, [](int t) MH_INLINE_LAMBDA { return vec<T>(Of[t] * up); });
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

// a / b where b is from 2^-100 to 2^100. Dividing 16 floats takes 16 cycles; a reciprocal of 14 bits with a Newton step
// takes 4, and its error, 2^-28, is lost in the rounding of the product.
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

// tanh(x) = x P(x^2) / Q(x^2) in f32 for |x| <= limit, from where on it is 1, from our own fit (Lawson's iteration); P and Q from the
// highest term down. Fine: relative error 2.8e-8, in float arithmetic 3.3e-7, 4.3e-7 without FMA; next to 1 it may be 2 units in
// the last place above. Rough: 1.1e-6, in float arithmetic 1.4e-6.
template <bool Rough>
struct tanh_quotient {
  static constexpr float limit = 8.6F;
  static constexpr float upper[] = {1.408238148314922e-8F, 2.112231231876649e-5F, 3.526397282257676e-3F,
                                    1.3406871259212494e-1F, 1.0F};
  static constexpr float lower[] = {8.070599051279714e-7F, 3.336263180244714e-4F, 2.599388360977173e-2F,
                                    4.67401921749115e-1F, 1.0F};
};
template <>
struct tanh_quotient<true> {
  static constexpr float limit = 7.0F;
  static constexpr float upper[] = {4.02317119e-6F, 2.29969644e-3F, 1.23301312e-1F, 1.0F};
  static constexpr float lower[] = {1.44658348e-4F, 2.11840495e-2F, 4.56629395e-1F, 1.0F};
};

// cap tanh(x). The terms of P are multiplied with the cap beforehand, and those of both with 2^-9: x P is below the cap then.
// 16 instructions, rough 14, where exponentials take 20.
template <bool Rough, int N>
MH_INLINE void tanh_by_quotient(vec<float> (&x)[N], float cap) {
  using of = tanh_quotient<Rough>;
  constexpr float small = 0x1p-9F;
  constexpr int terms = static_cast<int>(sizeof(of::upper) / sizeof(float));
  static_assert(sizeof(of::upper) == sizeof(of::lower));
  const vec<float> limit(of::limit);
  vec<float> square[N], p[N], q[N];
#pragma GCC unroll 16
  for (int i = 0; i < N; ++i) x[i] = at_most<float>(limit, at_least<float>(-limit, x[i]));
#pragma GCC unroll 16
  for (int i = 0; i < N; ++i) square[i] = x[i] * x[i];
  polynomial<terms>(square, p, [=](int t) MH_INLINE_LAMBDA { return vec<float>(of::upper[t] * small * cap); });
  polynomial<terms>(square, q, [](int t) MH_INLINE_LAMBDA { return vec<float>(of::lower[t] * small); });
#pragma GCC unroll 16
  for (int i = 0; i < N; ++i) x[i] = quotient<float>(x[i] * p[i], q[i]);
}

// cap tanh(x / tanh_units). In f64 (e - 1) / (e + 1), e = 2^x = 2^n (1 + f P(f)), P the polynomial of exp2 without its 1: e - 1 is
// 2^n f P(f) + (2^n - 1), which keeps its relative precision near 0, where n is 0. Rough: as tanh_quotient, in f32.
template <class T>
inline constexpr double tanh_units = sizeof(T) == 4 ? 1.0 : 2.8853900817779268147;  // 2 log2 e
template <class T, bool Rough, int N>
MH_INLINE void tanh_of(vec<T> (&x)[N], T cap) {
  if constexpr (sizeof(T) == 4) return tanh_by_quotient<Rough>(x, cap);
  vec<T> power[N], p[N];
#pragma GCC unroll 16
  for (int i = 0; i < N; ++i) x[i] = at_most<T>(vec<T>(T(90)), at_least<T>(vec<T>(T(-90)), x[i]));  // gives 1 there
  split_power<T, N>(x, power);
  series_of<exp2_terms<T, exp2_degree<T>>, exp2_degree<T>>(x, p);
#pragma GCC unroll 16
  for (int i = 0; i < N; ++i) x[i] = xsimd::fma(x[i] * p[i], power[i], power[i] - vec<T>(T(1)));
#pragma GCC unroll 16
  for (int i = 0; i < N; ++i) x[i] = vec<T>(cap) * quotient<T>(x[i], x[i] + vec<T>(T(2)));
}

// log2 of doubles that are normal, infinite or NaN, and positive, within 5 ulp: of x = 2^n m, sqrt(1/2) <= m < sqrt(2), it is n, plus
// 2 / ln 2 (z + z^3 / 3 + z^5 / 5 + ...) with z = (m - 1) / (m + 1), of which the next term is 6e-19. By pairs of terms, pairs of
// pairs and so on: what a row ends with waits for this.
inline constexpr double log2_terms[] = {2.88539008177792681472, 0.96179669392597560491, 0.57707801635558536294,
                                        0.4121985831111324021,  0.32059889797532520164, 0.26230818925253880134,
                                        0.22195308321368667814, 0.1923593387851951210,  0.16972882833987804793,
                                        0.15186263588304877972, 0.1373995277037108007};
MH_INLINE vec<double> log2_of(vec<double> x) {
  using B = vec<double>;
  using U = xsimd::batch<uint64_t, MH_ARCH>;
  const auto of = [](double y) { return U(__builtin_bit_cast(uint64_t, y)); };
  constexpr double least = 0.70710678118654752440;  // m
  const U up = xsimd::bitwise_cast<uint64_t>(x) + (of(1) - of(least));
  const B m = xsimd::bitwise_cast<double>((up & U(~uint64_t{0} >> 12)) + of(least));
  // The exponent, as the low bits of 2^52.
  const B n = xsimd::bitwise_cast<double>((up >> 52) | of(0x1p52)) - B(0x1p52 + 1023);
  const B z = (m - B(1.0)) / (m + B(1.0));
  const B z2 = z * z, z4 = z2 * z2, z8 = z4 * z4;
  const auto pair = [=](int i) MH_INLINE_LAMBDA { return xsimd::fma(B(log2_terms[i + 1]), z2, B(log2_terms[i])); };
  const auto four = [=](int i) MH_INLINE_LAMBDA { return xsimd::fma(pair(i + 2), z4, pair(i)); };
  const B last = xsimd::fma(B(log2_terms[10]), z4, pair(8));
  const B p = xsimd::fma(xsimd::fma(last, z8, four(4)), z8, four(0));
  return xsimd::select(x <= B(-lowest<double>), xsimd::fma(z, p, n), x);
}

}  // namespace
}  // namespace manyhead::MH_ISA
