// Memory aligned to 64 bytes, in huge pages where the system has them, as NumPy's large arrays are.
#pragma once

#include <cstddef>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif

class buffer {
 public:
  explicit buffer(std::size_t bytes) : size_(bytes) {
    data_ = static_cast<std::byte*>(::operator new(bytes, alignment()));
#if defined(__linux__)
    if (is_large()) madvise(data_, bytes, MADV_HUGEPAGE);
#endif
  }
  ~buffer() { ::operator delete(data_, alignment()); }
  buffer(const buffer&) = delete;
  buffer& operator=(const buffer&) = delete;
  std::byte* data() const { return data_; }
  std::size_t size() const { return size_; }

 private:
  static constexpr std::size_t huge_page = std::size_t{1} << 21;
  bool is_large() const { return size_ >= 2 * huge_page; }
  std::align_val_t alignment() const { return std::align_val_t{is_large() ? huge_page : 64}; }

  std::size_t size_;
  std::byte* data_;
};
