// Memory that is needed soon: its lines, asked for while something else is worked on.
#pragma once

#include "simd.hpp"

namespace manyhead::MH_ISA {
namespace {

// Emulated vectors have nothing to gain, and take minutes to compile.
#if XSIMD_WITH_EMULATED
inline constexpr bool asks_ahead = false;
#else
inline constexpr bool asks_ahead = true;
#endif

// Rows of memory that are needed soon. The hardware looks ahead only while there are loads that miss; arithmetic on
// what is in cache would let memory idle, so lines are asked for, evenly, all through it.
struct upcoming {
  const char* base;
  int64_t stride, bytes;  // of a row
  int64_t rows;
};

// Lines to be asked for, `step` bytes apart.
struct line_run {
  const char* at;
  int64_t step, count;
};

// The lines of rows that are needed soon, asked for one at a time: a burst of them would fill the buffers that the
// loads need which do not hit L1, and everything would wait.
struct line_walk {
  const char* at;
  const char* row_end;
  const char* end;
  int64_t gap;  // from the end of a row to the next one
  int64_t stride;
  const upcoming* more;  // those to come after these, up to `last`
  const upcoming* last;

  MH_INLINE explicit line_walk(const upcoming& x, const upcoming* next = nullptr, const upcoming* stop = nullptr)
      : at(x.base),
        row_end(x.base + x.bytes),
        end(x.stride > 0 ? x.base + x.rows * x.stride : x.base),
        gap(x.stride - x.bytes),
        stride(x.stride),
        more(next),
        last(stop) {}
  MH_INLINE bool done() const { return at >= end; }
  MH_INLINE void turn() {
    if (done() && more != last) *this = line_walk(*more, more + 1, last);
  }
  // Up to n lines that come next and lie side by side. Where no more come: n times what is in L1.
  MH_INLINE line_run run(int64_t n) {
    turn();
    if (done()) return {reinterpret_cast<const char*>(this), 0, n};
    const char* const from = at;
    n = min_of(n, (row_end - at + 63) / 64);
    go_on(n * 64);
    return {from, 64, n};
  }
  MH_INLINE void step() {
    if (done()) return;
    __builtin_prefetch(at, 0, 2);
    go_on(64);
  }

 private:
  MH_INLINE void go_on(int64_t bytes) {
    at += bytes;
    if (at >= row_end) {
      at = row_end + gap;
      row_end += stride;
    }
  }
};

// What is needed soon, in the order of need. Products ask for a line a step, and go on where the one before stopped.
class lines_ahead {
 public:
  lines_ahead() = default;
  lines_ahead(const lines_ahead&) = delete;
  lines_ahead& operator=(const lines_ahead&) = delete;

  MH_INLINE void add(const upcoming& x) {
    if (x.rows <= 0) return;
    if (walk.done() && walk.more == walk.last) walk.more = walk.last = rows_;
    if (walk.last == rows_ + most) return;  // so much is never asked for in time
    rows_[walk.last++ - rows_] = x.stride == x.bytes ? upcoming{x.base, x.rows * x.bytes, x.rows * x.bytes, 1} : x;
  }
  MH_INLINE void clear() { walk = line_walk(upcoming{}, rows_, rows_); }
  MH_INLINE bool empty() const { return walk.done() && walk.more == walk.last; }
  // For up to n lines of the rows that come next.
  MH_INLINE void ask(int64_t n) {
    walk.turn();
    for (; n > 0 && !walk.done(); --n) walk.step();
  }

  line_walk walk{upcoming{}, rows_, rows_};

 private:
  static constexpr int most = 8;
  upcoming rows_[most];
};

// The layer's weights, where products ask for what they are at, so many bytes before they get there: 2, 4 and 16 KB are slower.
inline constexpr int64_t weights_ahead = 8192;

}  // namespace
}  // namespace manyhead::MH_ISA
