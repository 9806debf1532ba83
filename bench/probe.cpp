// The probes as a program, for peers.py: answers each line on standard input with a number on standard output.
//   isa                       the widest instruction set
//   fma THREADS SECONDS       GFLOP/s of f32 multiply-adds
//   read BYTES THREADS SECONDS  GB/s
#include <iostream>
#include <string>

#include "probes.hpp"

int main() {
  std::string what;
  while (std::cin >> what) {
    std::size_t bytes = 0;
    int threads = 1;
    double seconds = 0;
    if (what == "isa") {
      std::cout << probes::best_isa() << std::endl;
    } else if (what == "fma" && std::cin >> threads >> seconds) {
      std::cout << probes::fma_rate(probes::best_isa(), threads, seconds) / 1e9 << std::endl;
    } else if (what == "read" && std::cin >> bytes >> threads >> seconds) {
      std::cout << probes::read_rate(bytes, threads, seconds) / 1e9 << std::endl;
    } else {
      std::cerr << "probe: what is '" << what << "'?\n";
      return 1;
    }
  }
}
