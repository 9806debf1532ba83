// See counters.hpp. The only file that asks the kernel for counters.
#include "counters.hpp"

#if defined(__linux__)
#include <linux/perf_event.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#endif

namespace manyhead {

#if defined(__linux__)
namespace {

struct event {
  uint32_t type;
  uint64_t config;
};
constexpr event events[counter_count] = {
    {PERF_TYPE_HARDWARE, PERF_COUNT_HW_CPU_CYCLES},       {PERF_TYPE_HARDWARE, PERF_COUNT_HW_INSTRUCTIONS},
    {PERF_TYPE_HARDWARE, PERF_COUNT_HW_CACHE_REFERENCES}, {PERF_TYPE_HARDWARE, PERF_COUNT_HW_CACHE_MISSES},
    {PERF_TYPE_HARDWARE, PERF_COUNT_HW_BRANCH_MISSES},    {PERF_TYPE_SOFTWARE, PERF_COUNT_SW_PAGE_FAULTS},
    {PERF_TYPE_SOFTWARE, PERF_COUNT_SW_CONTEXT_SWITCHES}};

// A counter of the calling thread, running; -1 and errno where it is refused.
int open_counter(const event& e) {
  perf_event_attr attributes{};
  attributes.size = sizeof attributes;
  attributes.type = e.type;
  attributes.config = e.config;
  attributes.exclude_hv = 1;
  // Of this program's own doing. A switch to another thread is the kernel's, and needs the right to see that.
  const bool of_kernel = e.type == PERF_TYPE_SOFTWARE && e.config == PERF_COUNT_SW_CONTEXT_SWITCHES;
  attributes.exclude_kernel = of_kernel ? 0 : 1;
  attributes.read_format = PERF_FORMAT_TOTAL_TIME_ENABLED | PERF_FORMAT_TOTAL_TIME_RUNNING;
  return static_cast<int>(syscall(SYS_perf_event_open, &attributes, 0, -1, -1, PERF_FLAG_FD_CLOEXEC));
}

}  // namespace

void thread_counters::start() noexcept {
  close();
  for (int i = 0; i < counter_count; ++i) files_[static_cast<size_t>(i)] = open_counter(events[i]);
}

std::array<int64_t, counter_count> thread_counters::read() const noexcept {
  std::array<int64_t, counter_count> values;
  for (size_t i = 0; i < values.size(); ++i) {
    struct {
      uint64_t value, enabled, running;
    } now{};
    values[i] = -1;
    if (files_[i] < 0 || ::read(files_[i], &now, sizeof now) != sizeof now) continue;
    if (now.enabled > 0 && now.running == 0) continue;  // never had a turn
    // With more counters than the CPU has, each counts for a part of the time.
    const double share = now.running > 0 ? static_cast<double>(now.enabled) / static_cast<double>(now.running) : 1.0;
    values[i] = static_cast<int64_t>(static_cast<double>(now.value) * share);
  }
  return values;
}

void thread_counters::close() noexcept {
  for (int& file : files_) {
    if (file >= 0) ::close(file);
    file = -1;
  }
}

std::string why_no_counters() {
  const int file = open_counter(events[0]);
  if (file >= 0) {
    ::close(file);
    return "";
  }
  const int failure = errno;
  std::string text = "the kernel gives out no hardware counters: ";
  if (failure == ENOENT || failure == ENODEV || failure == EOPNOTSUPP)
    return text + "this CPU, or this virtual machine, shows none";
  if (failure == EACCES || failure == EPERM) {
    std::ifstream setting("/proc/sys/kernel/perf_event_paranoid");
    int level = 0;
    if (setting >> level && level > 2)
      return text + "kernel.perf_event_paranoid is " + std::to_string(level) + ", must be at most 2";
    return text + "this process may not have them (a container's rules, or kernel.perf_event_paranoid)";
  }
  return text + std::strerror(failure);
}

#else

void thread_counters::start() noexcept {}
std::array<int64_t, counter_count> thread_counters::read() const noexcept {
  std::array<int64_t, counter_count> values;
  values.fill(-1);
  return values;
}
void thread_counters::close() noexcept {}
std::string why_no_counters() { return "hardware counters are read on Linux only"; }

#endif

}  // namespace manyhead
