// Scratch memory that a thread keeps from call to call. Fresh memory of a few MB costs a page fault every 4 KB, each
// time: 20 % of a layer's run on 8 x 128 tokens.
#pragma once

#include <cstddef>
#include <cstdint>

#include "memory.hpp"

namespace manyhead {

// What a thread keeps for one use. Grows to the largest need up to keep_at_most.
class thread_memory {
 public:
  // Of this thread for Use, a type of the user's.
  template <class Use>
  static thread_memory& of() {
    thread_local constinit thread_memory kept;
    thread_local const last_breath end(kept);
    return kept;
  }
  thread_memory(const thread_memory&) = delete;
  thread_memory& operator=(const thread_memory&) = delete;

 private:
  friend class borrowed_memory;
  static constexpr int64_t keep_at_most = 64 << 20;

  // A host may call from destructors that its thread runs after ours. So what is kept has none, and is never free again.
  struct last_breath {
    thread_memory& kept;
    explicit last_breath(thread_memory& x) : kept(x) {}
    ~last_breath() {
      release(kept.data_);
      kept.data_ = nullptr;
      kept.size_ = 0;
      kept.busy_ = true;
    }
  };
  constexpr thread_memory() = default;

  char* data_ = nullptr;
  int64_t size_ = 0;
  bool busy_ = false;
};

// 64-byte aligned bytes: the thread's, or, where those are in use (a host's pool may run another call inside ours) or
// the need is large, its own; none for none. Throws std::bad_alloc.
class borrowed_memory {
 public:
  borrowed_memory(thread_memory& kept, int64_t bytes) {
    if (bytes == 0) return;
    if (kept.busy_ || bytes > thread_memory::keep_at_most) {
      data_ = static_cast<char*>(allocate(static_cast<size_t>(bytes)));
      return;
    }
    if (bytes > kept.size_) {
      release(kept.data_);
      kept.data_ = nullptr;
      kept.size_ = 0;
      kept.data_ = static_cast<char*>(allocate(static_cast<size_t>(bytes)));
      kept.size_ = bytes;
    }
    kept.busy_ = true;
    from_ = &kept;
    data_ = kept.data_;
  }
  ~borrowed_memory() {
    if (from_ != nullptr) {
      from_->busy_ = false;
    } else {
      release(data_);
    }
  }
  borrowed_memory(const borrowed_memory&) = delete;
  borrowed_memory& operator=(const borrowed_memory&) = delete;

  char* get() const noexcept { return data_; }

 private:
  thread_memory* from_ = nullptr;
  char* data_ = nullptr;
};

}  // namespace manyhead
