// For tests that end, fork or starve a process: each experiment in a process of its own, whose first call of the
// library is the experiment's, with a limit to its time. Experiments, and the checks in them, throw what went wrong. The process
// that forks them makes no calls itself, so has no threads.
#pragma once

#include <sys/wait.h>
#include <unistd.h>
#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <stdexcept>
#include <string>

namespace manyhead::test {

// Seconds for what takes milliseconds: what is not over by then waits for something that never comes.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr unsigned patience = 60;
#else
constexpr unsigned patience = 20;
#endif

inline void expect(bool good, const std::string& what) {
  if (!good) throw std::runtime_error(what);
}

// "" where `function` has thrown nothing.
template <class Function>
std::string thrown(Function&& function) noexcept {
  try {
    function();
  } catch (const std::exception& e) {
    return std::string(e.what()) + " (thrown)";
  }
  return "";
}

// "" where the child has ended well.
inline std::string end_of(pid_t child) {
  int status = 0;
  if (child < 0 || waitpid(child, &status, 0) != child) return "there is no child";
  if (WIFSIGNALED(status)) {
    const int signal = WTERMSIG(status);
    return signal == SIGALRM ? "waited for ever" : "ended by signal " + std::to_string(signal);
  }
  return WEXITSTATUS(status) == 0 ? "" : "ended with " + std::to_string(WEXITSTATUS(status));
}

// "" where `experiment` has ended well in a child of this process, in so many seconds; else what went wrong.
template <class Experiment>
std::string in_child(Experiment&& experiment, unsigned seconds = patience) {
  int ends[2];
  if (pipe(ends) != 0) return "no pipe";
  std::fflush(nullptr);
  const pid_t child = fork();
  if (child == 0) {
    std::signal(SIGABRT, SIG_DFL);  // doctest's would report another test case that failed
    std::signal(SIGSEGV, SIG_DFL);
    alarm(seconds);
    close(ends[0]);
    const std::string said = thrown(experiment);
    const bool told = write(ends[1], said.data(), said.size()) == static_cast<ssize_t>(said.size());
    _exit(told ? 0 : 1);
  }
  close(ends[1]);
  const std::string end = end_of(child);  // before the pipe is read: a pipe holds more than is ever said
  char said[4096];
  const ssize_t size = end.empty() ? read(ends[0], said, sizeof said) : 0;
  close(ends[0]);
  return end + std::string(said, static_cast<size_t>(std::max<ssize_t>(size, 0)));
}

}  // namespace manyhead::test
