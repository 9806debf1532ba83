// Numbers in whole blocks, for sizes that are at least 1, and bytes of many.
#pragma once

#include <algorithm>
#include <cstdint>

namespace manyhead {

// Calls of a microsecond or less are one task, or few: divisions, of up to 18 cycles, only where they are needed.
constexpr int64_t blocks(int64_t n, int64_t size) {
  return n <= size ? static_cast<int64_t>(n > 0) : (n + size - 1) / size;
}
constexpr int64_t round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

// Bytes of so many things of `each` bytes, or more than any machine has: plans are made of problems of any lengths.
inline constexpr int64_t too_many_bytes = int64_t{1} << 50;
constexpr int64_t bytes_of(int64_t count, int64_t each) {
  int64_t bytes = 0;
  return __builtin_mul_overflow(count, each, &bytes) ? too_many_bytes : std::min(bytes, too_many_bytes);
}

}  // namespace manyhead
