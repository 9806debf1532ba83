// The cycle counter of a core, for profiles: a few nanoseconds to read, and the same on all cores of a machine.
#pragma once

#include <stdint.h>

namespace manyhead {
namespace {  // compiled for several instruction sets: nothing here may be shared between objects

inline uint64_t read_ticks() {
#if defined(__x86_64__)
  return __builtin_ia32_rdtsc();
#elif defined(__aarch64__)
  uint64_t now;
  asm volatile("mrs %0, cntvct_el0" : "=r"(now));
  return now;
#endif
}

}  // namespace
}  // namespace manyhead
