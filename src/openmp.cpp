// See openmp.hpp. Calls the runtime that is there, as code compiled for libgomp would; links none.
#include "openmp.hpp"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "check.hpp"
#include "machine.hpp"

namespace manyhead {
namespace {

// In a child the runtime takes its parent's threads for its own, and waits for them for ever.
std::atomic<bool> forked{false};
[[maybe_unused]] const int watches_forks =
    pthread_atfork(nullptr, nullptr, [] { forked.store(true, std::memory_order_relaxed); });

struct job {
  const mh_openmp& openmp;
  int64_t n;
  mh_task_fn fn;
  void* arg;
};

// A thread of the team: the same calls every time, so that it finds in its cache what it had in the last spread of n.
void share(void* data) {
  const job& j = *static_cast<const job*>(data);
  const int64_t team = j.openmp.num_threads();
  for (int64_t i = j.openmp.thread_num(); i < j.n; i += team) j.fn(j.arg, i);
}

void spread_over_team(void* ctx, int64_t n, mh_task_fn fn, void* arg) {
  job j{*static_cast<const mh_openmp*>(ctx), n, fn, arg};
  j.openmp.parallel(share, &j, 0, 0);
}

}  // namespace

void use_openmp(mh_exec& exec) {
  if (exec.openmp == nullptr) return;
  const mh_openmp openmp = read_struct(exec.openmp, sizeof(mh_openmp), "exec.openmp");
  if (openmp.parallel == nullptr || openmp.max_threads == nullptr || openmp.thread_num == nullptr ||
      openmp.num_threads == nullptr) {
    invalid("exec.openmp has a function that is NULL, must have all four");
  }
  if (exec.parallel_for != nullptr) invalid("exec.parallel_for is not NULL, must be where openmp is not NULL");
  if (!this_machine().openmp || forked.load(std::memory_order_relaxed)) return;
  exec.threads = std::clamp(openmp.max_threads(), 1, exec.threads);
  exec.parallel_for = spread_over_team;
  exec.parallel_ctx = const_cast<mh_openmp*>(exec.openmp);
}

}  // namespace manyhead
