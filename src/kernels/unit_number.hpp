// How Q, K, V and weights come to a matrix unit, which multiplies 16-bit numbers and adds in f32: each number as a sum of
// few parts, two numbers to a word, the even one low. Which products of parts are taken decides what is lost:
//
//              parts     products: of a score   of a value         lost
//   bf16       1 bf16              1            1 (one of weight)  2^-8 of a weight, as much as results are rounded by
//   f16        1 f16               1            2                  2^-22 of a weight, or 2^-32 of the largest; on units that have f16,
//              2 bf16              2 + 2        2 + 1              2^-16 of a weight; else
//   f32        3 bf16              3 + 2 + 1    3 + 2 + 1          2^-23 of a product at most, 2^-25 on average
//
// bf16 has the exponents of f32, and 8, 11 and 24 bits of mantissa are 1, 2 and 3 parts of it without a rest. The products
// left out are those of two small parts. Where the caller allows a fast exponential (2^-13) a weight has one part less;
// scores of f16 in two bf16 take 2 + 1.
#pragma once

#include "dtype.hpp"

namespace manyhead::MH_ISA {
namespace {

// Which parts are multiplied: part i of A with the first b_parts[i] parts of B.
struct unit_terms {
  int a_parts;
  int b_parts[3];
  constexpr int64_t products() const {
    int64_t n = 0;
    for (int i = 0; i < a_parts; ++i) n += b_parts[i];
    return n;
  }
};

// The types that a unit multiplies. round() and part() make words of two floats, which become what the word holds. plus_pair()
// adds such floats to sums, the odd one first as VDPBF16PS does: one multiplication where 4 instructions take the word apart and add.
struct in_bf16 {
  static float widen(uint16_t x) { return bf16::widen(x); }
  static MH_INLINE word_vec round(vec<float>& even, vec<float>& odd) {
    const word_vec upper(0xffff0000U);
#if defined(__AVX512BF16__)
    alignas(64) static constexpr uint16_t pairs[] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                     8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    const __m512bh even_then_odd = _mm512_cvtne2ps_pbh(odd, even);
    const uint16_t* at = pairs;
    asm("" : "+r"(at));  // from memory: what weighs has no register left
    const word_vec word = _mm512_permutexvar_epi16(_mm512_load_si512(at), reinterpret_cast<__m512i>(even_then_odd));
#else
    const word_vec half(0x8000U);
    const word_vec e = xsimd::bitwise_cast<uint32_t>(even) + half, o = xsimd::bitwise_cast<uint32_t>(odd) + half;
    const word_vec word = (e >> 16) | (o & upper);
#endif
    even = xsimd::bitwise_cast<float>(word << 16);
    odd = xsimd::bitwise_cast<float>(word & upper);
    return word;
  }
  static MH_INLINE vec<float> plus_pair(vec<float> sum, [[maybe_unused]] word_vec word,
                                        [[maybe_unused]] vec<float> even, [[maybe_unused]] vec<float> odd) {
#if defined(__AVX512BF16__)
    static constexpr int32_t ones = 0x3f803f80;
    const int32_t* at = &ones;
    asm("" : "+r"(at));  // as round()
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(__m512i(word)),
                            reinterpret_cast<__m512bh>(_mm512_set1_epi32(*at)));
#else
    return sum + odd + even;
#endif
  }
  // round() of neighbours, `low` first, who lie in the word as in memory. As floats they come in another order.
  static MH_INLINE word_vec round_neighbours(vec<float>& low, vec<float>& high) {
#if defined(__AVX512BF16__)
    const auto word = word_vec(reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low)));
    low = xsimd::bitwise_cast<float>(word << 16);
    high = xsimd::bitwise_cast<float>(word & word_vec(0xffff0000U));
    return word;
#else
    deinterleave<float>(low, high);
    return round(low, high);
#endif
  }
  // Cut off instead, which costs half as much and leaves no rest in the end either.
  static MH_INLINE word_vec part(vec<float>& even, vec<float>& odd) {
    const word_vec upper(0xffff0000U);
    const word_vec e = xsimd::bitwise_cast<uint32_t>(even), o = xsimd::bitwise_cast<uint32_t>(odd) & upper;
    even = xsimd::bitwise_cast<float>(e & upper);
    odd = xsimd::bitwise_cast<float>(o);
    return (e >> 16) | o;
  }
};

