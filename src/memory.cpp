// See memory.hpp.
#include "memory.hpp"

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace manyhead {

void* allocate(size_t bytes) {
  constexpr size_t line = 64, page = size_t{2} << 20;
  const size_t border = bytes >= page ? page : line;
  if (bytes > SIZE_MAX - border) throw std::bad_alloc();
  void* memory = std::aligned_alloc(border, (std::max<size_t>(bytes, 1) + border - 1) / border * border);
  if (memory == nullptr) throw std::bad_alloc();
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  // Whole pages only: what the last one has too much is never touched, so it takes no memory. A refusal is no error.
  if (border == page) (void)madvise(memory, bytes / page * page, MADV_HUGEPAGE);
#endif
  return memory;
}

void release(void* memory) noexcept { std::free(memory); }

}  // namespace manyhead
