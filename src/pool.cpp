// See pool.hpp. Compiled without ThreadSanitizer, as oneTBB itself is: it does not see how oneTBB orders what its
// threads do, and so took templates of oneTBB's headers that are compiled here for races.
#include "pool.hpp"

#include <algorithm>
#include <atomic>
#include <bit>
#include <chrono>
#include <map>
#include <memory>
#include <optional>

#include "crew.hpp"
#include "fork.hpp"
#include "fp_state.hpp"
#include "machine.hpp"

#if MH_WITH_TBB
#include <tbb/global_control.h>
#include <tbb/info.h>
#include <tbb/parallel_for.h>
#include <tbb/partitioner.h>
#include <tbb/task_arena.h>
#endif

namespace manyhead {

int32_t wanted_threads(int32_t threads) { return threads > 0 ? threads : max_threads(); }

#if MH_WITH_TBB
namespace {

// oneTBB's threads are not to be asked for: at the end of the process, when it may be gone before who calls, and in children of a
// process that has asked (spread_over_threads), which have none of them and perhaps its locks, held by threads of the parent's.
std::atomic<bool> no_threads{false};
struct at_end {
  ~at_end() { no_threads.store(true); }
} const end;
thread_local bool thread_ends = false;  // its owner_of_places is gone

bool has_threads() { return !no_threads.load(std::memory_order_relaxed) && !thread_ends; }

// Calls of spread at this moment, from all threads.
std::atomic<int64_t> spreading{0};
struct spreading_now {
  const bool alone = spreading.fetch_add(1, std::memory_order_relaxed) == 0;
  ~spreading_now() { spreading.fetch_sub(1, std::memory_order_relaxed); }
};

// Whether the host lets oneTBB have so many threads.
bool may_have(int64_t threads) {
  return static_cast<int64_t>(tbb::global_control::active_value(tbb::global_control::max_allowed_parallelism)) >=
         threads;
}

// Where a thread's calls of spread go: to threads of an arena of oneTBB's.
class place {
 public:
  // own_arena: one of `threads`, where the thread's has more. Else all of those would wake and look for work, and any of them
  // take it, so that no core had in its cache what it had in the last call.
  place(int64_t threads, bool own_arena) : members_(threads - 1) {
    if (own_arena) arena_.emplace(static_cast<int>(threads)).initialize();
  }
  place() : members_(0) {}  // the arena that the thread is in, where nobody stands by
  ~place() {
    if (crew_ != nullptr) crew_->dismiss();
  }
  place(const place&) = delete;
  place& operator=(const place&) = delete;

  void spread(int64_t n, mh_task_fn fn, void* arg) {
    const spreading_now now;
    if (has_crew(now.alone)) {
      send(crew_->send_for(n));
      crew_->call(n, fn, arg);
    } else if (arena_) {
      arena_->execute([&] { spread_tasks(n, fn, arg); });
    } else {
      spread_tasks(n, fn, arg);
    }
  }

 private:
  using clock = std::chrono::steady_clock;
  static constexpr int many_calls = 8;

  // Whether threads are to stand by: calls follow each other closely, many by now, and no other thread wants some.
  bool has_crew(bool alone) {
    if (members_ == 0) return false;
    if (engaged_) {
      if (alone && !crew_->is_deserted()) return true;
      crew_->dismiss();
      engaged_ = false;
      follows_ = 0;
    }
    follows_ = alone && clock::now() - ended_ < crew::patience ? std::min(follows_ + 1, many_calls) : 0;
    if (follows_ < many_calls || !may_have(members_ + 1)) return false;
    if (crew_ == nullptr) crew_ = std::make_shared<crew>(members_);
    crew_->engage();
    return engaged_ = true;
  }

  // Members, as many as there is memory for, unless the host allows fewer threads by now.
  void send(int64_t members) noexcept {
    if (members > 0 && !may_have(members_ + 1)) return crew_->not_sent(members);
    const auto serve = [crew = crew_] { crew->serve(); };
    for (; members > 0; --members) {
      try {
        if (arena_) {
          arena_->enqueue(serve);
        } else {
          tbb::this_task_arena::enqueue(serve);
        }
      } catch (...) {
        return crew_->not_sent(members);
      }
    }
  }