struct in_f16 {
  static float widen(uint16_t x) { return f16::widen(x); }
  static MH_INLINE word_vec round(vec<float>& even, vec<float>& odd) { return part(even, odd); }
  static MH_INLINE vec<float> plus_pair(vec<float> sum, word_vec, vec<float> even, vec<float> odd) {
    return sum + odd + even;
  }
  static MH_INLINE word_vec part(vec<float>& even, vec<float>& odd) {
#if defined(__AVX512F__)
    const __m256i e = _mm512_cvtps_ph(even, _MM_FROUND_TO_NEAREST_INT),
                  o = _mm512_cvtps_ph(odd, _MM_FROUND_TO_NEAREST_INT);
    even = _mm512_cvtph_ps(e);
    odd = _mm512_cvtph_ps(o);
    return _mm512_or_si512(_mm512_cvtepu16_epi32(e), _mm512_slli_epi32(_mm512_cvtepu16_epi32(o), 16));
#else
    const word_vec e = f16::narrow(even), o = f16::narrow(odd);
    even = f16::widen(e);
    odd = f16::widen(o);
    return e | (o << 16);
#endif
  }
};

// Two floats as sums of parts, largest first. What they become is the last part.
template <class Format, int Parts>
MH_INLINE void split_floats(vec<float>& even, vec<float>& odd, word_vec (&part)[Parts]) {
#pragma GCC unroll 2
  for (int i = 0; i + 1 < Parts; ++i) {
    vec<float> e_part = even, o_part = odd;
    part[i] = Format::part(e_part, o_part);
    even = even - e_part;
    odd = odd - o_part;
  }
  // After two of bf16 nothing is left to round.
  part[Parts - 1] = Parts == 3 ? Format::part(even, odd) : Format::round(even, odd);
}

// Numbers of `Parts` parts, and the weights they are multiplied with.
template <class Format, int Parts, int WeightParts, int FastWeightParts>
struct unit_values {
  using format = Format;
  static constexpr int parts = Parts;
  static constexpr int weight_parts(bool fast) { return fast ? FastWeightParts : WeightParts; }
  // The smaller one part, the fewer of the other.
  static constexpr unit_terms terms(bool fast) {
    unit_terms t{Parts, {}};
    for (int i = 0; i < Parts; ++i) t.b_parts[i] = i < weight_parts(fast) ? weight_parts(fast) - i : 1;
    return t;
  }
};

// short_turn: keys weighed while the unit multiplies a step of 32 x 32 x 32 (matrix.hpp), twice as many where it has fewer
// than short_turn_steps for a tile of 128 keys and 32 rows. A panel's time on AMX: f32 4 keys over 2, 0.97 with 96 steps
// (heads of 64), 1.02 with 192; f16 in two bf16 4 over 2, 0.85 with 56 and 0.98 with 112; bf16 8 over 4, 0.86 with 24 and
// 1.03 with 48. Unmeasured: f16 with 8, and on units that have it; taken as bf16.
template <class D>
struct unit_number;

template <>
struct unit_number<bf16> {
  using values = unit_values<in_bf16, 1, 1, 1>;
  static constexpr int short_turn = 4, short_turn_steps = 32;
  static constexpr unit_terms scores(bool) { return {1, {1}}; }
};

template <>
struct unit_number<f16> {
  static constexpr int short_turn = 4, short_turn_steps = 32;
#if MH_UNIT_F16
  using values = unit_values<in_f16, 1, 2, 1>;
  static constexpr unit_terms scores(bool) { return {1, {1}}; }
#else
  using values = unit_values<in_bf16, 2, 2, 1>;
  static constexpr unit_terms scores(bool fast) { return {2, {2, fast ? 1 : 2}}; }
#endif
};

template <>
struct unit_number<f32> {
  using values = unit_values<in_bf16, 3, 3, 2>;
  static constexpr int short_turn = 2, short_turn_steps = 128;
  static constexpr unit_terms scores(bool) { return {3, {3, 2, 1}}; }
};

// By so much, in log2 units, a row's maximum is kept lower than it is. f16 has few bits below 2^-14: of weights up to 1, and 2^8
// times that (lazy_rescale), one of 2^-20 would keep 5. So they begin at 2^7, and reach 2^15.
template <class D>
constexpr double unit_headroom() {
  if constexpr (sizeof(typename D::real) == 4) {
    if (std::is_same_v<typename unit_number<D>::values::format, in_f16>) return 7;
  }
  return 0;
}

// The largest magnitude of floats in each lane, as words of twice their bits: infinities and NaN come last.
class magnitudes {
 public:
  MH_INLINE void take(word_vec x) { twice_ = xsimd::max(twice_, x << 1); }
  MH_INLINE bool all_zero() const { return !xsimd::any(twice_ != word_vec(0U)); }
  // Than 2^exponent.
  MH_INLINE bool any_above(int exponent) const { return xsimd::any(twice_ > power(exponent)); }
  MH_INLINE bool any_not_below(int exponent) const { return xsimd::any(twice_ >= power(exponent)); }
  MH_INLINE bool any_below_but_not_zero(int exponent) const {
    return xsimd::any((twice_ < power(exponent)) & (twice_ != word_vec(0U)));
  }

