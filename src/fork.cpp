#include "fork.hpp"

#if defined(__linux__)
#include <pthread.h>

#include <fstream>
#include <sstream>
#include <string>

namespace manyhead {

void when_forked(void (*child)(), void (*before)(), void (*after)()) { pthread_atfork(before, after, child); }

// proc(5): pid (name) state ppid pgrp session tty_nr tpgid flags; a name may hold anything.
bool was_forked() {
  std::ifstream file("/proc/self/stat");
  std::string line;
  std::getline(file, line);
  std::istringstream words(line.substr(line.rfind(')') + 1));
  std::string skipped;
  for (int i = 0; i < 6; ++i) words >> skipped;
  unsigned long flags = 0;
  words >> flags;
  constexpr unsigned long forked_without_exec = 0x40;  // PF_FORKNOEXEC of the kernel
  return (flags & forked_without_exec) != 0;
}

}  // namespace manyhead
#else
namespace manyhead {
void when_forked(void (*)(), void (*)(), void (*)()) {}
bool was_forked() { return false; }
}  // namespace manyhead
#endif