  // Laid before threads by static_partitioner, the same call before the same thread every time, calls need not be looked
  // for: on 16 threads 12 heads of one row and 1024 keys took 15 to 16 us so and 20 to 21 with simple_partitioner, where 12
  // of 1/16 take 13; on 8 18 and 20, on 4 32 and 33, on two 0.3 us more. But calls wait for threads that do not come, busy
  // with other work or asleep, and those that are to be split off them as well. So only if most came last time; and now and
  // then to see whether they do, as short calls can be over before all have found one.
  void spread_tasks(int64_t n, mh_task_fn fn, void* arg) {
    // Isolated: while this thread waits it must not pick up some other task of the host, which may hold or want its
    // locks.
    tbb::this_task_arena::isolate([&] {
      const bool counts = tbb::this_task_arena::max_concurrency() > 2;  // of two threads each gets a call any way
      std::atomic<uint64_t> came{0};                                    // a bit for each of the first 64
      const auto call = [&came, counts, fn, arg](int64_t i) {
        if (counts)
          came.fetch_or(uint64_t{1} << tbb::this_task_arena::current_thread_index() % 64, std::memory_order_relaxed);
        fn(arg, i);
      };
      if (counts && (most_come_ || ++calls_ % 16 == 0)) {
        tbb::parallel_for(int64_t{0}, n, call, tbb::static_partitioner());
      } else {
        tbb::parallel_for(int64_t{0}, n, call, tbb::simple_partitioner());
      }
      most_come_ = 4 * std::popcount(came.load(std::memory_order_relaxed)) >= 3 * std::min<int64_t>(n, 64);
    });
    if (members_ > 0) ended_ = clock::now();
  }

  const int64_t members_;                 // of a crew
  std::optional<tbb::task_arena> arena_;  // none: the thread's
  bool most_come_ = false;                // for most of the last calls a thread of its own came
  uint32_t calls_ = 0;                    // spread as tasks when that was not so
  clock::time_point ended_;               // the last that were spread as tasks
  int follows_ = 0;                       // so many before them followed closely
  bool engaged_ = false;
  std::shared_ptr<crew> crew_;  // members keep it while they are out
};

struct places_of_thread {
  std::map<int64_t, place> by_threads;
  place here;
};

// A host may still call from destructors that its thread runs after this one.
struct owner_of_places {
  std::unique_ptr<places_of_thread> places = std::make_unique<places_of_thread>();
  ~owner_of_places() {
    if (!has_threads()) places.release();  // what they are made of is not to be asked either
    thread_ends = true;
  }
};

// Not of a host's own arena, whose threads may be bound to CPUs, nor of oneTBB's own threads, which are at the host's work.
place& place_of(int64_t threads) {
  thread_local owner_of_places owner;
  places_of_thread& own = *owner.places;
  const int all = tbb::this_task_arena::max_concurrency();
  if (all == tbb::info::default_concurrency() && tbb::this_task_arena::current_thread_index() <= 0) {
    const auto known = own.by_threads.find(threads);
    if (known != own.by_threads.end()) return known->second;
    if (may_have(threads)) return own.by_threads.try_emplace(threads, threads, threads < all).first->second;
  }
  return own.here;
}

// oneTBB throws where the system gives it no thread or no memory. What it had been given to do by then is done.
struct once {
  mh_task_fn fn;
  void* arg;
  std::atomic<bool> done{false};  // fn(arg, 0), which leaves nothing behind that nobody does

  static void call(void* self, int64_t i) {
    once& x = *static_cast<once*>(self);
    x.fn(x.arg, i);
    if (i == 0) x.done.store(true, std::memory_order_relaxed);
  }
};

void spread_over_threads(int64_t n, const mh_exec& exec, mh_task_fn fn, void* arg) {
  if (!has_threads()) return fn(arg, 0);
  [[maybe_unused]] static const bool asks = (when_forked([] { no_threads.store(true); }), true);
  once all{fn, arg};
  try {
    place_of(usable_threads(exec)).spread(n, once::call, &all);
  } catch (...) {
    if (!all.done.load(std::memory_order_relaxed)) fn(arg, 0);
  }
}

}  // namespace
#endif

int64_t usable_threads(const mh_exec& exec) {
  const int64_t threads = wanted_threads(exec.threads);
  if (exec.parallel_for != nullptr) return threads;
#if MH_WITH_TBB
  return threads == 1 || !has_threads() ? 1 : std::min<int64_t>(threads, tbb::this_task_arena::max_concurrency());
#else
  return 1;
#endif
}

void spread(int64_t n, const mh_exec& exec, mh_task_fn fn, void* arg) {
  if (n == 1) return fn(arg, 0);
  if (exec.parallel_for != nullptr) {
    const default_fp_state fp;  // again when the host's function returns: what waits in it may run others' work
    return exec.parallel_for(exec.parallel_ctx, n, fn, arg);
  }
#if MH_WITH_TBB
  spread_over_threads(n, exec, fn, arg);
#else
  fn(arg, 0);
#endif
}

int64_t thread_number(int64_t i, [[maybe_unused]] int64_t n, [[maybe_unused]] const mh_exec& exec) {
#if MH_WITH_TBB
  if (exec.parallel_for == nullptr && has_threads() && n == tbb::this_task_arena::max_concurrency())
    return tbb::this_task_arena::current_thread_index();
#endif
  return i;
}

}  // namespace manyhead
