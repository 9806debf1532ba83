// The micro-kernel of all products. With lanes over query rows, attention's two are the same shape of product:
//
//   S^T[key][row] = sum over dims of K[key][dim] * Q^T[dim][row]        A = K, read by rows
//   O^T[dim][row] = sum over keys of V[key][dim] * P^T[key][row]        A = V, read by columns
//
// and so are the layer's, with lanes over outputs (linear.hpp):
//
//   y[row][out] = sum over in of x[row][in] * W^T[in][out]               A = x, read by rows
//
// and with lanes over dims, where all keys are at hand (row_values.hpp):
//
//   O[row][dim] = sum over keys of P^T[key][row] * V[key][dim]           A = P^T, read by columns; B = V in place
//
// C[m][.] = sum_k A(m, k) * B[k][.]: A is read in place, one broadcast load an element, so neither K nor V is packed
// and no length needs a masked load; B and C are panels, NV vectors wide.
//
// Register budget, M x NV accumulators + NV of B + 1 broadcast:
//   AVX-512, NEON (32 registers): 8x3 = 24 + 3 + 1 = 28; narrower panels 12x2 = 27, 16x1 = 18
//   AVX2, SSE2 (16 registers):    6x2 = 12 + 2 + 1 = 15; narrower panel 8x1 = 10
//                                 (4x3 = 16 fits too, but clang spills it)
// Loads per step M + NV against M * NV FMAs: 11:24 and 8:12, so that the FMA units are the bound at two loads a cycle.
// Every output is summed over k in order, whatever M and NV: tails and panel widths do not change bits.
#pragma once

#include "lines_ahead.hpp"
#include "simd.hpp"

