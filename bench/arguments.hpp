// What stands on the command lines of the benchmarks.
#pragma once

#include <getopt.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>

namespace arguments {

// What follows the option, as a number; anything else, or less than `least`, ends the program.
inline double number(const option& of, double least) {
  char* end = nullptr;
  const double x = std::strtod(optarg, &end);
  if (end != optarg && *end == '\0' && std::isfinite(x) && x >= least) return x;
  std::fprintf(stderr, "--%s is '%s', must be a number of at least %g\n", of.name, optarg, least);
  std::exit(2);
}

inline int whole(const option& of, int least) {
  const double x = number(of, least);
  if (x == std::floor(x) && x <= 1e9) return static_cast<int>(x);
  std::fprintf(stderr, "--%s is '%s', must be a whole number\n", of.name, optarg);
  std::exit(2);
}

// Behind getopt's loop: options are all that these programs take.
inline void no_more(int argc, char** argv, const char* usage) {
  if (optind >= argc) return;
  std::fprintf(stderr, "there is no '%s'\n%s", argv[optind], usage);
  std::exit(2);
}

}  // namespace arguments
