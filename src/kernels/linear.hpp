// y = x W^T + b, the projections of the multi-head layer, for one panel of W: up to linear_width outputs, packed
// [in][vectors * lanes] once, when the layer is made, so that attention's micro-kernel (product.hpp) reads it in order:
// A = x, by rows, where it lies; B = the panel; C = y, where it is wanted.
//
// The sum of an output runs along `in` in order, in pieces of linear_depth that are summed apart and added to b one
// after another: its bits depend on its row of x, its row of W and b alone, whatever is computed beside it.
#pragma once

#include "dtype.hpp"
#include "kernel_api.hpp"
#include "product.hpp"

namespace manyhead::MH_ISA {
namespace {

template <class T>
inline constexpr int64_t linear_width = max_panel_vectors * lanes<T>;

// A piece of a panel stays in L1 for all rows of a task: 36 of 48 KB with AVX-512 (192 deep; 128 were 2 % slower,
// 256, which fill L1, a tenth), 24 of 32 KB with the narrower ones.
template <class T>
inline constexpr int64_t linear_depth =
    (max_panel_vectors == 3 ? 36 << 10 : 24 << 10) / (linear_width<T> * static_cast<int64_t>(sizeof(T)));

// Where W is not of the arithmetic type, nor y, sums are kept until they are whole, of so many rows at a time (36 KB with
// AVX-512, and W as much). A piece of W is widened once for all of them if they are not few, and else where it is multiplied,
// by each tile: many rows on AVX-512 1.1 times as fast.
template <class D>
inline constexpr bool linear_widens = sizeof(typename D::storage) != sizeof(typename D::real);
inline constexpr int64_t linear_block = 192, linear_few = 24;

// Rows of a panel, widened.
template <class D, int NV>
struct stored_panel {
  const typename D::storage* base;
  static constexpr int64_t vectors = NV, width = NV * lanes<typename D::real>;
  MH_INLINE auto get(int64_t k, int64_t v) const { return D::widen(base + k * width + v * lanes<typename D::real>); }
};

// W while the lines `weights_ahead` on are asked for: from each row on, whole lines apart, so that none is left out.
template <class Panel>
struct asking_panel {
  Panel w;
  MH_INLINE auto get(int64_t k, int64_t v) const {
    constexpr int64_t size = sizeof(*w.base), vector = Panel::width / Panel::vectors;
    const char* const row = reinterpret_cast<const char*>(w.base + k * Panel::width);
    if (v * vector * size % 64 == 0) __builtin_prefetch(row + v * vector * size + weights_ahead);
    return w.get(k, v);
  }
};

// y = added + x W^T for a tile of up to M rows, but of 4 and more, with W asked for. Returns how many.
template <int M, class T, int NV, class B>
MH_INLINE int64_t linear_first_tile(by_rows<T> x, B w, int64_t rows, int64_t depth, to_rows<T> y) {
  T* const no_maximum = nullptr;
  if (rows >= M) {
    line_walk none(upcoming{});
    product_tile<product_mode::add, M, NV, false>(x, asking_panel<B>{w}, depth, y, no_maximum, none, no_stairs{});
    return M;
  }
  if constexpr (M > 4) return linear_first_tile<smaller_tile<M>, T, NV>(x, w, rows, depth, y);
  return 0;
}

// y = added + x W^T for one piece, in whole vectors. `after`: the piece that comes next, as it is stored.
template <class T, int NV, class B>
__attribute__((noinline)) void linear_piece(by_rows<T> x, B w, int64_t rows, int64_t depth, to_rows<T> y,
                                            const upcoming& after) {
  constexpr int tile = tile_rows<NV>;
  T* const no_maximum = nullptr;
  line_walk next(after);
  // Beside three tiles the next piece comes a line a step. Beside one or two it would be too late: the first tile asks for
  // its own. One to three rows read W as fast as the hardware looks ahead.
  if (asks_ahead && rows >= 3 * tile)
    return product_tiles<product_mode::add, tile, NV, asks_ahead>(x, w, rows, depth, y, no_maximum, next);
  int64_t done = 0;
  if constexpr (asks_ahead) done = linear_first_tile<tile, T, NV>(x, w, rows, depth, y);
  product_tiles<product_mode::add, tile, NV, false>(x.from(done), w, rows - done, depth, y.from(done), no_maximum,
                                                    next);
}

// Rows of x from `row` on.
template <class D, int NV, class T = typename D::real>
MH_INLINE void linear_sum(const linear_args& c, int64_t row, int64_t rows, const T* bias, T* y, int64_t y_stride) {
  constexpr int64_t most = linear_depth<T>, width = NV * lanes<T>;
  for (int64_t k = 0; k < c.in; k += most) {
    const by_rows<T> x{static_cast<const T*>(c.x) + row * c.x_stride + k, c.x_stride};
    const auto* const w = static_cast<const typename D::storage*>(c.weights) + k * width;
    const int64_t depth = min_of(most, c.in - k);
    const to_rows<T> to = k == 0 ? to_rows<T>{y, y_stride, bias, 0} : to_rows<T>{y, y_stride, y, y_stride};
    constexpr int64_t bytes = width * static_cast<int64_t>(sizeof(*w));
    const upcoming after{reinterpret_cast<const char*>(w) + depth * bytes, bytes, bytes, most};
    if constexpr (!linear_widens<D>) {
      linear_piece<T, NV>(x, whole_panel<const T, NV>{w}, rows, depth, to, after);
    } else if (rows < linear_few) {
      linear_piece<T, NV>(x, stored_panel<D, NV>{w}, rows, depth, to, after);
    } else {
      alignas(64) T wide[most * width];
      widen_row<D>(w, 1, depth * width, wide);
      linear_piece<T, NV>(x, whole_panel<const T, NV>{wide}, rows, depth, to, after);
    }
  }
}

template <class D, int NV>
void linear_panel(const linear_args& c) {
  using T = typename D::real;
  using storage = typename D::storage;
  constexpr int64_t width = NV * lanes<T>;
  const storage* const bias = static_cast<const storage*>(c.bias);
  storage* const y = static_cast<storage*>(c.y);
  if constexpr (!linear_widens<D>) {
    if (c.columns == width) return linear_sum<D, NV>(c, 0, c.rows, bias, y, c.y_stride);
  }
  // Outputs that do not fill the last vector, or are of another type, go through memory of our own.
  constexpr int64_t at_once = linear_widens<D> ? linear_block : 2 * tile_rows<NV>;
  alignas(64) T part[at_once * width], wide_bias[width];
  widen_row<D>(bias, 1, width, wide_bias);
  for (int64_t row = 0; row < c.rows; row += at_once) {
    const int64_t rows = min_of(at_once, c.rows - row);
    linear_sum<D, NV>(c, row, rows, wide_bias, part, width);
    for (int64_t i = 0; i < rows; ++i) narrow_row<D>(part + i * width, c.columns, y + (row + i) * c.y_stride, 1);
  }
}

// Rows of x, for linear_task to read.
template <class D>
void linear_widen(const void* x, int64_t x_stride, int64_t rows, int64_t in, void* to, int64_t to_stride) {
  for (int64_t row = 0; row < rows; ++row) {
    widen_row<D>(static_cast<const typename D::storage*>(x) + row * x_stride, 1, in,
                 static_cast<typename D::real*>(to) + row * to_stride);
  }
}

template <class D>
void linear_task(const linear_args* c) {
  constexpr int64_t w = lanes<typename D::real>;
  with_vectors((c->columns + w - 1) / w, [&]<int NV>() { linear_panel<D, NV>(*c); });
}

}  // namespace
}  // namespace manyhead::MH_ISA
