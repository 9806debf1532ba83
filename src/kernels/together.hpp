// Rows of K and V whose elements lie apart, brought together a tile at a time, so that all that reads them finds neighbours.
#pragma once

#include <type_traits>

#include "dtype.hpp"

namespace manyhead::MH_ISA {
namespace {

// Rows of K or V as they are in memory, or as copied. E: the trait of their elements.
template <class E>
struct rows_at {
  const typename E::storage* base;
  int64_t stride;
  MH_INLINE rows_at from(int64_t row, int64_t dim = 0) const { return {base + row * stride + dim, stride}; }
};

MH_INLINE bool lies_apart(const int64_t* strides, int64_t dim) { return strides[3] != 1 && dim > 1; }

// How many elements of a tile have to be brought together at once: K's or V's.
MH_INLINE int64_t elements_apart(const kernel_call& c) {
  const int64_t of_k = lies_apart(c.k_strides, c.head_dim) ? c.head_dim : 0;
  return c.block_kv * max_of(of_k, lies_apart(c.v_strides, c.v_dim) ? c.v_dim : 0);
}

// One by one, in the order in which they lie closer together: where that is along the rows, those of a line of the cache
// before it is lost, as dims a multiple of 4 KB apart share few sets.
template <class S>
MH_INLINE void bring_each(const S* from, int64_t to_row, int64_t to_dim, int64_t rows, int64_t dim, int64_t row_size,
                          S* to) {
  const auto distance = [](int64_t stride) MH_INLINE_LAMBDA { return stride < 0 ? -stride : stride; };
  if (distance(to_row) >= distance(to_dim)) {
    for (int64_t r = 0; r < rows; ++r) {
#pragma GCC unroll 8
      for (int64_t d = 0; d < dim; ++d) to[r * row_size + d] = from[r * to_row + d * to_dim];
    }
    return;
  }
  constexpr int64_t block = 32;
  for (int64_t first = 0; first < rows; first += block) {
    const int64_t count = min_of(block, rows - first);
    for (int64_t d = 0; d < dim; ++d) {
#pragma GCC unroll 8
      for (int64_t r = first; r < first + count; ++r) to[r * row_size + d] = from[r * to_row + d * to_dim];
    }
  }
}

// lanes<real> rows, which are neighbours, of up to as many words of dims: lines of words of dims become rows of them.
template <class S>
MH_INLINE void turn_block(const S* from, int64_t to_dim, int64_t words, int64_t row_size, S* to) {
  using real = std::conditional_t<sizeof(S) == 8, double, float>;
  constexpr int64_t w = lanes<real>, of_word = sizeof(real) / sizeof(S);
  vec<real> line[w];
#pragma GCC unroll 16
  for (int64_t i = 0; i < w; ++i) {
    const S* const at = from + min_of(i, words - 1) * of_word * to_dim;  // behind the last: not stored
    // Dims are more streams than the hardware follows: steps from L3 1.12 times as fast.
    for (int64_t n = 0; n < of_word; ++n) __builtin_prefetch(at + n * to_dim + 128 / static_cast<int64_t>(sizeof(S)));
    if constexpr (of_word == 2) {
      line[i] = xsimd::bitwise_cast<float>(load_16(at) | (load_16(at + to_dim) << 16));
    } else {
      line[i] = load(reinterpret_cast<const real*>(at));
    }
  }
  transpose<real>(line);
#pragma GCC unroll 16
  for (int64_t i = 0; i < w; ++i) {
    if (words == w) {
      store(reinterpret_cast<real*>(to + i * row_size), line[i]);
    } else {
      memcpy(to + i * row_size, &line[i], static_cast<size_t>(words) * sizeof(real));
    }
  }
}

// [rows][dim] of elements `to_row` and `to_dim` apart, into contiguous memory.
template <class S>
__attribute__((noinline)) void bring_together(const S* from, int64_t to_row, int64_t to_dim, int64_t rows, int64_t dim,
                                              S* to) {
  using real = std::conditional_t<sizeof(S) == 8, double, float>;
  constexpr int64_t w = lanes<real>, of_word = sizeof(real) / sizeof(S);
  const int64_t turned = to_row == 1 ? round_down<w>(rows) : 0, whole = round_down<of_word>(dim);
  for (int64_t r = 0; r < turned; r += w) {
    for (int64_t d = 0; d < whole; d += w * of_word) {
      turn_block<S>(from + r + d * to_dim, to_dim, min_of(w, (whole - d) / of_word), dim, to + r * dim + d);
    }
    if (whole < dim) bring_each(from + r + whole * to_dim, to_row, to_dim, w, dim - whole, dim, to + r * dim + whole);
  }
  bring_each(from + turned * to_row, to_row, to_dim, rows - turned, dim, dim, to + turned * dim);
}

// Those rows, of K or V with its strides, or copies in `to` whose elements are neighbours.
template <class D>
MH_INLINE rows_at<D> neighbours(rows_at<D> there, int64_t keys, const int64_t* strides, int64_t dim,
                                typename D::storage* to) {
  if (!lies_apart(strides, dim)) return there;
  bring_together(there.base, there.stride, strides[3], keys, dim, to);
  return {to, dim};
}

}  // namespace
}  // namespace manyhead::MH_ISA
