// See profile.hpp. A session is found through one atomic pointer. Who uses it says so in a count, which end_profile waits
// for; after that it only reads. Sessions live until the next one begins, so that they can be described. A call that is
// not looked at leaves them alone: it knows a session by its number, and is counted outside of it.
#include "profile.hpp"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <mutex>
#include <thread>

#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "blocks.hpp"
#include "check.hpp"
#include "fork.hpp"
#include "fp_state.hpp"
#include "kernels/ticks.hpp"
#include "machine.hpp"
#include "problem_line.hpp"
#include "profile_records.hpp"

namespace manyhead {
namespace {

double seconds_now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

constexpr int32_t most_threads = 1024;            // later ones' calls and tasks are not kept
constexpr int32_t most_counted_threads = 64;      // each counter is an open file
constexpr int64_t most_worker_records = 1 << 18;  // 32 MB
constexpr int64_t default_calls = 4096, default_tasks = 65536;
// What watching may cost. A short call is watched one time in so many that the watching of it, some `call_cost_us`, is
// `call_share` of the calls' time. A look at the clock takes 10 to 30 ns: there is one in the time of `looks_per_run`. A
// task's phases are 20 to 50 looks, or more where it is long: one task is looked into in the time of
// `looks_per_detailed` and of `times_per_detailed` tasks. Which one is left to chance, as neighbours differ in a pattern
// (the rows of a causal problem, the layers of a model).
constexpr double call_cost_us = 2, call_share = 0.004;
// Cores are up to so many times as fast as expected_us says, matrix units so many times as fast as cores (of the layer's
// projections that is counted before); a call takes some time whatever it computes.
constexpr double faster_core = 8, faster_matrix = 4, empty_call_us = 1;
constexpr double looks_per_run = 3000, looks_per_detailed = 40000, times_per_detailed = 12;
// The first calls of a thread are watched whatever it costs, with a task of each worker looked into: a profile of a few
// calls shows them all.
constexpr int64_t first_calls = 64;

int64_t thread_id() {
#if defined(__linux__)
  return syscall(SYS_gettid);
#else
  static std::atomic<int64_t> next{1};
  thread_local const int64_t id = next.fetch_add(1);
  return id;
#endif
}

uint64_t next_random(uint64_t& state) noexcept {
  state = state * 6364136223846793005U + 1442695040888963407U;
  return state >> 33;
}

// The ticks that a look at the clock takes; less than one where it is slow.
double measured_look() noexcept {
  constexpr int looks = 256;
  const uint64_t begin = read_ticks();
  for (int i = 1; i < looks; ++i) (void)read_ticks();
  return static_cast<double>(read_ticks() - begin) / looks;
}

std::atomic<profile_session*> active{nullptr};
std::atomic<int64_t> running{0};  // the number of the active one, 0 = none
std::atomic<int64_t> users{0};
std::atomic<bool> verbose{false};

std::mutex change;                // of what follows, never held while calls are waited for
std::atomic<bool> ending{false};  // the last session waits for its calls
// The running one, or the one that ended last. Never destroyed: threads may still be at work when the process ends.
auto& last_session = *new std::unique_ptr<profile_session>;

// The calls of each thread of the session that were not watched. Not in the session, as who only counts does not join
// it: each thread counts on its own and stores the sum here. A thread that is held up in between while another session
// begins can spoil one count of that one, no more.
struct alignas(64) skipped_count {
  std::atomic<int64_t> calls;
};
skipped_count skipped[most_threads];

thread_local int64_t uses = 0;  // those of `users` that are this thread's

void leave() noexcept {
  users.fetch_sub(1);
  --uses;
}

// The running session with a user more, or NULL.
profile_session* join() noexcept {
  users.fetch_add(1);
  ++uses;
  profile_session* session = active.load();
  if (session == nullptr) leave();
  return session;
}

// A child has none of the threads whose calls are watched, but for the one that forked, perhaps within such a call.
void watch_forks() {
  when_forked(
      [] {
        running.store(0);
        active.store(nullptr);
        ending.store(false);
        users.store(uses);
        change.unlock();
      },
      [] { change.lock(); }, [] { change.unlock(); });
}

void finish(thread_record& thread) noexcept {
  if (thread.finished.exchange(true)) return;
  thread.counted = thread.counters.read();
  thread.counters.close();
}

// A thread's place in the session that it works for. A thread that ends gives the files of its counters back.
struct thread_place {
  int64_t session = 0;  // its number
  int32_t index = -1;
  int64_t first_calls = 0;  // so many are still watched in any case
  int64_t skipped = 0;
  uint64_t random = 0;

