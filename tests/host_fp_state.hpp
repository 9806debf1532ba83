// The floating-point state of this thread, and states that a host may be in.
#pragma once

#include <cstdint>

namespace manyhead::test {

#if defined(__x86_64__)
// Flush to zero, denormals are zero, round up; round down, and overflow, division by zero and invalid operations trap;
// the default.
inline constexpr uint64_t fp_states[] = {0x1f80 | 0x8000 | 0x0040 | 0x4000, 0x1900 | 0x2000, 0x1f80};
// Without the sticky flags, which any arithmetic sets.
inline uint64_t fp_state() { return __builtin_ia32_stmxcsr() & ~0x3fU; }
inline void set_fp_state(uint64_t state) { __builtin_ia32_ldmxcsr(static_cast<unsigned>(state)); }
#elif defined(__aarch64__)
// Flush to zero, round up; round down; the default.
inline constexpr uint64_t fp_states[] = {uint64_t{1} << 24 | uint64_t{1} << 22, uint64_t{2} << 22, 0};
inline uint64_t fp_state() {
  uint64_t state = 0;
  asm volatile("mrs %0, fpcr" : "=r"(state));
  return state;
}
inline void set_fp_state(uint64_t state) { asm volatile("msr fpcr, %0" : : "r"(state)); }
#endif

}  // namespace manyhead::test
