// The types of elements, as tests count with them: those of 16 bits become doubles and back, rounded to nearest even.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "manyhead/manyhead.h"

namespace manyhead::test {

inline double f16_value(uint16_t bits) {
  const int exponent = bits >> 10 & 31;
  const int fraction = bits & 1023;
  const double sign = bits >> 15 ? -1 : 1;
  if (exponent == 31) return fraction ? std::nan("") : sign * HUGE_VAL;
  return sign * (exponent ? std::ldexp(1024 + fraction, exponent - 25) : std::ldexp(fraction, -24));
}

// The largest finite number of a type.
inline double largest_of(int32_t dtype) {
  switch (dtype) {
    case MH_DTYPE_F64:
      return 1.7976931348623157e308;
    case MH_DTYPE_F16:
      return 65504;
    case MH_DTYPE_BF16:
      return 3.3895313892515355e38;
    default:
      return 3.4028234663852886e38;
  }
}

inline double bf16_value(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

// Nearest 16-bit float, ties to even: `fraction_bits` of them stored, 2^smallest the smallest denormal.
inline uint16_t narrow(double x, int fraction_bits, int smallest, int infinity) {
  const int sign = std::signbit(x) ? 0x8000 : 0;
  if (std::isnan(x)) return static_cast<uint16_t>(sign | infinity | 1 << (fraction_bits - 1));
  if (std::isinf(x) || x == 0) return static_cast<uint16_t>(x == 0 ? sign : sign | infinity);
  int exponent = 0;
  std::frexp(x, &exponent);
  const int unit = std::max(exponent - fraction_bits - 1, smallest);
  const double bits = std::nearbyint(std::ldexp(std::fabs(x), -unit)) + std::ldexp(unit - smallest, fraction_bits);
  return static_cast<uint16_t>(sign | static_cast<int>(std::min(bits, static_cast<double>(infinity))));
}
inline uint16_t f16_bits(double x) { return narrow(x, 10, -24, 0x7c00); }
inline uint16_t bf16_bits(double x) { return narrow(x, 7, -133, 0x7f80); }

// Lies in memory as an element does.
template <uint16_t (*Bits)(double), double (*Value)(uint16_t)>
struct half {
  uint16_t bits = 0;
  half() = default;
  explicit half(double x) : bits(Bits(x)) {}
  operator double() const { return Value(bits); }  // NOLINT(google-explicit-constructor): as a float does
};
using bf16 = half<bf16_bits, bf16_value>;
using f16 = half<f16_bits, f16_value>;

template <class Number>
inline constexpr int32_t dtype_of = std::is_same_v<Number, double>  ? MH_DTYPE_F64
                                    : std::is_same_v<Number, float> ? MH_DTYPE_F32
                                    : std::is_same_v<Number, bf16>  ? MH_DTYPE_BF16
                                                                    : MH_DTYPE_F16;
// What is computed in, and the largest error of rounding to a number, relative to it.
template <class Number>
using real_of = std::conditional_t<std::is_same_v<Number, double>, double, float>;
template <class Number>
inline constexpr double rounding_of = std::is_same_v<Number, double>  ? 0x1p-53
                                      : std::is_same_v<Number, float> ? 0x1p-24
                                      : std::is_same_v<Number, bf16>  ? 0x1p-8
                                                                      : 0x1p-11;

}  // namespace manyhead::test
