// Threads that stand by for one caller's next call, where its calls follow each other closely: they look at a number in
// memory, whose change two see within 0.2 us and 16 within 0.8; for oneTBB to find them takes 1 us and 5 us a call. A caller
// depends on none of them: who is not there in time is not waited for. Nothing here is of oneTBB, and nothing inline:
// ThreadSanitizer sees all of it, and not pool.cpp, which brings the threads.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>

#include "manyhead/manyhead.h"

namespace manyhead {

class crew {
 public:
  explicit crew(int64_t members);
  ~crew();  // when all have left that were sent for
  crew(const crew&) = delete;
  crew& operator=(const crew&) = delete;

  // The caller's, one call at a time. fn(arg, i) for i = 0 here, and for those of 1..n-1 <= members, each a member's
  // number, that are there while that lasts; returns when all of them have returned.
  void call(int64_t n, mh_task_fn fn, void* arg);

  // How many of the n - 1 members are neither there nor on their way. So many are on their way from now on, but for those that
  // could not be sent.
  int64_t send_for(int64_t n);
  void not_sent(int64_t members);

  // Nobody is there, nor on the way.
  bool is_deserted() const;

  // Members leave when they see it, and who comes later at once.
  void dismiss();
  void engage();

  // A member's, once for each that was sent for: does what calls bring, until there was none for `patience`, or `shift` is
  // over, as others may want its thread, too.
  void serve();

  static constexpr std::chrono::microseconds patience{50}, shift{2000};

 private:
  struct alignas(64) seat {
    std::atomic<bool> taken{false};
    std::atomic<uint64_t> in{0};  // the call that its member is in
    uint64_t done = 0;            // the last one; the member's
  };

  int64_t take_seat();

  const int64_t members_;
  const std::unique_ptr<seat[]> seats_;  // 0 is nobody's
  std::atomic<int64_t> wanted_{0}, coming_{0};
  // What a call is, and its number: written before `job_`, and not before all have left the last one.
  mh_task_fn fn_ = nullptr;
  void* arg_ = nullptr;
  uint64_t calls_ = 0;
  alignas(64) std::atomic<uint64_t> job_;  // what members look at
  std::atomic<bool> dismissed_{false};
};

}  // namespace manyhead
