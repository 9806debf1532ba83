// The floating-point state of this thread while the library works.
#pragma once

#include <cstdint>

namespace manyhead {

// Every function of the C interface works in the default floating-point state (round to nearest, denormals kept, no traps) whatever
// the host's is, and leaves it as it was, sticky flags included; so do tasks on a host's threads: results do not depend on which
// thread did what. Compilers may move arithmetic past a change of state, but not loads and stores: so what is computed with the
// state set comes from memory and goes there, or is done by a function that they do not see.
class default_fp_state {
 public:
#if defined(__x86_64__)
  default_fp_state() noexcept : saved_(__builtin_ia32_stmxcsr()) { set(0x1f80U); }
  ~default_fp_state() { set(saved_); }

 private:
  static void set(unsigned state) noexcept {
    asm volatile("" : : : "memory");
    __builtin_ia32_ldmxcsr(state);
    asm volatile("" : : : "memory");
  }
  unsigned saved_;
#elif defined(__aarch64__)
  default_fp_state() noexcept {
    asm volatile("mrs %0, fpcr\n\tmrs %1, fpsr" : "=r"(control_), "=r"(status_) : : "memory");
    asm volatile("msr fpcr, %0" : : "r"(uint64_t{0}) : "memory");
  }
  ~default_fp_state() { asm volatile("msr fpcr, %0\n\tmsr fpsr, %1" : : "r"(control_), "r"(status_) : "memory"); }

 private:
  uint64_t control_, status_;
#endif
 public:
  default_fp_state(const default_fp_state&) = delete;
  default_fp_state& operator=(const default_fp_state&) = delete;
};

}  // namespace manyhead
