// What the core can do at most, measured by loops that do nothing else. Sixteen chains hide the latency of a fused
// multiply-add on every CPU (4 cycles, 2 units; 4 on some of AArch64) and, with two constants, fit 32 registers; where there
// are 16, twelve do.
#pragma once

#include "matrix_unit.hpp"

namespace manyhead::MH_ISA {
namespace {

#if defined(__AVX512F__) || defined(__aarch64__)
inline constexpr int chains = 16;
#else
inline constexpr int chains = 12;
#endif

template <class T>
inline constexpr int64_t flops_of_turn = 2 * chains * lanes<T>;

// a = a / 2 + 1 tends to 2, from a start that the compiler cannot know.
template <class T>
double multiply_adds(int64_t turns) {
  const vec<T> half(T(0.5)), one(T(1));
  vec<T> a[chains];
#pragma GCC unroll 16
  for (int i = 0; i < chains; ++i) a[i] = vec<T>(static_cast<T>(turns + i));
  for (int64_t turn = 0; turn < turns; ++turn) {
#pragma GCC unroll 16
    for (int i = 0; i < chains; ++i) a[i] = xsimd::fma(a[i], half, one);
  }
  vec<T> sum(T(0));
  for (int i = 0; i < chains; ++i) sum = sum + a[i];
  return static_cast<double>(xsimd::reduce_add(sum));
}

#if MH_MATRIX
// A turn is a step of a product of 32 x 32 results, its operands from L1.
inline constexpr int64_t unit_flops_of_turn = 2 * unit_rows * unit_rows * unit_step;

template <class Format>
double unit_multiply_adds(int64_t turns) {
  // Steps of a sum. Units that take columns go through memory step by step; others stay at one.
  constexpr int64_t steps = unit_takes_columns ? 8 : 1, way = unit_takes_columns ? 1 : 0;
  alignas(64) uint16_t a[steps * unit_rows * unit_step] = {};
  alignas(64) uint32_t b[steps * unit_block] = {};
  alignas(64) float c[unit_rows * unit_rows] = {};
  asm volatile("" ::"r"(a), "r"(b) : "memory");  // they might be anything, for all the compiler knows
  const matrix_unit unit;
  const int64_t at_once = unit_takes_columns ? steps : turns;
  for (; turns > 0; turns -= at_once) {
    unit.product<Format>({a, 0, way * unit_step, steps * unit_step}, {b, 0, way * unit_block}, {1, {1}},
                         {unit_rows, min_of(turns, at_once) * unit_step}, c, unit_rows, true, [] {});
  }
  return static_cast<double>(c[0]);
}
#endif

inline uint64_t read_memory(const void* data, int64_t bytes) {
  using words = xsimd::batch<uint64_t, MH_ARCH>;
  constexpr int64_t w = static_cast<int64_t>(words::size);
  const auto* from = static_cast<const uint64_t*>(data);
  words x[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) x[i] = words(uint64_t{0});
  for (const uint64_t* end = from + bytes / 8; from < end; from += 8 * w) {
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) x[i] = x[i] ^ words::load_unaligned(from + i * w);
  }
  words all = x[0];
  for (int i = 1; i < 8; ++i) all = all ^ x[i];
  uint64_t parts[w], sum = 0;
  all.store_unaligned(parts);
  for (int64_t i = 0; i < w; ++i) sum ^= parts[i];
  return sum;
}

}  // namespace
}  // namespace manyhead::MH_ISA
