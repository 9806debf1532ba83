// Ends a micro test with 77, which Meson counts as skipped, on a CPU that lacks the ISA the test is compiled for.
//
// Linked beside micro_test.cpp and compiled for the floor of the CPU family. The check runs before the initialisers
// of doctest's test cases: those are compiled with the flags of the ISA and may already use its instructions.
#include <unistd.h>
#include <cstdio>

#include "machine.hpp"

namespace {

__attribute__((constructor(101))) void skip_when_absent() {
  if (manyhead::this_machine().has_level[static_cast<int>(manyhead::cpu_level::MH_LEVEL)]) return;
  std::puts("skipped: this CPU lacks " MH_ISA_NAME);
  std::fflush(stdout);
  _exit(77);
}

}  // namespace
