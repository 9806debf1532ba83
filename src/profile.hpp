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
  friend class watched_stage;
  friend class watched_task;
  static bool watching() noexcept;
  void start(const plan* plan, int64_t threads, const watched_call* within) noexcept;
  void stop() noexcept;
  void log(double seconds) const noexcept;

  profile_session* session_ = nullptr;
  call_record* record_ = nullptr;  // NULL: no room for it
  const plan* plan_ = nullptr;
  char what_[160];
  int64_t threads_ = 0;
  double start_ = 0;
  bool logged_ = false;
  bool short_ = false;
  bool looked_at_ = false;  // its tasks too
};

// What workers do together for a call: a list of tasks. Its time is all of one phase, or, with phase_count, of the phases
// that kernels name.
class watched_stage {
 public:
  watched_stage(const watched_call& call, phase what, int64_t workers) noexcept {
    if (call.looked_at_) start(call, what, workers);
  }
  // A worker begins, on the thread that calls this.
  void enter(int64_t worker) const noexcept {
    if (workers_ != nullptr) begin_work(worker);
  }

 private:
  friend class watched_task;
  void start(const watched_call& call, phase what, int64_t workers) noexcept;
  void begin_work(int64_t worker) const noexcept;

  const watched_call* call_ = nullptr;
  worker_record* workers_ = nullptr;  // NULL: nobody watches
};

// One task of a worker. clock() is NULL for most tasks: some stand for all.
class watched_task {
 public:
  watched_task(const watched_stage& stage, int64_t worker, const kernel_task* task) noexcept {
    if (stage.workers_ != nullptr) start(stage, worker, task);
  }
  ~watched_task() {
    if (worker_ != nullptr) stop();
  }
  watched_task(const watched_task&) = delete;
  watched_task& operator=(const watched_task&) = delete;

  phase_clock* clock() noexcept { return worker_ != nullptr && detailed_ ? &clock_ : nullptr; }

 private:
  void start(const watched_stage& stage, int64_t worker, const kernel_task* task) noexcept;
  void stop() noexcept;

  worker_record* worker_ = nullptr;
  profile_session* session_;
  const kernel_task* task_;
  bool detailed_;
  uint64_t start_;
  phase_clock clock_;
};

}  // namespace manyhead
