// The main of tests that are run with each ISA (MH_ISA): 77, "skipped", where the CPU lacks it.
#include <doctest/doctest.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "registry.hpp"

int main(int argc, char** argv) {
  const char* const asked = std::getenv("MH_ISA");
  for (int32_t i = 0; asked != nullptr && i < manyhead::isa_count(); ++i) {
    if (std::strcmp(asked, manyhead::isa_table(i)->isa) != 0 || manyhead::isa_supported(i)) continue;
    std::printf("skipped: this CPU lacks %s\n", asked);
    return 77;
  }
  return doctest::Context(argc, argv).run();
}
