// See openmp.hpp. Calls the runtime that is there, as code compiled for libgomp would; links none.
#include "openmp.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>

#include "check.hpp"
#include "fork.hpp"
#include "machine.hpp"

namespace manyhead {
namespace {

// In a child the runtime takes its parent's threads for its own, and waits for them for ever. Seen where the first call is the
// child's, as well.
std::atomic<bool> forked{false};
bool has_threads() {
  [[maybe_unused]] static const bool looked = [] {
    forked.store(was_forked());
    when_forked([] { forked.store(true, std::memory_order_relaxed); });
    return true;
  }();
  return !forked.load(std::memory_order_relaxed);
}

// A team ends when all of its threads have, even those that came too late to find work: one whose CPU another process has
// keeps the caller waiting for a turn of the scheduler, some milliseconds. Who has waited so goes to oneTBB's threads, which are
// not waited for, as long as it waited, and twice as long each time that this comes of going back. With a busy process beside
// two threads, calls of 60 us took 170 to 280 on average, on oneTBB's 77 to 97, and 76 to 160 so.
class absence {
 public:
  using clock = std::chrono::steady_clock;

  bool is_over() const { return clock::now() >= end_; }

  void note(clock::duration share, clock::duration wait) {
    if (wait < least_wait || wait < share) return;
    const clock::time_point now = clock::now();
    length_ = std::clamp(now < end_ + length_ ? 2 * length_ : wait, wait, std::max<clock::duration>(wait, longest));
    end_ = now + length_;
  }

 private:
  static constexpr std::chrono::microseconds least_wait{200};
  static constexpr std::chrono::seconds longest{1};

  clock::duration length_{};
  clock::time_point end_{};
};
thread_local absence away;

struct job {
  const mh_openmp& openmp;
  int64_t n;
  mh_task_fn fn;
  void* arg;
  absence::clock::time_point own_end;  // of the caller's share
};

// A thread of the team: the same calls every time, so that it finds in its cache what it had in the last spread of n.
void share(void* data) {
  job& j = *static_cast<job*>(data);
  const int64_t number = j.openmp.thread_num(), team = j.openmp.num_threads();
  for (int64_t i = number; i < j.n; i += team) j.fn(j.arg, i);
  if (number == 0) j.own_end = absence::clock::now();
}

void spread_over_team(void* ctx, int64_t n, mh_task_fn fn, void* arg) {
  const absence::clock::time_point begin = absence::clock::now();
  job j{*static_cast<const mh_openmp*>(ctx), n, fn, arg, begin};
  j.openmp.parallel(share, &j, 0, 0);
  away.note(j.own_end - begin, absence::clock::now() - j.own_end);
}

}  // namespace

void use_openmp(mh_exec& exec) {
  if (exec.openmp == nullptr) return;
  constexpr size_t least = offsetof(mh_openmp, num_threads) + sizeof(mh_openmp::num_threads);
  const mh_openmp openmp = read_struct(exec.openmp, least, "exec.openmp");
  if (openmp.parallel == nullptr || openmp.max_threads == nullptr || openmp.thread_num == nullptr ||
      openmp.num_threads == nullptr) {
    invalid("exec.openmp has a function that is NULL, must have all four");
  }
  if (exec.parallel_for != nullptr) invalid("exec.parallel_for is not NULL, must be NULL where exec.openmp is not");
  if (!this_machine().openmp || !has_threads() || !away.is_over()) return;
  exec.threads = std::clamp(openmp.max_threads(), 1, exec.threads);
  exec.parallel_for = spread_over_team;
  exec.parallel_ctx = const_cast<mh_openmp*>(exec.openmp);
}

}  // namespace manyhead