namespace manyhead::MH_ISA {
namespace {

#if XSIMD_WITH_EMULATED
inline constexpr int max_panel_vectors = 3;
template <int NV>
inline constexpr int tile_rows = 4;  // larger ones take minutes to compile
#elif defined(__AVX512F__) || defined(__aarch64__)
inline constexpr int max_panel_vectors = 3;
template <int NV>
inline constexpr int tile_rows = NV == 3   ? 8
                                 : NV == 2 ? 12
                                           : 16;
#else
inline constexpr int max_panel_vectors = 2;
template <int NV>
inline constexpr int tile_rows = NV == 2 ? 6 : 8;
#endif

// fn<NV>() for so many vectors, 1 to max_panel_vectors.
template <class Fn>
MH_INLINE void with_vectors(int64_t vectors, Fn fn) {
  if (vectors == 1) return fn.template operator()<1>();
  if (vectors == 2) return fn.template operator()<2>();
  fn.template operator()<max_panel_vectors>();
}

// A tile of 16 rows of A that lie in one set of L1 would find each line pushed out by the others; so it has 8 (Zen 4: 16 query
// rows, 16 to 512 keys, 1.44 to 2.0 times as fast; copies of K first 1.2 to 1.46).
inline constexpr int set_rows = 8;

// A(m, k) = base[m * stride + k]
template <class T>
struct by_rows {
  const T* base;
  int64_t stride;
  MH_INLINE T at(int64_t m, int64_t k) const { return base[m * stride + k]; }
  MH_INLINE by_rows from(int64_t m) const { return {base + m * stride, stride}; }
};

// A(m, k) = base[k * stride + m]
template <class T>
struct by_columns {
  const T* base;
  int64_t stride;
  MH_INLINE T at(int64_t m, int64_t k) const { return base[k * stride + m]; }
  MH_INLINE by_columns from(int64_t m) const { return {base + m, stride}; }
  MH_INLINE by_columns after(int64_t k) const { return {base + k * stride, stride}; }
};

template <class T>
MH_INLINE vec<T> aligned_vector(const T* row, int64_t v) {
  return vec<T>::load_aligned(row + v * lanes<T>);
}

// A panel of NV vectors: rows of whole vectors.
template <class T, int NV>
struct whole_panel {
  T* base;
  static constexpr int64_t vectors = NV, width = NV * lanes<std::remove_const_t<T>>;
  MH_INLINE auto get(int64_t k, int64_t v) const { return aligned_vector(base + k * width, v); }
};

// Some vectors of a panel that is `width` wide. The loop over its rows then counts for itself: 2 % slower.
template <class T>
struct in_panel {
  T* base;
  int64_t width;
  MH_INLINE auto get(int64_t k, int64_t v) const { return aligned_vector(base + k * width, v); }
};

// Rows of B `stride` apart, at any address.
template <class T>
struct in_rows {
  const T* base;
  int64_t stride;
  MH_INLINE vec<T> get(int64_t k, int64_t v) const { return load(base + k * stride + v * lanes<T>); }
};

// Where C lies: in a panel, or in rows `stride` apart, at any address.
template <class T, class Panel>
struct to_panel {
  Panel panel;
  int64_t row;
  MH_INLINE T* at(int64_t m, int64_t v) const { return panel.base + (row + m) * panel.width + v * lanes<T>; }
  MH_INLINE vec<T> get(int64_t m, int64_t v) const { return vec<T>::load_aligned(at(m, v)); }
  MH_INLINE void set(int64_t m, int64_t v, vec<T> x) const { x.store_aligned(at(m, v)); }
  MH_INLINE to_panel from(int64_t m) const { return {panel, row + m}; }
};
template <class T>
struct to_rows {
  T* base;
  int64_t stride;
  const T* added;  // what get() reads: C itself, or what the first sum is added to
  int64_t added_stride;
  MH_INLINE vec<T> get(int64_t m, int64_t v) const { return load(added + m * added_stride + v * lanes<T>); }
  MH_INLINE void set(int64_t m, int64_t v, vec<T> x) const { store(base + m * stride + v * lanes<T>, x); }
  MH_INLINE to_rows from(int64_t m) const {
    return {base + m * stride, stride, added + m * added_stride, added_stride};
  }
};

enum class product_mode {
  set,         // C = A B
  set_max,     // C = A B, and column_max = max(column_max, rows of C)
  add,         // C += A B, summed apart first: a long sum grows by one addition a tile, not one a key
  add_signed,  // as add, but a B of negative sign (-0 marks a slot that may not be attended) is not multiplied:
               // no 0 * NaN
};

// Where the vectors of a panel do not all reach all of the depth (keys beyond the diagonal of a causal problem, or outside
// a window): vector v has B in steps [begin[v], end[v]) only. Both grow with v, and all begin before the first ends.
template <int NV>
struct stairs {
  int64_t begin[NV], end[NV];
};
struct no_stairs {};

// Ahead: `next` has lines to ask for, one a step.
template <product_mode Mode, int M, int NV, bool Ahead, class T, class A, class B, class C, class Stairs>
MH_INLINE void product_tile(A a, B b, int64_t depth, C c, T* column_max, line_walk& next, const Stairs& reached) {
  constexpr int64_t w = lanes<T>;
  vec<T> acc[M][NV];
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) acc[m][v] = vec<T>(T(0));
  }
  // Steps [first, last) for vectors [V0, V1).
  const auto sum = [&]<int V0, int V1>(int64_t first, int64_t last) MH_INLINE_LAMBDA {
  // Two steps a turn: the counting of a turn takes slots that the multiply-adds could have. But clang moves the first
  // step's multiply-adds behind the branches of the second's next.step(), where its loads have no registers left.
#if defined(__clang__)
#pragma clang loop unroll(disable)
#elif !XSIMD_WITH_EMULATED
#pragma GCC unroll 2
#endif
    for (int64_t k = first; k < last; ++k) {
      if constexpr (Ahead) next.step();
      vec<T> bk[NV];
#pragma GCC unroll 4
      for (int v = V0; v < V1; ++v) bk[v] = b.get(k, v);
#pragma GCC unroll 16
      for (int m = 0; m < M; ++m) {
        const vec<T> am(a.at(m, k));
#pragma GCC unroll 4
        for (int v = V0; v < V1; ++v) {
          if constexpr (Mode == product_mode::add_signed) {
            const auto masked = xsimd::bitwise_cast<bits<T>>(bk[v]) >=
                                xsimd::batch<bits<T>, MH_ARCH>(bits<T>(1) << (8 * sizeof(T) - 1));
            acc[m][v] = xsimd::select(xsimd::batch_bool_cast<T>(masked), acc[m][v], xsimd::fma(am, bk[v], acc[m][v]));
          } else {
            acc[m][v] = xsimd::fma(am, bk[v], acc[m][v]);
          }
        }
        if constexpr (NV == 1) still_needed<T>(am);
      }
    }
  };
  if constexpr (std::is_same_v<Stairs, no_stairs>) {
    sum.template operator()<0, NV>(0, depth);
  } else {
    // Up: 1, 2, ... vectors; then without the first, the first two, ...
    if constexpr (NV > 1) sum.template operator()<0, 1>(reached.begin[0], reached.begin[1]);
    if constexpr (NV > 2) sum.template operator()<0, 2>(reached.begin[1], reached.begin[2]);
    sum.template operator()<0, NV>(reached.begin[NV - 1], reached.end[0]);
    if constexpr (NV > 1) sum.template operator()<1, NV>(reached.end[0], reached.end[1]);
    if constexpr (NV > 2) sum.template operator()<2, NV>(reached.end[1], reached.end[2]);
  }
#pragma GCC unroll 4
  for (int v = 0; v < NV; ++v) {
    vec<T> top;
    if constexpr (Mode == product_mode::set_max) top = vec<T>::load_aligned(column_max + v * w);
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
      if constexpr (Mode == product_mode::add || Mode == product_mode::add_signed) acc[m][v] = acc[m][v] + c.get(m, v);
      if constexpr (Mode == product_mode::set_max) top = larger<T>(top, acc[m][v]);
      c.set(m, v, acc[m][v]);
    }
    if constexpr (Mode == product_mode::set_max) top.store_aligned(column_max + v * w);
  }
}

