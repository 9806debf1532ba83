// Hardware counters of threads, where the system gives them out (Linux: perf_event_open).
#pragma once

#include <array>
#include <cstdint>
#include <string>

namespace manyhead {

inline constexpr int counter_count = 7;
inline constexpr const char* counter_names[counter_count] = {
    "cycles", "instructions", "cache_references", "cache_misses", "branch_misses", "page_faults", "context_switches"};

// The counters of one thread, from start() on. Those that the system refuses read -1.
class thread_counters {
 public:
  thread_counters() noexcept { files_.fill(-1); }
  ~thread_counters() { close(); }
  thread_counters(const thread_counters&) = delete;
  thread_counters& operator=(const thread_counters&) = delete;

  void start() noexcept;                                     // for the calling thread
  std::array<int64_t, counter_count> read() const noexcept;  // from any thread
  void close() noexcept;

 private:
  std::array<int, counter_count> files_;
};

// "" where hardware counters work for the calling thread, else a sentence that says why not.
std::string why_no_counters();

}  // namespace manyhead
