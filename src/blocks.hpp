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

// Of a row of so many elements in scratch, in elements: whole cache lines, an odd number of them, so that rows are spread over all
// sets of the caches. (With 1024 floats a row, all rows would meet in the same sets.)
constexpr int64_t odd_lines(int64_t columns, int64_t element) {
  const int64_t line = 64 / element;
  return (blocks(columns, line) | 1) * line;
}

// Bytes of so many things of `each` bytes, or more than any machine has: plans are made of problems of any lengths.
inline constexpr int64_t too_many_bytes = int64_t{1} << 50;
constexpr int64_t bytes_of(int64_t count, int64_t each) {
  int64_t bytes = 0;
  return __builtin_mul_overflow(count, each, &bytes) ? too_many_bytes : std::min(bytes, too_many_bytes);
}

}  // namespace manyhead
