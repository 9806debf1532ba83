// Numbers that are the same on every machine.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace manyhead::test {

inline uint32_t next_random(uint32_t& seed) { return seed = seed * 1664525u + 1013904223u; }

// -1..1
inline std::vector<float> numbers(int64_t count, uint32_t seed) {
  std::vector<float> result(static_cast<size_t>(count));
  for (float& x : result) x = static_cast<float>(static_cast<int32_t>(next_random(seed))) / 2147483648.0f;
  return result;
}

}  // namespace manyhead::test