  ~thread_place() {
    if (session == 0) return;
    profile_session* joined = join();
    if (joined == nullptr) return;
    if (joined->number == session && index >= 0) finish(joined->thread_at(index));
    leave();
  }
};
thread_local thread_place this_place;

}  // namespace

profile_session::profile_session(const mh_profile_options& o, int64_t n)
    : number(n),
      counters((o.flags & MH_PROFILE_COUNTERS) != 0),
      calls(o.calls > 0 ? o.calls : default_calls),
      problems(calls.size),
      workers(std::clamp<int64_t>(int64_t{4} * max_threads() * calls.size, 4096, most_worker_records)),
      tasks(o.tasks > 0 ? o.tasks : default_tasks),
      phases(tasks.size / 4 + 1),
      why_not(counters ? why_no_counters() : ""),
      threads(std::make_unique<thread_record[]>(most_threads)),
      start(seconds_now()),
      start_ticks(read_ticks()),
      look(measured_look()) {}

int32_t profile_session::this_thread() noexcept {
  thread_place& place = this_place;
  if (place.session == number) return place.index;
  int32_t index = thread_count.load();
  while (index < most_threads && !thread_count.compare_exchange_weak(index, index + 1)) {
  }
  place.session = number;
  place.index = index < most_threads ? index : -1;
  place.first_calls = first_calls;
  place.skipped = 0;
  place.random = static_cast<uint64_t>(index);
  if (place.index < 0) return -1;
  skipped[index].calls.store(0, std::memory_order_relaxed);
  thread_record& thread = thread_at(index);
  thread.id = thread_id();
  thread.problem = -1;
  thread.random = static_cast<uint64_t>(index);
  if (counters && index < most_counted_threads) thread.counters.start();
  return index;
}

// The record of the plan's problem: a new one where it is not that of the thread's last call. -1: no room.
int64_t profile_session::problem_of(const plan& plan, thread_record& thread) noexcept {
  if (thread.problem >= 0) {
    const problem_record& last = problems[thread.problem];
    if (last.table == plan.table && std::memcmp(&last.p, &plan.p, sizeof plan.p) == 0) return thread.problem;
  }
  const int64_t index = problems.take();
  if (index < 0) return -1;
  problem_record& r = problems[index];
  std::memcpy(static_cast<void*>(&r.p), &plan.p, sizeof plan.p);  // padding too
  r.table = plan.table;
  r.kernel = plan.kernel;
  r.flops = plan.flops;
  r.bytes = plan.bytes;
  return thread.problem = index;
}

// --- calls and tasks ------------------------------------------------------------------------------------------------

bool watched_call::watching() noexcept {
  return running.load(std::memory_order_relaxed) != 0 || verbose.load(std::memory_order_relaxed);
}

// Whether there is anything to do for this call. If a profile runs that does not look at it, it is counted here.
bool watched_call::choose(int64_t threads, double expected_us, const watched_call* within) noexcept {
  logged_ = verbose.load(std::memory_order_relaxed);
  threads_ = threads;
  stands_for_ = 1;
  looked_into_ = true;
  const int64_t session = running.load(std::memory_order_relaxed);
  if (session == 0) return logged_;
  thread_place& place = this_place;
  bool watched = true;
  if (within != nullptr) {
    watched = within->session_ != nullptr;
    stands_for_ = within->stands_for_;
    looked_into_ = within->looked_into_;
  } else if (place.session == session && --place.first_calls < 0) {
    const double least_us = empty_call_us + expected_us / faster_core / static_cast<double>(threads);
    const double calls = call_cost_us / call_share / least_us;
    looked_into_ = calls > 1;
    if (looked_into_) {
      stands_for_ = static_cast<int64_t>(calls) + 1;
      watched = next_random(place.random) * static_cast<uint64_t>(stands_for_) >> 31 == 0;
    }
  }
  if (watched) {
    session_ = join();
  } else if (place.session == session && place.index >= 0) {
    skipped[place.index].calls.store(++place.skipped, std::memory_order_relaxed);
  }
  return session_ != nullptr || logged_;
}

void watched_call::start(const plan& plan, int64_t threads, const watched_call* within) noexcept {
  const bool is_faster = plan.kernel == route_matrix && plan.p.dtype != MH_DTYPE_F32;  // of f32 it does six for one
  if (!choose(threads, plan.expected_us / (is_faster ? faster_matrix : 1.0), within)) return;
  plan_ = &plan;
  begin(within);
}

void watched_call::begin(const watched_call* within) noexcept {
  start_ = seconds_now();
  if (session_ == nullptr) return;
  profile_session& s = *session_;
  const int32_t thread = s.this_thread();
  if (thread < 0) {
    s.lost_calls.fetch_add(1);
    return;
  }
  const int64_t problem = plan_ != nullptr ? s.problem_of(*plan_, s.thread_at(thread)) : -1;
  const int64_t index = plan_ != nullptr && problem < 0 ? -1 : s.calls.take();
  if (index < 0) return;
  record_ = &s.calls[index];
  record_->problem = problem;
  record_->threads = threads_;
  record_->stands_for = stands_for_;
  record_->thread = thread;
  record_->start = start_ - s.start;
  const bool inside = within != nullptr && within->session_ == session_ && within->record_ != nullptr;
  record_->within = inside ? within->record_ - s.calls.records.get() : -1;
  if (plan_ == nullptr) std::memcpy(record_->what, what_, sizeof what_);
}

void watched_call::stop() noexcept {
  const double seconds = seconds_now() - start_;
  if (record_ != nullptr) {
    record_->seconds = seconds;
    record_->done = true;
  }
  if (session_ != nullptr) leave();
  if (logged_) log(seconds);
}

// One write a line, so that lines of several threads do not mix.
void watched_call::log(double seconds) const noexcept {
  char line[768];
  int size = 0;
  if (plan_ != nullptr) {
    size = std::snprintf(line, sizeof line, "manyhead: %s  # %.2f us, %lld thread%s, %s@%s\n", to_text(plan_->p).text,
                         seconds * 1e6, static_cast<long long>(threads_), threads_ == 1 ? "" : "s",
                         route_names[plan_->kernel], plan_->table->isa);
  } else {
    size = std::snprintf(line, sizeof line, "manyhead: # %s: %.2f us, at most %lld thread%s\n", what_, seconds * 1e6,
                         static_cast<long long>(threads_), threads_ == 1 ? "" : "s");
  }
  std::fwrite(line, 1, static_cast<size_t>(std::clamp<int>(size, 0, sizeof line - 1)), stderr);
}

void watched_stage::start(const watched_call& call, phase what, int64_t tasks, int64_t workers) noexcept {
  profile_session& s = *call.session_;
  const int64_t first = s.workers.take(workers);
  if (first < 0) {
    call.record_->missing.store(true, std::memory_order_relaxed);
    return;
  }
  call_ = &call;
  workers_ = &s.workers[first];
  tasks_each_ = blocks(tasks, workers);
  for (int64_t i = 0; i < workers; ++i) {
    workers_[i].call = call.record_ - s.calls.records.get();
    workers_[i].thread = -1;
    workers_[i].what = what;
  }
}

void watched_worker::start(const watched_stage& stage, int64_t worker) noexcept {
  profile_session& s = *stage.call_->session_;
  worker_record& w = stage.workers_[worker];
  w.thread = s.this_thread();
  if (w.thread < 0) {
    stage.call_->record_->missing.store(true, std::memory_order_relaxed);
    return;
  }
  record_ = &w;
  session_ = &s;
  last_ = read_ticks();
  fastest_ = std::numeric_limits<double>::infinity();
  run_ = 1;
  pending_ = 0;
  detailed_ = false;
  to_detailed_ = -1;
  if (w.what != phase_count) return;
  // Any of its tasks: not always the first. Whoever does more than its share comes to it.
  thread_record& thread = s.thread_at(w.thread);
  if (stage.call_->looked_into_ || last_ >= thread.next_detailed)
    to_detailed_ = static_cast<int64_t>(next_random(thread.random) % static_cast<uint64_t>(stage.tasks_each_));
}

void watched_worker::begin_detailed() noexcept {
  if (pending_ > 0) end_run();
  detailed_ = true;
  run_ = 1;
  clock_ = {};
  clock_.weight = 1;
  clock_.last = last_;
}

void watched_worker::end_run() noexcept {
  profile_session& s = *session_;
  thread_record& thread = s.thread_at(record_->thread);
  const uint64_t begin = last_, end = detailed_ ? clock_.last : read_ticks(), total = end - begin;
  record_->busy += total;
  record_->tasks += pending_;
  // By the fastest, as who is interrupted takes long.
  fastest_ = std::min(fastest_, std::max(static_cast<double>(total), 1.0) / static_cast<double>(pending_));
  int64_t phases = -1;
  if (detailed_) {
    // Brought to the task's time: some phases are taken from a part of its tiles.
    uint64_t named = 0;
    for (const uint64_t ticks : clock_.ticks) named += ticks;
    const double scale = named > 0 ? static_cast<double>(total) / static_cast<double>(named) : 0.0;
    phases = s.phases.take();
    for (int i = 0; i < phase_count; ++i) {
      const auto ticks = static_cast<uint64_t>(static_cast<double>(clock_.ticks[i]) * scale);
      record_->detailed[i] += ticks;
      if (phases >= 0) s.phases[phases].ticks[i] = ticks;
    }
    const double pause = std::max(looks_per_detailed * s.look, times_per_detailed * fastest_);
    thread.next_detailed =
        end + static_cast<uint64_t>(pause * 0x1p-30 * static_cast<double>(next_random(thread.random)));
  }
  const int64_t index = s.tasks.take();
  if (index >= 0) {
    task_record& r = s.tasks[index];
    r.tasks = static_cast<int32_t>(pending_);
    r.begin = std::max(begin, s.start_ticks) - s.start_ticks;
    r.end = r.begin + total;
    r.phases = phases;
    if (record_->what == phase_count) {
      r.batch = static_cast<int32_t>(first_.batch);
      r.kv_head = static_cast<int32_t>(first_.kv_head_begin);
      r.chunk = static_cast<int32_t>(first_.chunk);
      r.row_begin = first_.row_begin;
      r.row_end = first_.row_end;
    }
    r.worker.store(record_ - s.workers.records.get() + 1, std::memory_order_release);
  }
  run_ = 1 + static_cast<int64_t>(std::min(looks_per_run * s.look / fastest_, 1e6));
  if (record_->what == phase_count && to_detailed_ < 0 && end >= thread.next_detailed) to_detailed_ = 0;
  last_ = end;
  pending_ = 0;
  detailed_ = false;
}

// --- sessions ---------------------------------------------------------------------------------------------------------

static void check_none_runs() {
  if (active.load() != nullptr) invalid("a profile is running: end it first");
  if (ending.load()) invalid("a profile is ending: another thread waits for its calls in mh_profile_end");
}

void begin_profile(const mh_profile_options& options) {
  check_at_least("options.calls", options.calls, 0);
  check_at_least("options.tasks", options.tasks, 0);
  check_bits("options.flags", options.flags, MH_PROFILE_COUNTERS);
  check_zero("options.reserved0", options.reserved0);
  constexpr int64_t most = int64_t{1} << 24;  // some gigabytes
  if (options.calls > most || options.tasks > most) invalid("options.calls and options.tasks must be at most 2^24");
  const std::lock_guard lock(change);
  check_none_runs();
  static int64_t sessions = 0;
  last_session = std::make_unique<profile_session>(options, ++sessions);
  active.store(last_session.get());
  running.store(last_session->number);
}

// No call joins the running session any more. NULL: there is none.
static profile_session* close_profile() {
  const std::lock_guard lock(change);
  profile_session* session = active.load();
  if (session == nullptr) return nullptr;
  ending.store(true);
  running.store(0);
  active.store(nullptr);
  return session;
}

// Waits for its calls, at most so long. False: some still run.
static bool wait_for_calls(profile_session& session, double patience) {
  for (const double end = seconds_now() + patience; users.load() != 0;) {
    if (seconds_now() > end) return false;
    std::this_thread::yield();
  }
  session.seconds = seconds_now() - session.start;
  session.ticks = read_ticks() - session.start_ticks;
  for (int32_t i = 0; i < session.thread_count.load(); ++i) {
    finish(session.thread_at(i));
    session.thread_at(i).skipped = skipped[i].calls.load(std::memory_order_relaxed);
  }
  ending.store(false);
  return true;
}

void end_profile() {
  profile_session* const session = close_profile();
  if (session == nullptr) invalid("no profile is running");
  wait_for_calls(*session, std::numeric_limits<double>::infinity());
}

// --- MH_PROFILE and MH_VERBOSE ----------------------------------------------------------------------------------------

namespace {

int64_t process_id() {
#if defined(__linux__)
  return getpid();
#else
  return 0;
#endif
}

struct {
  std::string path;
  int64_t process = 0;  // that it belongs to
} trace;

// "%p" becomes the number of the process, so that several do not write to one file.
std::string with_process_id(std::string path) {
  const size_t at = path.find("%p");
  return at == path.npos ? path : path.replace(at, 2, std::to_string(process_id()));
}

void write_trace() {
  if (process_id() != trace.process) return;  // a child that was forked: the file is its parent's
  const default_fp_state fp;
  profile_session* const session = close_profile();
  if (session != nullptr && !wait_for_calls(*session, 1.0)) {
    std::fprintf(stderr, "manyhead: MH_PROFILE: calls were still running when the process ended; nothing is written\n");
    return;
  }
  try {
    const std::string text = profile_text(MH_PROFILE_TRACE);
    std::FILE* file = std::fopen(trace.path.c_str(), "wb");
    const bool written = file != nullptr && std::fwrite(text.data(), 1, text.size(), file) == text.size();
    if (file == nullptr || std::fclose(file) != 0 || !written)
      std::fprintf(stderr, "manyhead: MH_PROFILE: %s could not be written\n", trace.path.c_str());
  } catch (const std::exception& e) {
    std::fprintf(stderr, "manyhead: MH_PROFILE: %s\n", e.what());
  }
}

bool start_watching() {
  const machine& m = this_machine();
  if (!m.environment_error.empty()) invalid(m.environment_error);
  [[maybe_unused]] static const bool once = (watch_forks(), true);
  if (!m.profile_path.empty()) {
    trace.path = with_process_id(m.profile_path);
    std::FILE* file = std::fopen(trace.path.c_str(), "wb");  // now, not after a long run
    if (file == nullptr)
      invalid("the environment variable MH_PROFILE is \"", m.profile_path,
              "\", which cannot be written: ", std::strerror(errno));
    std::fclose(file);
    begin_profile({sizeof(mh_profile_options), 0, 0, MH_PROFILE_COUNTERS, 0});
    trace.process = process_id();
    std::atexit(write_trace);
  }
  verbose.store(m.verbose);
  return true;
}

}  // namespace

std::string profile_text(int32_t format) {
  check_enum("format", format, MH_PROFILE_TRACE, "mh_profile_format");
  const std::lock_guard lock(change);
  check_none_runs();
  if (last_session == nullptr) invalid("no profile has run");
  return text_of(*last_session, format);
}

void watch_as_environment_says() {
  static const bool started = start_watching();  // tried again by the next call where it throws
  static_cast<void>(started);
}

}  // namespace manyhead
