// The floating-point state of this thread while the library works.
#pragma once

#include <cstdint>

namespace manyhead {

// Plans are made and kernels run in the default floating-point state (round to nearest, denormals kept, no traps) whatever the
// host's is, and leave it as it was, sticky flags included: so results do not depend on which of the host's threads did what.
class default_fp_state {
 public:
#if defined(__x86_64__)
  default_fp_state() noexcept : saved_(__builtin_ia32_stmxcsr()) { __builtin_ia32_ldmxcsr(0x1f80U); }
  ~default_fp_state() { __builtin_ia32_ldmxcsr(saved_); }

 private:
  unsigned saved_;
#elif defined(__aarch64__)
  default_fp_state() noexcept {
    asm volatile("mrs %0, fpcr\n\tmrs %1, fpsr" : "=r"(control_), "=r"(status_));
    asm volatile("msr fpcr, %0" : : "r"(uint64_t{0}));
  }
  ~default_fp_state() { asm volatile("msr fpcr, %0\n\tmsr fpsr, %1" : : "r"(control_), "r"(status_)); }

 private:
  uint64_t control_, status_;
#endif
 public:
  default_fp_state(const default_fp_state&) = delete;
  default_fp_state& operator=(const default_fp_state&) = delete;
};

}  // namespace manyhead
