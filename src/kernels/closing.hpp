// Biases that close keys. Many a program hands over its mask as a bias, of 0 and of -inf or the lowest number there is: a tile
// whose bias is of these alone is seen through visibility words, as one with a boolean mask, so that keys closed to all rows are
// neither read nor multiplied, and without the pass that adds. Other biases must not pay for it: a tile is looked at only where
// numbers in its corners, and in those of its task, close or are all 0.
//
// The lowest number closes a key only beside others. A row that has no other attends all that are not closed by -inf, with the
// same weights, as rounding of the sums has it. So rows that are left without a weight are looked at once more, and done again
// where that number, not -inf, has left them so.
#pragma once

#include "score.hpp"

namespace manyhead::MH_ISA {
namespace {

template <class T>
__attribute__((noinline)) bool corners_may_close(const kernel_call& c, const tile_at& t) {
  const int64_t last_key = max_of(0, biased_keys(c, t) - 1);
  const row_of rows[] = {row_of(c, t.row), row_of(c, t.row + t.count - 1)};
  bool all_zero = true;
  for (const row_of& r : rows) {
    for (const int64_t key : {int64_t(0), last_key}) {
      T x;
      widen_any<T>(c.bias_dtype, c.bias, bias_offset(c, t, r) + (t.begin + key) * c.bias_strides[3], 1, 1, &x);
      if (x <= least_bias<T>) return true;
      all_zero = all_zero && x == T(0);
    }
  }
  return all_zero;
}

// Whether the bias may close keys of t, as far as its corners tell, or its openings. Where there are few keys it is not worth a look.
template <class T>
MH_INLINE bool bias_may_close(const kernel_call& c, const tile_at& t) {
  if (c.bias == nullptr || c.kv_len <= word_keys || biased_keys(c, t) <= 0) return false;
  if (c.bias_open.words != nullptr) return opening_of_rows(c, c.bias_open, t.batch, t.row, t.count).closes;
  return corners_may_close<T>(c, t);
}

// Whether n numbers are the same, bit for bit. x: as many as whole vectors, at any address.
template <class T>
MH_INLINE bool all_alike(const T* x, int64_t n) {
  const vec<T> first(x[0]);
  vec<T> differ = first ^ first;
  for (int64_t k = 0; k < n; k += lanes<T>) differ = differ | (load(x + k) ^ first);
  return xsimd::all(xsimd::bitwise_cast<bits<T>>(differ) == xsimd::batch<bits<T>, MH_ARCH>(bits<T>(0)));
}

// Whether some number of a bias does something else than to close.
template <class T>
struct bias_adds {
  xsimd::batch_bool<T, MH_ARCH> in_vectors = vec<T>(T(0)) != vec<T>(T(0));
  bool in_rows = false;  // of one number throughout
  MH_INLINE bool any() const { return in_rows || xsimd::any(in_vectors); }
};

// Closes what a row of a bias closes, in words[0], words[step] and so on; no bits of no key. Most rows of a mask close all keys of a
// tile or none. row: as above.
template <class T, class Word>
MH_INLINE void close_by_row(const T* row, int64_t keys, T closed_to, Word* words, int64_t step, bias_adds<T>& adds) {
  const bool alike = all_alike(row, keys), closes = row[0] <= closed_to;
  if (alike && !closes) {
    adds.in_rows = adds.in_rows || row[0] != T(0);
    return;
  }
  for (int64_t first = 0; first < keys; first += word_keys, words += step) {
    const int64_t n = min_of(word_keys, keys - first);
    uint32_t hidden = alike ? ~0U : 0;
    for (int64_t k = 0; !alike && k < n; k += lanes<T>) {
      const vec<T> of = load(row + first + k);
      const auto closed = of <= vec<T>(closed_to);
      adds.in_vectors = adds.in_vectors | xsimd::bitwise_andnot(of != vec<T>(T(0)), closed);
      hidden |= static_cast<uint32_t>(closed.mask()) << k;
    }
    *words = static_cast<uint32_t>(~(hidden & bit_range(0, n)));
  }
}

// Biases of keys, up to most_tile_keys, in whole vectors: where they lie, or widened to `copy`.
template <class T>
MH_INLINE const T* whole_biases(const kernel_call& c, const void* from, int64_t keys, T* copy) {
  const int64_t stride = c.bias_strides[3];
  if (stride == 1 && bias_bytes(c) == sizeof(T) && keys % lanes<T> == 0) return static_cast<const T*>(from);
  widen_any<T>(c.bias_dtype, from, 0, stride, keys, copy);
  for (int64_t k = keys; k < round_up<lanes<T>>(keys); ++k) copy[k] = copy[keys - 1];
  return copy;
}

// What the bias leaves open of a tile, words[word * width + lane] as see_tile has them, but that bits of no key are set. Returns
// whether some number does something else than to close.
template <class T>
__attribute__((noinline)) bool open_of_bias(const kernel_call& c, const tile_at& t, int64_t width, T closed_to,
                                            bits<T>* words) {
  using U = xsimd::batch<bits<T>, MH_ARCH>;
  const int64_t keys = biased_keys(c, t), n = (t.keys() + word_keys - 1) / word_keys;
  for (int64_t i = 0; i < n * width; i += lanes<T>) U(~bits<T>(0)).store_unaligned(words + i);
  if (keys == 0) return false;
  bias_adds<T> adds;
  alignas(64) T copy[most_tile_keys];
  const int64_t size = bias_bytes(c);
  const char* const first =
      static_cast<const char*>(c.bias) +
      size * (t.batch * c.bias_strides[0] + t.kv_head * c.group * c.bias_strides[1] + t.begin * c.bias_strides[3]);
  const row_walk<const char> rows(c, t.row, first, size * c.bias_strides[1], size * c.bias_strides[2]);
  for_each_row<T>(c, t, width, rows, n, width, words, [&](const char* row, bits<T>* of_lane) MH_INLINE_LAMBDA {
    close_by_row(whole_biases(c, row, keys, copy), keys, closed_to, of_lane, width, adds);
  });
  return adds.any();
}

// What rows see of a tile.
struct tile_view {
  visibility see;
  bool adds_bias;  // to what they see
};

// As see_tile; looks: whether the bias may close keys of the tile.
template <class T>
__attribute__((noinline)) tile_view view_tile(const kernel_call& c, const positions& at, const tile_at& t,
                                              int64_t width, bool looks, bits<T>* words) {
  if (!looks) return {see_tile<T>(c, at, t, width, words), c.bias != nullptr};
  alignas(64) bits<T> open[most_tile_keys / word_keys * most_lanes];
  bool adds;
  if (c.bias_open.words != nullptr) {
    look_up_openings<T>(c, c.bias_open, t, width, (t.keys() + word_keys - 1) / word_keys, width, open);
    adds = opening_of_rows(c, c.bias_open, t.batch, t.row, t.count).adds;
  } else {
    adds = open_of_bias<T>(c, t, width, least_bias<T>, open);
  }
  return {see_tile<T>(c, at, t, width, words, open), adds};
}

// Which rows of t, of `rows`, see a key that no bias up to closed_to closes; a bit each. For afterwards: masks are read once more.
template <class T>
__attribute__((noinline)) uint64_t rows_that_see(const kernel_call& c, const positions& at, const tile_at& t,
                                                 uint64_t rows, T closed_to) {
  const int64_t width = round_up<lanes<T>>(t.count);
  alignas(64) bits<T> words[most_tile_keys / word_keys * most_lanes], open[most_tile_keys / word_keys * most_lanes];
  uint64_t see = 0;
  for (int64_t begin = t.begin; begin < t.end && see != rows; begin += most_tile_keys) {
    const int64_t keys = min_of(most_tile_keys, t.end - begin);
    const tile_at some{t.batch, t.kv_head, t.row, t.count, begin, begin + keys};
    if (c.bias != nullptr) open_of_bias<T>(c, some, width, closed_to, open);
    see_tile<T>(c, at, some, width, words, c.bias != nullptr ? open : nullptr);
    for (int64_t first = 0; first < keys; first += word_keys) {
      for (int64_t i = 0; i < t.count; ++i)
        see |= static_cast<uint64_t>(words[first / word_keys * width + i] != 0) << i & rows;
    }
  }
  return see;
}

// Of rows of t that were left without a weight, a bit each, and whose keys in all parts of a split are those of `reach`: those
// that the lowest number has left so.
template <class T>
__attribute__((noinline)) uint64_t rows_of_least(const kernel_call& c, const positions& at, const tile_at& t,
                                                 const key_range& reach, uint64_t rows) {
  const uint64_t some = rows_that_see<T>(c, at, t, rows, -infinity<T>);
  if (c.chunks == 1 || some == 0) return some;
  const tile_at all{t.batch, t.kv_head, t.row, t.count, reach.begin, reach.end};
  return some & ~rows_that_see<T>(c, at, all, some, least_bias<T>);
}

}  // namespace
}  // namespace manyhead::MH_ISA
