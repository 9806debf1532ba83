// See pool.hpp. Compiled without ThreadSanitizer, as oneTBB itself is: it does not see how oneTBB orders what its
// threads do, and so took templates of oneTBB's headers that are compiled here for races.
#include "pool.hpp"

#include <algorithm>
#include <atomic>
#include <bit>
#include <map>

#include "machine.hpp"

#if MH_WITH_TBB
#include <tbb/info.h>
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

// Where calls of spread go, as one of the threads that spread them sees it.
struct place {
  bool most_come = false;  // for most of the last calls a thread of its own came
  uint32_t calls = 0;      // spread when that was not so
};

// An arena of as many threads as the calls may use, where oneTBB has more: else all of these would wake and look for work, and
// any of them take it, without a number that says which core's cache a share lies in. Not within an arena of the host's, whose
// threads may be bound to CPUs.
struct own_place : place {
  explicit own_place(int64_t threads) : arena(static_cast<int>(threads)) {}
  tbb::task_arena arena;
};
bool has_own_place(int64_t threads) {
  const int all = tbb::this_task_arena::max_concurrency();
  return threads < all && all == tbb::info::default_concurrency();
}

// Laid before threads by static_partitioner, the same call before the same thread every time, calls need not be looked for:
// on 16 threads 12 heads of one row and 1024 keys took 15 to 16 us so and 20 to 21 with simple_partitioner, where 12 of 1/16
// take 13; on 8 18 and 20, on 4 32 and 33, on two 0.3 us more. But calls wait for threads that do not come, busy with other
// work or asleep, and those that are to be split off them as well. So only if most came last time; and now and then to
// see whether they do, as short calls can be over before all have found one.
void spread_in(place& here, int64_t n, mh_task_fn fn, void* arg) {
  // Isolated: while this thread waits it must not pick up some other task of the host, which may hold or want its
  // locks.
  tbb::this_task_arena::isolate([&] {
    std::atomic<uint64_t> came{0};  // a bit for each of the first 64
    const auto call = [&came, fn, arg](int64_t i) {
      came.fetch_or(uint64_t{1} << tbb::this_task_arena::current_thread_index() % 64, std::memory_order_relaxed);
      fn(arg, i);
    };
    if (here.most_come || ++here.calls % 16 == 0) {
      tbb::parallel_for(int64_t{0}, n, call, tbb::static_partitioner());
    } else {
      tbb::parallel_for(int64_t{0}, n, call, tbb::simple_partitioner());
    }
    here.most_come = 4 * std::popcount(came.load(std::memory_order_relaxed)) >= 3 * std::min<int64_t>(n, 64);
  });
}

// Of two threads one call is this one's and the other one's any way.
void spread_over_two(int64_t n, mh_task_fn fn, void* arg) {
  tbb::this_task_arena::isolate(
      [=] { tbb::parallel_for(int64_t{0}, n, [=](int64_t i) { fn(arg, i); }, tbb::simple_partitioner()); });
}

}  // namespace
#endif

void spread(int64_t n, const mh_exec& exec, mh_task_fn fn, void* arg) {
  if (n == 1) return fn(arg, 0);
  if (exec.parallel_for != nullptr) return exec.parallel_for(exec.parallel_ctx, n, fn, arg);
#if MH_WITH_TBB
  if (tbb::this_task_arena::max_concurrency() == 2) return spread_over_two(n, fn, arg);
  const int64_t threads = usable_threads(exec);
  if (!has_own_place(threads)) {
    thread_local place common;
    return spread_in(common, n, fn, arg);
  }
  thread_local std::map<int64_t, own_place> own;
  own_place& here = own.try_emplace(threads, threads).first->second;
  here.arena.execute([&] { spread_in(here, n, fn, arg); });
#else
  for (int64_t i = 0; i < n; ++i) fn(arg, i);
#endif
}

int64_t thread_number(int64_t i, [[maybe_unused]] int64_t n, [[maybe_unused]] const mh_exec& exec) {
#if MH_WITH_TBB
  if (exec.parallel_for == nullptr && n == tbb::this_task_arena::max_concurrency())
    return tbb::this_task_arena::current_thread_index();
#endif
  return i;
}

}  // namespace manyhead
