// Watches calls: a profile keeps calls, their tasks, and what their time went into (mh_profile_begin, MH_PROFILE);
// MH_VERBOSE logs a line a call. Where neither is on, a call costs one look at a number. While a profile runs nothing
// is allocated: its room is set aside when it begins, and what does not fit is counted and not kept.
//
// Watching costs less than a hundredth of the time that is watched. So a short call is watched one time in so many (for
// which its record stands), the clock is read once for several short tasks, and few tasks' phases are looked into.
#pragma once

#include <cstdint>
#include <string>

#include "plan.hpp"

namespace manyhead {

void begin_profile(const mh_profile_options& options);  // throws where one is running
void end_profile();                                     // throws where none is running
std::string profile_text(int32_t format);               // of the one that ended last

// Starts what MH_PROFILE and MH_VERBOSE ask for, on the first call. Throws where they ask for something impossible, and where
// another setting means nothing (machine::environment_error).
void watch_as_environment_says();

struct profile_session;
struct call_record;
struct worker_record;

// One call while it runs, on the stack of the thread that makes it. Calls may be inside calls: the layer's attention.
class watched_call {
 public:
  watched_call() noexcept {}  // one that nobody watches
  watched_call(const plan& plan, int64_t threads, const watched_call* within = nullptr) noexcept {
    if (watching()) start(plan, threads, within);
  }
  // A call that has no plan of its own and is expected to take one thread so many microseconds (plan.hpp).
  // describe(buffer, size) writes "layer f32 ...", "merge f32 ...".
  template <class Describe>
  watched_call(int64_t threads, double expected_us, const Describe& describe) noexcept {
    if (!watching() || !choose(threads, expected_us, nullptr)) return;
    describe(what_, sizeof what_);
    begin(nullptr);
  }
  ~watched_call() {
    if (session_ != nullptr || logged_) stop();
  }
  watched_call(const watched_call&) = delete;
  watched_call& operator=(const watched_call&) = delete;

 private:
  friend class watched_stage;
  friend class watched_worker;
  static bool watching() noexcept;
  bool choose(int64_t threads, double expected_us, const watched_call* within) noexcept;
  void start(const plan& plan, int64_t threads, const watched_call* within) noexcept;
  void begin(const watched_call* within) noexcept;
  void stop() noexcept;
  void log(double seconds) const noexcept;

  profile_session* session_ = nullptr;  // NULL: no profile looks at this call
  call_record* record_ = nullptr;       // NULL: nor is there room for it
  const plan* plan_ = nullptr;
  char what_[160];
  int64_t threads_;
  int64_t stands_for_;  // so many calls
  double start_;
  bool logged_ = false;
  bool looked_into_;  // a task of each worker is, whatever it costs
};

// What workers do together for a call: a list of tasks. Its time is all of one phase, or, with phase_count, of the phases
// that kernels name.
class watched_stage {
 public:
  watched_stage(const watched_call& call, phase what, int64_t tasks, int64_t workers) noexcept {
    if (call.record_ != nullptr) start(call, what, tasks, workers);
  }

 private:
  friend class watched_worker;
  void start(const watched_call& call, phase what, int64_t tasks, int64_t workers) noexcept;

  const watched_call* call_;
  worker_record* workers_ = nullptr;  // NULL: nobody watches
  int64_t tasks_each_;
};

// A worker of a stage, on its own stack while it does its tasks.
class watched_worker {
 public:
  watched_worker(const watched_stage& stage, int64_t worker) noexcept {
    if (stage.workers_ != nullptr) start(stage, worker);
  }
  ~watched_worker() {
    if (record_ != nullptr && pending_ > 0) end_run();
  }
  watched_worker(const watched_worker&) = delete;
  watched_worker& operator=(const watched_worker&) = delete;

  void begin_task() noexcept {
    if (record_ != nullptr && to_detailed_-- == 0) begin_detailed();
  }
  // Which task it is; its clock, NULL for most: some stand for all.
  phase_clock* clock_of(const kernel_task& task) noexcept {
    if (record_ == nullptr) return nullptr;
    if (pending_ == 0) first_ = task;
    return detailed_ ? &clock_ : nullptr;
  }
  void end_task() noexcept {
    if (record_ != nullptr && ++pending_ >= run_) end_run();
  }

 private:
  void start(const watched_stage& stage, int64_t worker) noexcept;
  void begin_detailed() noexcept;
  void end_run() noexcept;

  worker_record* record_ = nullptr;  // NULL: nobody watches
  profile_session* session_;
  uint64_t last_;        // the end of its last run of tasks, which one look at the clock ends
  double fastest_;       // ticks of a task
  int64_t run_;          // tasks of a run
  int64_t pending_;      // tasks since the last run
  int64_t to_detailed_;  // tasks until one is looked into, below 0: it is not known yet
  bool detailed_;
  kernel_task first_;  // of the run
  phase_clock clock_;
};

}  // namespace manyhead
