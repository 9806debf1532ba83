// How items are dealt to workers. In order; or in equal shares of neighbours, one for each thread of the pool and the same
// in every call, so that the next call on the same arrays, or one that reads what this one wrote, finds them in the cache
// of the same core. Who is done with its share takes from the others': whoever is late finds the work done.
#pragma once

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstdint>

#include "blocks.hpp"

namespace manyhead {

struct dealing {
  int64_t step = 1;        // neighbours that are taken at a time
  bool shares = false;     // else all items in order
  bool in_halves = false;  // half of what is left for each worker of a share is taken at a time, no less than `step`
};

class deal {
 public:
  struct run {
    int64_t begin, end;
  };

  deal(int64_t items, int64_t workers, const dealing& how)
      : items_(items),
        step_(how.step),
        shares_(how.shares ? std::min(workers, most_shares) : 1),
        parts_(how.in_halves ? 2 * (workers / shares_) : 0) {
    const int64_t steps = blocks(items, step_);
    uint64_t open = 0;
    for (int64_t i = 0; i < shares_; ++i) {
      const int64_t begin = border(steps, i), end = border(steps, i + 1);
      share_[i] = {begin, end};
      if (begin < end) open |= uint64_t{1} << i;
    }
    open_.store(open, std::memory_order_relaxed);
  }

  bool in_shares() const { return shares_ > 1; }

  // What a worker takes next, the number of whose thread is `seat`. False: nothing is left.
  bool take(int64_t seat, run& to) {
    const int64_t own = seat % shares_;
    if (take_of(own, to)) return true;
    if (shares_ == 1) return false;
    while (const uint64_t open = open_.load(std::memory_order_relaxed)) {
      // The first open one behind its own.
      const int64_t other = (own + std::countr_zero(std::rotr(open, static_cast<int>(own)))) % most_shares;
      if (take_of(other, to)) return true;
      close(other);  // who took its last may not have come to it
    }
    return false;
  }

 private:
  static constexpr int64_t most_shares = 64;  // with more workers, several have one
  // `next` is any worker's to change, but no std::atomic, which would be cleared each time, of all 64.
  struct alignas(64) share {
    int64_t next, end;  // in steps
  };

  int64_t border(int64_t steps, int64_t i) const { return steps / shares_ * i + steps % shares_ * i / shares_; }

  void close(int64_t number) { open_.fetch_and(~(uint64_t{1} << number), std::memory_order_relaxed); }

  bool take_of(int64_t number, run& to) {
    share& from = share_[number];
    const std::atomic_ref next(from.next);
    int64_t begin = next.load(std::memory_order_relaxed), end;
    do {
      if (begin >= from.end) return false;
      end = begin + (parts_ > 0 ? std::max<int64_t>((from.end - begin) / parts_, 1) : 1);
    } while (!next.compare_exchange_weak(begin, end, std::memory_order_relaxed));
    if (end == from.end) close(number);
    to = {begin * step_, std::min(end * step_, items_)};
    return true;
  }

  const int64_t items_, step_, shares_, parts_;
  std::atomic<uint64_t> open_;  // a bit for each share: whether something is left of it
  share share_[most_shares];
};

}  // namespace manyhead