 private:
  static MH_INLINE word_vec power(int exponent) { return word_vec(static_cast<uint32_t>(127 + exponent) << 24); }

  word_vec twice_ = word_vec(0U);
};

// Whether bf16 numbers in pairs are for a unit: none above 2^80, and none denormal. Sums of 15 bits tell by the 16th, two to a
// word: 16-bit comparisons are calls on ARM here.
class pair_magnitudes {
 public:
  MH_INLINE void take(word_vec x) {
    const word_vec m = x & word_vec(0x7fff7fffU);
    const word_vec huge = m + word_vec(0x187f187fU);  // 0x8000 - 0x6781, the first one above 2^80
    const word_vec denormal = (m + word_vec(0x7fff7fffU)) ^ (m + word_vec(0x7f807f80U));  // not 0, but below 0x80
    unusual_ = unusual_ | huge | denormal;
  }
  MH_INLINE bool all_usual() const { return !xsimd::any((unusual_ & word_vec(0x80008000U)) != word_vec(0U)); }

 private:
  word_vec unusual_ = word_vec(0U);
};

// Whether all of a row's numbers have magnitudes up to that of the float with the bits `most`.
template <class D>
__attribute__((noinline)) bool all_up_to(uint32_t most, const typename D::storage* row, int64_t stride, int64_t dim) {
  constexpr int64_t w = lanes<float>;
  word_vec twice(0U);
  const auto see = [&](vec<float> x)
                       MH_INLINE_LAMBDA { twice = xsimd::max(twice, xsimd::bitwise_cast<uint32_t>(x) << 1); };
  if (stride == 1 && dim >= w) {
    for (int64_t d = 0; d < dim; d += w) see(D::widen(row + min_of(d, dim - w)));
  } else {
    for (int64_t d = 0; d < dim; ++d) see(vec<float>(D::widen(row[d * stride])));
  }
  return !xsimd::any(twice > word_vec(most << 1));
}
template <class D>
MH_INLINE bool all_finite(const typename D::storage* row, int64_t stride, int64_t dim) {
  return all_up_to<D>(0x7f7fffffU, row, stride, dim);
}

// The same as pair_magnitudes, of a row whose elements may lie apart.
MH_INLINE bool is_usual_row(const uint16_t* row, int64_t stride, int64_t dim) {
  pair_magnitudes seen;
  for (int64_t d = 0; d < dim; ++d) seen.take(word_vec(row[d * stride]));
  return seen.all_usual();
}

// A vector of pairs as it comes from memory: words of two 16-bit numbers, or the pairs' first numbers and their second.
template <class D>
inline constexpr int pair_vectors = sizeof(typename D::storage) / 2;

// 2 x lanes neighbours, in an order of its own, the same for all.
template <class D>
MH_INLINE void load_pairs(const typename D::storage* p, word_vec (&x)[pair_vectors<D>]) {
  // One by one: g++ 12 copies a longer array to the stack.
#pragma GCC unroll 2
  for (word_vec& each : x) {
    memcpy(&each, p, sizeof(each));
    p += sizeof(each) / sizeof(*p);
  }
}

// `lanes` neighbours of each of two rows.
template <class D>
MH_INLINE void load_pairs(const typename D::storage* first, const typename D::storage* second,
                          word_vec (&x)[pair_vectors<D>]) {
  if constexpr (pair_vectors<D> == 1) {
    x[0] = load_16(first) | (load_16(second) << 16);
  } else {
    x[0] = xsimd::bitwise_cast<uint32_t>(load(first));
    x[1] = xsimd::bitwise_cast<uint32_t>(load(second));
  }
}

// Their parts.
template <class D, class Format, int Parts>
MH_INLINE void split_pairs(const word_vec (&x)[pair_vectors<D>], word_vec (&part)[Parts]) {
  if constexpr (Parts == 1) {
    part[0] = x[0];  // is of the unit's own type
  } else if constexpr (pair_vectors<D> == 1) {
    vec<float> first = D::widen(x[0] & word_vec(0xffffU)), second = D::widen(x[0] >> 16);
    split_floats<Format>(first, second, part);
  } else {
    vec<float> first = xsimd::bitwise_cast<float>(x[0]), second = xsimd::bitwise_cast<float>(x[1]);
    split_floats<Format>(first, second, part);
  }
}

}  // namespace
}  // namespace manyhead::MH_ISA
