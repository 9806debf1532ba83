// Scores that the first pass keeps for the weights (weights.hpp), as the softmax takes them: kept[row][key], -inf for keys that
// the row does not see. Routes keep them tile by tile, all keys between the first and the last that any of the tile's rows may
// attend. The second pass then has neither products nor masks to do again, and any route's scores are those that its sums are of.
#pragma once

#include "score.hpp"

namespace manyhead::MH_ISA {
namespace {

MH_INLINE bool keeps_scores(const kernel_call& c) { return c.kept_pitch > 0; }

// Whether a row's scores of the first time stay: where they are less a number of the row now (far.hpp), in each part of a split
// another. shift: these numbers, or NULL.
template <class T>
MH_INLINE bool keeps_earlier(const kernel_call& c, const T* shift, int64_t row) {
  return c.chunks > 1 && shift != nullptr && shift[row] != 0;
}

// Of row `row` of the kv head, from key 0 on.
template <class T>
MH_INLINE T* kept_row(const kernel_call& c, const kernel_task& task, int64_t kv_head, int64_t row) {
  return static_cast<T*>(task.kept) + (kv_head - task.kv_head_begin) * task.kept_head +
         (row - task.kept_first) * c.kept_pitch;
}

// Keys [begin, end) of a row are not seen.
template <class T>
MH_INLINE void close_kept(T* row, int64_t begin, int64_t end) {
  const vec<T> closed(-infinity<T>);
  int64_t k = begin;
  for (; k + lanes<T> <= end; k += lanes<T>) store<T>(row + k, closed);
  for (; k < end; ++k) row[k] = -infinity<T>;
}

// No row of t sees any of its keys.
template <class T>
MH_INLINE void keep_none(const kernel_call& c, const kernel_task& task, const tile_at& t) {
  for (int64_t l = 0; l < t.count; ++l) close_kept<T>(kept_row<T>(c, task, t.kv_head, t.row + l), t.begin, t.end);
}

// Scores s[key][width] of a panel's rows.
template <class T>
__attribute__((noinline)) void keep_panel(const kernel_call& c, const kernel_task& task, const tile_at& t, const T* s,
                                          int64_t width, const T* shift = nullptr) {
  constexpr int64_t w = lanes<T>;
  const int64_t pitch = c.kept_pitch;
  for (int64_t l0 = 0; l0 < t.count; l0 += w) {
    const int64_t rows = min_of(w, t.count - l0);
    T* to = kept_row<T>(c, task, t.kv_head, t.row + l0) + t.begin;
    for (int64_t k = 0; k < t.keys(); k += w, to += w) {
      const int64_t keys = min_of(w, t.keys() - k);
      vec<T> x[w];
      if (keys == w) {
#pragma GCC unroll 16
        for (int64_t i = 0; i < w; ++i) x[i] = vec<T>::load_aligned(s + (k + i) * width + l0);
      } else {
        for (int64_t i = 0; i < w; ++i) x[i] = vec<T>::load_aligned(s + (k + min_of(i, keys - 1)) * width + l0);
      }
      transpose<T>(x);
      if (keys == w) {
#pragma GCC unroll 16
        for (int64_t l = 0; l < w; ++l) {
          if (l < rows && !keeps_earlier(c, shift, l0 + l)) store<T>(to + l * pitch, x[l]);
        }
      } else {
        alignas(64) T some[w];
        for (int64_t l = 0; l < rows; ++l) {
          x[l].store_aligned(some);
          if (!keeps_earlier(c, shift, l0 + l)) store_some(to + l * pitch, keys, some);
        }
      }
    }
  }
}

// Scores s[row][width], in steps of whole vectors.
template <class T>
__attribute__((noinline)) void keep_rows(const kernel_call& c, const kernel_task& task, const tile_at& t, const T* s,
                                         int64_t width) {
  constexpr int64_t w = lanes<T>;
  const int64_t keys = t.keys();
  for (int64_t l = 0; l < t.count; ++l, s += width) {
    T* const to = kept_row<T>(c, task, t.kv_head, t.row + l) + t.begin;
    int64_t k = 0;
    for (; k + w <= keys; k += w) store<T>(to + k, vec<T>::load_aligned(s + k));
    if (k == keys) continue;
    alignas(64) T some[w];
    vec<T>::load_aligned(s + k).store_aligned(some);
    store_some(to + k, keys - k, some);
  }
}

}  // namespace
}  // namespace manyhead::MH_ISA
