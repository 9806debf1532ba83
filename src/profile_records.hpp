// What a profile keeps: a record for each call, for what each thread did in a stage of it, for tasks and their phases. profile.cpp
// writes them while calls run, profile_text.cpp reads them when the session has ended.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "counters.hpp"
#include "plan.hpp"

namespace manyhead {

using counts = std::array<int64_t, counter_count>;

struct call_record {
  int64_t problem;  // index of it; -1: see what
  int64_t within;   // index of the call that this one is a part of, -1 = none
  int64_t threads;
  double start, seconds;  // since the session began
  int32_t thread;
  int64_t stands_for;  // so many calls
  bool done;
  std::atomic<bool> missing;  // there was no room for some of its tasks
  char what[160];
};

// What one thread did in one stage of a call. Nobody else writes it while the call runs.
struct alignas(64) worker_record {
  int64_t call;
  int32_t thread;  // -1: did nothing
  int32_t what;    // the stage's phase
  int64_t tasks;
  uint64_t busy;                   // in its tasks
  uint64_t detailed[phase_count];  // in some of them, where kernels name phases
};

// Tasks that a worker did one after another, between two looks at the clock. A cache line: it is new to the cache.
struct alignas(64) task_record {
  std::atomic<int64_t> worker;  // index of the worker's record, plus 1: 0 = not written yet
  uint64_t begin, end;
  int64_t phases;  // index of its phases, -1 = not looked into
  int32_t tasks;
  int32_t batch, kv_head, chunk;  // of the first, as kernels are told them (plan.hpp: entries)
  int64_t row_begin, row_end;
};

struct phases_record {
  uint64_t ticks[phase_count];
};

// What calls have in common whose problem and plan are the same.
struct problem_record {
  problem p;
  const kernel_table* table;
  route kernel;
  double flops, bytes;
};

struct thread_record {
  int64_t id;  // the system's
  thread_counters counters;
  counts counted;
  std::atomic<bool> finished;  // counted is final
  int64_t skipped;             // calls that were not watched
  int64_t problem;             // index of its last call's, -1 = none
  uint64_t next_detailed;      // when it may look into a task again
  uint64_t random;
};

// Memory for so many records, touched now, so that it costs nothing later.
template <class Record>
struct room {
  explicit room(int64_t n) : size(n), records(new Record[static_cast<size_t>(n)]()) {}

  // The index of the first of n new ones, or -1.
  int64_t take(int64_t n = 1) noexcept {
    const int64_t index = taken.fetch_add(n, std::memory_order_relaxed);
    return index + n <= size ? index : -1;
  }
  int64_t kept() const { return std::min(taken.load(), size); }
  int64_t dropped() const { return std::max<int64_t>(taken.load() - size, 0); }
  Record& operator[](int64_t index) const { return records[static_cast<size_t>(index)]; }

  const int64_t size;
  const std::unique_ptr<Record[]> records;
  std::atomic<int64_t> taken{0};
};

struct profile_session {
  profile_session(const mh_profile_options& options, int64_t n);

  const int64_t number;
  const bool counters;
  room<call_record> calls;
  room<problem_record> problems;
  room<worker_record> workers;
  room<task_record> tasks;
  room<phases_record> phases;
  std::atomic<int64_t> lost_calls{0};  // of threads that there was no room for
  std::string why_not;                 // there are no hardware counters
  std::unique_ptr<thread_record[]> threads;
  std::atomic<int32_t> thread_count{0};
  double start, seconds = 0;
  uint64_t start_ticks, ticks = 0;
  const double look;  // the ticks of a look at the clock

  thread_record& thread_at(int32_t index) const noexcept { return threads[static_cast<size_t>(index)]; }
  int64_t problem_of(const plan& plan, thread_record& thread) noexcept;
  // This thread's place among `threads`.
  int32_t this_thread() noexcept;
};

// As one JSON object, or, with MH_PROFILE_TRACE, in the form that Perfetto and Chrome read. Of a session that has ended.
std::string text_of(const profile_session& s, int32_t format);

}  // namespace manyhead
