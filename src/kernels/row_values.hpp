// The values of a panel all of whose keys lie in one tile, as prompts of up to a hundred tokens have them: lanes over dims,
//
//   O[row][dim] = sum over keys of P^T[key][row] * V[key][dim]           A = P^T, by columns; B = V, where it lies
//
// and from the registers to where the rows go. With lanes over rows, as where the sums of further tiles are to be added
// (panel.hpp: finish_panel), each result is stored and loaded once more, and transposed; and rows that do not fill a vector
// cost as much as those that do. The multiply-adds and their order are the same, so are the bits.
//
// Register budget: 8 x 3 sums, 3 of V, 1 of P: 28 of 32. With 16 registers 4 x 2 sums would be the most that divides a vector's
// 8 rows, a third fewer than the other way has: not there. On Zen 4, one thread, heads of 64 to 256, the whole call: 16 keys 1.05
// to 1.09 times as fast, 32 1.07 to 1.08, 64 1.05, 96 1.02 to 1.04; 14 of 16 rows 1.09, 30 of 32 1.07.
#pragma once

#include "panel.hpp"

namespace manyhead::MH_ISA {
namespace {

// For vectors of 64 bytes; narrower ones with 32 registers are unmeasured.
inline constexpr bool has_row_values = lanes<float> == 16;
inline constexpr int rows_at_once = 8;

// Whether it pays: dims are whole vectors (a last one that is filled in part costs as much: heads of 40 0.97, of 72 0.995), and
// nothing is asked for (lines of results have not come yet when they are written: 0.90 to 0.99 from memory).
template <class T>
MH_INLINE bool pays_by_rows(const kernel_call& c) {
  return !c.prefetch && c.v_dim % lanes<T> == 0;
}

// Where C lies: rows of results, each multiplied with its factor; looks at what is written.
template <class T>
struct to_results {
  T* const* place;
  const T* factor;
  int64_t d;
  finite_check<T>& check;
  MH_INLINE void set(int64_t m, int64_t v, vec<T> x) const {
    const vec<T> result = result_of<T>(x, vec<T>(factor[m]));
    check.see(result);
    store<T>(place[m] + d + v * lanes<T>, result);
  }
};

// O of a panel, whose weights for all its keys are given, as far as it sees them. v: from the first of these keys on. to, factor:
// of each row. False: something is not finite.
template <class T>
__attribute__((noinline)) bool row_values(const panel<T>& x, const panel_view<T>& view, const T* weights,
                                          by_columns<T> v, int64_t v_dim, T* const* to, const T* factor) {
  constexpr int64_t w = lanes<T>;
  const int64_t width = x.width();
  vec<T> zeros(T(0));
  const auto dims = [&]<int NV>(int64_t d) MH_INLINE_LAMBDA {
    for (int64_t l0 = 0; l0 < x.count; l0 += w) {
      const key_range& seen = view.seen[l0 / w];
      const int64_t last = min_of(l0 + w, x.count);
      for (int64_t l = l0, rows = 0; l < last; l += rows) {
        rows = (last - l) / ((last - l + rows_at_once - 1) / rows_at_once);
        finite_check<T> check;  // of these alone: the loop has no four registers for its sums
        one_tile<product_mode::set, rows_at_once, NV, T>(
            by_columns<T>{weights + seen.begin * width + l, width}, in_rows<T>{v.after(seen.begin).base + d, v.stride},
            rows, max_of(0, seen.end - seen.begin), to_results<T>{to + l, factor + l, d, check}, nullptr);
        zeros = zeros + check.sum();
      }
    }
  };
  int64_t d = 0;
  for (int64_t vectors = v_dim / w; vectors > 0;) {
    const int taken = vectors == 4 ? 2 : static_cast<int>(min_of(3, vectors));
    if (taken == 3) dims.template operator()<3>(d);
    if (taken == 2) dims.template operator()<2>(d);
    if (taken == 1) dims.template operator()<1>(d);
    vectors -= taken;
    d += taken * w;
  }
  return finite_check<T>::passed(zeros);
}

// The same, divided by the sums of weights and written to where the rows go.
template <class D>
__attribute__((noinline)) bool write_row_values(const kernel_call& c, const kernel_task& task, int64_t kv_head,
                                                const panel<typename D::real>& x,
                                                const panel_view<typename D::real>& view,
                                                const typename D::real* weights, by_columns<typename D::real> v) {
  using T = typename D::real;
  constexpr int64_t w = lanes<T>;
  const bool in_place = c.chunks > 1 || (std::is_same_v<T, typename D::storage> &&
                                         c.out_strides[3] == 1);  // else they are narrowed there
  void* place[panel_width<T>];
  T* to[panel_width<T>];
  alignas(64) T factor[panel_width<T>];
  row_walk<char> r = rows_of_results<D>(c, task, kv_head, x.row);
  for (int64_t l0 = 0; l0 < x.count; l0 += w)
    end_rows<D>(c, task, kv_head, x, l0, nullptr, r, place + l0).store_aligned(factor + l0);
  for (int64_t l = 0; l < x.count; ++l) to[l] = in_place ? static_cast<T*>(place[l]) : x.out + l * c.v_dim;
  const bool finite = row_values<T>(x, view, weights, v, c.v_dim, to, factor);
  for (int64_t l = 0; l < x.count && !in_place; ++l)
    narrow_row<D>(to[l], c.v_dim, static_cast<typename D::storage*>(place[l]), c.out_strides[3]);
  return finite;
}

}  // namespace
}  // namespace manyhead::MH_ISA
