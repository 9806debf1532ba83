// Watches calls: a profile keeps each call, its tasks, and what their time went into (mh_profile_begin, MH_PROFILE);
// MH_VERBOSE logs a line a call. Where neither is on, a call costs one look at a number. While a profile runs nothing is
// allocated: its room is set aside when it begins, and what does not fit is counted and not kept.
#pragma once

#include <cstdint>
#include <string>

#include "plan.hpp"

namespace manyhead {

void begin_profile(const mh_profile_options& options);  // throws where one is running
void end_profile();                                     // throws where none is running
std::string profile_text(int32_t format);               // of the one that ended last

// Starts what MH_PROFILE and MH_VERBOSE ask for, on the first call. Throws where they ask for something impossible.
void watch_as_environment_says();

struct profile_session;
struct call_record;
struct worker_record;

// One call while it runs, on the stack of the thread that makes it. Calls may be inside calls: the layer's attention.
class watched_call {
 public:
  watched_call() noexcept {}  // one that nobody watches
  watched_call(const plan& plan, int64_t threads, const watched_call* within = nullptr) noexcept {
    if (watching()) start(&plan, threads, within);
  }
  // A call that has no plan of its own: describe(buffer, size) writes "layer f32 ...", "merge f32 ...".
  template <class Describe>
  watched_call(int64_t threads, const Describe& describe) noexcept {
    if (!watching()) return;
    describe(what_, sizeof what_);
    start(nullptr, threads, nullptr);
  }
  ~watched_call() {
    if (session_ != nullptr || logged_) stop();
  }
  watched_call(const watched_call&) = delete;
  watched_call& operator=(const watched_call&) = delete;

 private:
  friend class watched_task;
  static bool watching() noexcept;
  void start(const plan* plan, int64_t threads, const watched_call* within) noexcept;
  void stop() noexcept;
  void log(double seconds) const noexcept;

  profile_session* session_ = nullptr;
  call_record* record_ = nullptr;     // NULL: no room for it
  worker_record* workers_ = nullptr;  // one of each thread; NULL: its tasks are not looked at
  const plan* plan_ = nullptr;
  char what_[160];
  int64_t threads_ = 0;
  double start_ = 0;
  bool logged_ = false;
  bool short_ = false;
};

// One task of a call while it runs, on the thread that runs it. Its time is all of the phase `whole`, or, with
// phase_count, of the phases that the kernel names to clock(), which is NULL for most tasks: some stand for all.
class watched_task {
 public:
  watched_task(const watched_call& call, int64_t worker, int32_t whole, const kernel_task* task = nullptr) noexcept {
    if (call.workers_ != nullptr) start(call, worker, whole, task);
  }
  ~watched_task() {
    if (call_ != nullptr) stop();
  }
  watched_task(const watched_task&) = delete;
  watched_task& operator=(const watched_task&) = delete;

  phase_clock* clock() noexcept { return call_ != nullptr && detailed_ ? &clock_ : nullptr; }

 private:
  void start(const watched_call& call, int64_t worker, int32_t whole, const kernel_task* task) noexcept;
  void stop() noexcept;

  const watched_call* call_ = nullptr;
  const kernel_task* task_;
  worker_record* worker_;
  int32_t whole_;
  bool detailed_;
  uint64_t start_;
  phase_clock clock_;
};

}  // namespace manyhead
