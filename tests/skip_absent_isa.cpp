// Ends a micro test with 77, which Meson counts as skipped, on a CPU that lacks the ISA the test is compiled for.
//
// Linked beside micro_test.cpp and compiled for the floor of the CPU family. The check runs before the initialisers
// of doctest's test cases: those are compiled with the flags of the ISA and may already use its instructions.
#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif
#include <unistd.h>
#include <cstdio>
#include <cstring>
#include <initializer_list>

namespace {

#if defined(__x86_64__)
// AMX: the CPU has tiles of bf16 (bits 24 and 22), and Linux lets this process use them.
bool has_tiles() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d >> 22 & 5u) == 5u && syscall(SYS_arch_prctl, 0x1023L, 18L) == 0;
}
#endif

bool cpu_has(const char* level) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
  if (std::strcmp(level, "x86_v3") == 0) return v3;
  const bool v4 = v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512cd") &&
                  __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                  __builtin_cpu_supports("avx512vl");
  if (std::strcmp(level, "x86_v4") == 0) return v4;
  if (std::strcmp(level, "x86_amx") == 0) return v4 && has_tiles();
  unsigned a = 0, b = 0, c = 0, d = 0;
  const bool more = __get_cpuid_count(7, 1, &a, &b, &c, &d) != 0;
  if (std::strcmp(level, "x86_bf16") == 0) return v4 && more && (a >> 5 & 1u) != 0;
  const bool fp16 = more && (a >> 21 & 1u) != 0;  // tiles of f16
  if (std::strcmp(level, "x86_amx_fp16") == 0) return v4 && has_tiles() && fp16;
#elif defined(__aarch64__) && defined(__linux__)
  if (std::strcmp(level, "arm_bf16") == 0) return (getauxval(AT_HWCAP2) >> 14 & 1u) != 0;  // HWCAP2_BF16
#endif
  for (const char* everywhere : {"x86_floor", "arm_floor", "any"})
    if (std::strcmp(level, everywhere) == 0) return true;
  return false;
}

__attribute__((constructor(101))) void skip_when_absent() {
  if (cpu_has(MH_LEVEL)) return;
  std::puts("skipped: this CPU lacks " MH_ISA_NAME);
  std::fflush(stdout);
  _exit(77);
}

}  // namespace
