// y = x W^T + b, the projections of the multi-head layer, for one panel of W: up to linear_width outputs, packed
// [in][vectors * lanes] once, when the layer is made, so that attention's micro-kernel (product.hpp) reads it in order:
// A = x, by rows, where it lies; B = the panel; C = y, where it is wanted.
//
// The sum of an output runs along `in` in order, in pieces of linear_depth that are summed apart and added to b one
// after another: its bits depend on its row of x, its row of W and b alone, whatever is computed beside it.
#pragma once

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

// y = added + x W^T for one piece, in whole vectors.
template <class T, int NV>
__attribute__((noinline)) void linear_piece(by_rows<T> x, const T* w, int64_t rows, int64_t depth, to_rows<T> y) {
  constexpr int tile = tile_rows<NV>;
  // The next piece is asked for line by line. Few rows are done before it could come, and read W as fast as the hardware
  // looks ahead; asking in bursts costs them a third.
  constexpr int64_t bytes = NV * lanes<T> * static_cast<int64_t>(sizeof(T));
  line_walk next({reinterpret_cast<const char*>(w) + depth * bytes, bytes, bytes, linear_depth<T>});
  T* const no_maximum = nullptr;
  const whole_panel<const T, NV> packed{w};
  if (asks_ahead && rows >= 16 * tile)
    return product_tiles<product_mode::add, tile, NV, asks_ahead>(x, packed, rows, depth, y, no_maximum, next);
  product_tiles<product_mode::add, tile, NV, false>(x, packed, rows, depth, y, no_maximum, next);
}

template <class T, int NV>
void linear_panel(const linear_args& c) {
  constexpr int64_t width = NV * lanes<T>;
  const T* x = static_cast<const T*>(c.x);
  const T* w = static_cast<const T*>(c.weights);
  const T* bias = static_cast<const T*>(c.bias);
  const auto sum = [&](int64_t row, int64_t rows, T* y, int64_t y_stride) {
    for (int64_t k = 0; k < c.in; k += linear_depth<T>) {
      const by_rows<T> piece{x + row * c.x_stride + k, c.x_stride};
      const to_rows<T> to = k == 0 ? to_rows<T>{y, y_stride, bias, 0} : to_rows<T>{y, y_stride, y, y_stride};
      linear_piece<T, NV>(piece, w + k * width, rows, min_of(linear_depth<T>, c.in - k), to);
    }
  };
  if (c.columns == width) return sum(0, c.rows, static_cast<T*>(c.y), c.y_stride);
  // Outputs that do not fill the last vector go through memory of our own.
  constexpr int64_t at_once = 2 * tile_rows<NV>;
  alignas(64) T part[at_once * width];
  for (int64_t row = 0; row < c.rows; row += at_once) {
    const int64_t rows = min_of(at_once, c.rows - row);
    sum(row, rows, part, width);
    for (int64_t i = 0; i < rows; ++i) {
      memcpy(static_cast<T*>(c.y) + (row + i) * c.y_stride, part + i * width,
             static_cast<size_t>(c.columns) * sizeof(T));
    }
  }
}

template <class T>
void linear_task(const linear_args* c) {
  const int64_t vectors = (c->columns + lanes<T> - 1) / lanes<T>;
  if (vectors == 1) return linear_panel<T, 1>(*c);
  if (vectors == 2) return linear_panel<T, 2>(*c);
  if constexpr (max_panel_vectors == 3) linear_panel<T, 3>(*c);
}

}  // namespace
}  // namespace manyhead::MH_ISA
