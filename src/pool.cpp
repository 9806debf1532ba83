// See pool.hpp. Compiled without ThreadSanitizer, as oneTBB itself is: it does not see how oneTBB orders what its
// threads do, and so took templates of oneTBB's headers that are compiled here for races.
#include "pool.hpp"

#include <algorithm>
#include <atomic>
#include <bit>

#include "machine.hpp"

#if MH_WITH_TBB
#include <tbb/parallel_for.h>
#include <tbb/partitioner.h>
#include <tbb/task_arena.h>
#endif

namespace manyhead {

int32_t wanted_threads(int32_t threads) { return threads > 0 ? threads : max_threads(); }

int64_t usable_threads(const mh_exec& exec) {
  const int64_t threads = wanted_threads(exec.threads);
  if (exec.parallel_for != nullptr) return threads;
#if MH_WITH_TBB
  return threads == 1 ? 1 : std::min<int64_t>(threads, tbb::this_task_arena::max_concurrency());
#else
  return 1;
#endif
}

#if MH_WITH_TBB
namespace {

// A call for each of oneTBB's threads. Laid before its thread by static_partitioner, it needs not be looked for: on 16
// threads 12 heads of one row and 1024 keys took 15 to 16 us so and 20 to 21 with simple_partitioner, where 12 of 1/16
// take 13; on 8 18 and 20, on 4 32 and 33, on two 0.3 us more. But calls wait for threads that do not come, busy with other
// work or asleep, and those that are to be split off them as well. So only if most came last time; and now and then to
// see whether they do, as short calls can be over before all have found one.
void spread_over_all(int64_t n, mh_task_fn fn, void* arg) {
  thread_local bool most_come = false;
  thread_local uint32_t calls = 0;
  std::atomic<uint64_t> came{0};  // a bit for each of the first 64
  const auto call = [&came, fn, arg](int64_t i) {
    came.fetch_or(uint64_t{1} << tbb::this_task_arena::current_thread_index() % 64, std::memory_order_relaxed);
    fn(arg, i);
  };
  if (most_come || ++calls % 16 == 0) {
    tbb::parallel_for(int64_t{0}, n, call, tbb::static_partitioner());
  } else {
    tbb::parallel_for(int64_t{0}, n, call, tbb::simple_partitioner());
  }
  most_come = 4 * std::popcount(came.load(std::memory_order_relaxed)) >= 3 * std::min<int64_t>(n, 64);
}

}  // namespace
#endif

void spread(int64_t n, const mh_exec& exec, mh_task_fn fn, void* arg) {
  if (n == 1) return fn(arg, 0);
  if (exec.parallel_for != nullptr) return exec.parallel_for(exec.parallel_ctx, n, fn, arg);
#if MH_WITH_TBB
  // Isolated: while this thread waits it must not pick up some other task of the host, which may hold or want its
  // locks.
  tbb::this_task_arena::isolate([&] {
    if (n > 2 && are_numbered(n, exec)) return spread_over_all(n, fn, arg);
    tbb::parallel_for(int64_t{0}, n, [=](int64_t i) { fn(arg, i); }, tbb::simple_partitioner());
  });
#else
  for (int64_t i = 0; i < n; ++i) fn(arg, i);
#endif
}

bool are_numbered(int64_t n, const mh_exec& exec) {
  if (n == 1) return false;
  if (exec.parallel_for != nullptr) return true;
#if MH_WITH_TBB
  return n == tbb::this_task_arena::max_concurrency();
#else
  return false;
#endif
}

int64_t thread_number(int64_t i, [[maybe_unused]] const mh_exec& exec) {
#if MH_WITH_TBB
  if (exec.parallel_for == nullptr) return tbb::this_task_arena::current_thread_index();
#endif
  return i;
}

}  // namespace manyhead