// Rows of C that are any number of keys, 1 <= rows < 2 M, in one tile or two of even size.
template <product_mode Mode, int M, int NV, class T, class A, class B, class C>
MH_INLINE void one_tile(A a, B b, int64_t rows, int64_t depth, C c, T* column_max) {
  if (rows == M) {
    line_walk none(upcoming{});
    product_tile<Mode, M, NV, false>(a, b, depth, c, column_max, none, no_stairs{});
  } else if constexpr (M > 1) {
    one_tile<Mode, M - 1, NV>(a, b, rows, depth, c, column_max);
  }
}
template <product_mode Mode, int M, int NV, class T, class A, class B, class C>
__attribute__((noinline)) void product_rest(A a, B b, int64_t rows, int64_t depth, C c, T* column_max) {
  int64_t m = 0;
  for (int64_t left = rows > M ? 2 : 1; left > 0; --left) {
    const int64_t part = (rows - m) / left;
    one_tile<Mode, M, NV>(a.from(m), b, part, depth, c.from(m), column_max);
    m += part;
  }
}

template <int M>
inline constexpr int smaller_tile = M == 12 || M == 6 ? M / 3 * 2 : M / 2;

// All `rows` rows of C, in tiles of M rows. What is left of keys, which may be any number, makes tiles of any size: few
// rows have too few sums at once to hide the latency of the multiply-adds, 1 takes as long as 8. What is left of dims,
// mostly a multiple of 8, goes into tiles of M / 2, ... 1.
template <product_mode Mode, int M, int NV, bool Ahead, class T, class A, class B, class C, class Stairs = no_stairs>
MH_INLINE void product_tiles(A a, B b, int64_t rows, int64_t depth, C c, T* column_max, line_walk& next,
                             const Stairs& reached = {}) {
  constexpr bool of_keys = std::is_same_v<A, by_rows<T>> && std::is_same_v<B, whole_panel<const T, NV>> &&
                           (Mode == product_mode::set || Mode == product_mode::set_max);
  const int64_t whole = of_keys && rows % M != 0 ? rows - M : rows;
  int64_t m = 0;
  for (; m + M <= whole; m += M) {
    if constexpr (Ahead) next.turn();
    product_tile<Mode, M, NV, Ahead>(a.from(m), b, depth, c.from(m), column_max, next, reached);
  }
  if constexpr (of_keys) {
    if (m < rows) product_rest<Mode, M, NV>(a.from(m), b, rows - m, depth, c.from(m), column_max);
  } else if constexpr (M > 1) {
    if (m < rows)
      product_tiles<Mode, smaller_tile<M>, NV, Ahead>(a.from(m), b, rows - m, depth, c.from(m), column_max, next,
                                                      reached);
  }
}

// B and C: NV vectors of a panel. column_max: of those, for set_max.
template <product_mode Mode, int NV, class T, class A, class B, class C, class Stairs = no_stairs>
__attribute__((noinline)) void product(A a, B b, int64_t rows, int64_t depth, C c, T* column_max,
                                       lines_ahead* ahead = nullptr, const Stairs& reached = {}) {
  const to_panel<T, C> to{c, 0};
  line_walk next = ahead != nullptr ? ahead->walk : line_walk(upcoming{});
  const auto in_tiles_of = [&]<int M>() MH_INLINE_LAMBDA {
    if (asks_ahead && ahead != nullptr && !ahead->empty()) {
      product_tiles<Mode, M, NV, asks_ahead>(a, b, rows, depth, to, column_max, next, reached);
      ahead->walk = next;
      return;
    }
    product_tiles<Mode, M, NV, false>(a, b, rows, depth, to, column_max, next, reached);
  };
  if constexpr (std::is_same_v<A, by_rows<T>> && tile_rows<NV> > set_rows) {
    if (a.stride * static_cast<int64_t>(sizeof(T)) % set_stride == 0)
      return in_tiles_of.template operator()<set_rows>();
  }
  in_tiles_of.template operator()<tile_rows<NV>>();
}

}  // namespace
}  // namespace manyhead::MH_ISA
