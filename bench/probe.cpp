// The library's probes as a program, for peers.py: answers each line on standard input with a number on standard output.
//   isa                         the instruction set in use
//   fma THREADS SECONDS         GFLOP/s of f32 multiply-adds on it
//   read BYTES THREADS SECONDS  GB/s
#include <iostream>
#include <string>

#include "manyhead/manyhead.h"

int main() {
  std::string what;
  while (std::cin >> what) {
    std::size_t bytes = 0;
    int threads = 1;
    double seconds = 0, rate = 0;
    mh_status status = MH_OK;
    if (what == "isa") {
      const char* isa = mh_isa_current();
      if (isa != nullptr) {
        std::cout << isa << std::endl;
        continue;
      }
      status = MH_INVALID_ARGUMENT;
    } else if (what == "fma" && std::cin >> threads >> seconds) {
      status = mh_probe_arithmetic(nullptr, MH_DTYPE_F32, threads, seconds, &rate);
    } else if (what == "read" && std::cin >> bytes >> threads >> seconds) {
      status = mh_probe_read(nullptr, bytes, threads, seconds, &rate);
    } else {
      std::cerr << "probe: what is '" << what << "'?\n";
      return 1;
    }
    if (status != MH_OK) {
      std::cerr << "probe: " << mh_last_error() << "\n";
      return 1;
    }
    std::cout << rate / 1e9 << std::endl;
  }
}
