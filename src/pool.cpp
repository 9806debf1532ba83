// See pool.hpp. Compiled without ThreadSanitizer, as oneTBB itself is: it does not see how oneTBB orders what its
// threads do, and so took templates of oneTBB's headers that are compiled here for races.
#include "pool.hpp"

#include <algorithm>

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

void spread(int64_t n, const mh_exec& exec, mh_task_fn fn, void* arg) {
  if (n == 1) return fn(arg, 0);
  if (exec.parallel_for != nullptr) return exec.parallel_for(exec.parallel_ctx, n, fn, arg);
#if MH_WITH_TBB
  // Isolated: while this thread waits it must not pick up some other task of the host, which may hold or want its
  // locks.
  tbb::this_task_arena::isolate(
      [&] { tbb::parallel_for(int64_t{0}, n, [=](int64_t i) { fn(arg, i); }, tbb::simple_partitioner()); });
#else
  for (int64_t i = 0; i < n; ++i) fn(arg, i);
#endif
}

}  // namespace manyhead
