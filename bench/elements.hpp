// Elements of arrays of any dtype.
#pragma once

#include <manyhead/manyhead.h>

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace elements {

// To 16 bits by dropping the lower bits of the fraction; an input needs no better rounding.
inline uint16_t to_bf16(float x) { return static_cast<uint16_t>(std::bit_cast<uint32_t>(x) >> 16); }
inline uint16_t to_f16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const int32_t exponent = static_cast<int32_t>((bits >> 23) & 0xff) - 112;
  if (exponent <= 0) return 0;
  return static_cast<uint16_t>((bits >> 16 & 0x8000) | static_cast<uint32_t>(exponent) << 10 | (bits >> 13 & 0x3ff));
}

inline void store(int32_t dtype, std::byte* array, int64_t i, float x) {
  const auto put = [&](auto value) {
    std::memcpy(array + i * static_cast<int64_t>(sizeof value), &value, sizeof value);
  };
  switch (dtype) {
    case MH_DTYPE_F64:
      return put(static_cast<double>(x));
    case MH_DTYPE_BF16:
      return put(to_bf16(x));
    case MH_DTYPE_F16:
      return put(to_f16(x));
    default:
      return put(x);
  }
}

inline double load(int32_t dtype, const std::byte* array, int64_t i) {
  const auto get = [&](auto value) {
    std::memcpy(&value, array + i * static_cast<int64_t>(sizeof value), sizeof value);
    return value;
  };
  switch (dtype) {
    case MH_DTYPE_F64:
      return get(double{});
    case MH_DTYPE_BF16:
      return std::bit_cast<float>(static_cast<uint32_t>(get(uint16_t{})) << 16);
    case MH_DTYPE_F16: {
      const uint16_t bits = get(uint16_t{});
      const double fraction = bits & 0x3ff;
      const int exponent = bits >> 10 & 0x1f;
      const double size = exponent ? std::ldexp(1024 + fraction, exponent - 25) : std::ldexp(fraction, -24);
      return bits & 0x8000 ? -size : size;
    }
    default:
      return get(float{});
  }
}

}  // namespace elements
