// See crew.hpp.
#include "crew.hpp"

#include <algorithm>
#include <thread>

namespace manyhead {
namespace {

// A job is a call's number, how many calls of fn it is for, and whether it is open.
constexpr int count_bits = 20;
constexpr uint64_t open_bit = 1;
uint64_t job_of(uint64_t number, int64_t n) {
  return number << (count_bits + 1) | static_cast<uint64_t>(n) << 1 | open_bit;
}
bool is_for(uint64_t job, int64_t member) {
  return (job & open_bit) != 0 && static_cast<uint64_t>(member) < (job >> 1 & ((1u << count_bits) - 1));
}

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");
#endif
}

}  // namespace

crew::crew(int64_t members)
    : members_(std::min(members, (int64_t{1} << count_bits) - 2)), seats_(new seat[static_cast<size_t>(members_ + 1)]) {
  job_.store(0);
}

// Who holds it last need not have seen the others leave: they are seen here.
crew::~crew() {
  (void)dismissed_.load(std::memory_order_acquire);
  (void)coming_.load(std::memory_order_acquire);
  for (int64_t i = 1; i <= members_; ++i) (void)seats_[static_cast<size_t>(i)].taken.load(std::memory_order_acquire);
}

void crew::call(int64_t n, mh_task_fn fn, void* arg) {
  fn_ = fn;
  arg_ = arg;
  const uint64_t job = job_of(++calls_, n);
  job_.store(job);
  fn(arg, 0);
  // A member says that it is in and then looks whether the call is still open; here it is closed first, and then looked who is
  // in. Both in one order for all threads (seq_cst), so that one of the two sees the other.
  job_.store(job & ~open_bit);
  for (int64_t i = 1; i < n; ++i) {
    for (int looks = 1; seats_[static_cast<size_t>(i)].in.load() == job; ++looks) {
      if (looks % 1024 == 0) std::this_thread::yield();  // its thread may want this CPU
      pause();
    }
  }
}

int64_t crew::send_for(int64_t n) {
  wanted_.store(n - 1, std::memory_order_relaxed);
  int64_t missing = n - 1 - coming_.load(std::memory_order_relaxed);
  for (int64_t i = 1; i < n && missing > 0; ++i) {
    if (seats_[static_cast<size_t>(i)].taken.load(std::memory_order_relaxed)) --missing;
  }
  if (missing <= 0) return 0;
  coming_.fetch_add(missing, std::memory_order_relaxed);
  return missing;
}

void crew::not_sent(int64_t members) { coming_.fetch_sub(members, std::memory_order_release); }
void crew::dismiss() { dismissed_.store(true, std::memory_order_release); }
void crew::engage() { dismissed_.store(false, std::memory_order_release); }

bool crew::is_deserted() const {
  if (coming_.load(std::memory_order_relaxed) > 0) return false;
  for (int64_t i = 1; i <= members_; ++i) {
    if (seats_[static_cast<size_t>(i)].taken.load(std::memory_order_relaxed)) return false;
  }
  return true;
}

// The one that this thread had last, so that it finds in its cache what it had then, or the first that is free; 0: none is.
int64_t crew::take_seat() {
  thread_local int64_t last = 0;
  const auto take = [&](int64_t i) {
    std::atomic<bool>& taken = seats_[static_cast<size_t>(i)].taken;
    return !taken.load(std::memory_order_relaxed) && !taken.exchange(true, std::memory_order_acquire);
  };
  if (last > 0 && last <= wanted_.load(std::memory_order_relaxed) && take(last)) return last;
  for (int64_t i = 1; i <= members_; ++i) {
    if (take(i)) return last = i;
  }
  return 0;
}

void crew::serve() {
  using clock = std::chrono::steady_clock;
  (void)job_.load();  // after all of the constructor
  const int64_t own = dismissed_.load(std::memory_order_relaxed) ? 0 : take_seat();
  coming_.fetch_sub(1, std::memory_order_release);
  if (own == 0) return;
  seat& mine = seats_[static_cast<size_t>(own)];
  const clock::time_point begin = clock::now();
  clock::time_point last_call = begin;
  for (int looks = 1;; ++looks) {
    const uint64_t job = job_.load();
    if (job != mine.done && is_for(job, own)) {
      mine.in.store(job);
      const bool is_in = job_.load() == job;
      if (is_in) {
        fn_(arg_, own);
        mine.done = job;
      }
      mine.in.store(0, std::memory_order_release);
      if (!is_in) continue;
      last_call = clock::now();
      if (last_call - begin > shift) break;
    } else if (looks % 32 == 0 && (dismissed_.load(std::memory_order_relaxed) || clock::now() - last_call > patience)) {
      break;
    }
    pause();
  }
  mine.taken.store(false, std::memory_order_release);
}

}  // namespace manyhead
