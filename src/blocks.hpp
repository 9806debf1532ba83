// Numbers in whole blocks, for sizes that are at least 1.
#pragma once

#include <cstdint>

namespace manyhead {

// Calls of a microsecond or less are one task, or few: divisions, of up to 18 cycles, only where they are needed.
constexpr int64_t blocks(int64_t n, int64_t size) {
  return n <= size ? static_cast<int64_t>(n > 0) : (n + size - 1) / size;
}
constexpr int64_t round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

}  // namespace manyhead
