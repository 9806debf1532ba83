// From scores to weights, in the decode route (decode.hpp): maxima, exponentials and their sums.
#pragma once

#include "decode_values.hpp"
#include "far.hpp"

namespace manyhead::MH_ISA {
namespace {

template <class D>
struct step_weights : step_values<D> {
  using base = step_values<D>;
  using base::c, base::has_unit, base::heads, base::on_unit, base::out, base::padded_rows, base::scores, base::v_dim,
      base::w, base::width;
  using typename base::T;

  step_operands<D> unit;
  T row_max[most_rows_at_once];  // `lowest` before the first key
  T care[most_decode_rows];      // what weights of a row are multiplied with where a head is done with care
  const T* shift = nullptr;      // [rows]: by so much scores of a row are less then (far.hpp), if any are
  T* products;                   // [padded_rows][width] of one head, for these
  bool first_tile;               // of the task: no row has a sum or a value yet
  T* row_sums;                   // [heads * padded_rows][w], to be added up
  T* row_totals;                 // on the unit, as row_sums, before weights were rounded

  MH_INLINE step_weights(const kernel_call& call, const kernel_task& t) : base(call, t), unit(call) {}

  MH_INLINE void carve(carver& from, int64_t head_count, int64_t head_rows) {
    base::carve(from, head_count, head_rows);
    row_sums = from.take<T>(head_count * head_rows * w);
    products = from.take<T>(may_lie_far<T>(c) ? head_rows * width : 0);
    if constexpr (has_unit) {
      if (!c.unit_steps) return;
      row_totals = from.take<T>(head_count * head_rows * w);
      if constexpr (base::has_tiles) unit.carve(from, head_count, head_rows);
    }
  }

  // Slots from `keys` on, of so many rows up to `padded`, are no keys. They may hold anything, NaN too.
  MH_INLINE void close_slots(int64_t row_count, int64_t keys, int64_t padded) {
    for (int64_t k = round_down<w>(keys); k < padded; k += w) {
      const auto is_key = lane_numbers<T>() < vec<T>(static_cast<T>(keys - k));
      for (int64_t r = 0; r < row_count; ++r) {
        T* const s = scores + r * width + k;
        xsimd::select(is_key, vec<T>::load_aligned(s), vec<T>(-infinity<T>)).store_aligned(s);
      }
    }
  }

  // Takes in the scores of rows r .. r + R: raises their maxima, turns scores into weights. Nothing goes across lanes but
  // where a maximum rises: sums of lanes and maxima would be chains of ten dependent steps a row.
  template <bool Careful, int R>
  MH_INLINE void weigh_rows(int64_t r, int64_t padded_keys) {
    T* const s = scores + r * width;
    T* const row_sum = row_sums + r * w;
    const int64_t stride = width;
    raise<R>(r, s, padded_keys);
    const vec<T> scale(static_cast<T>(c.exp_scale));
    vec<T> sum[R];
#pragma GCC unroll 8
    for (int n = 0; n < R; ++n) sum[n] = vec<T>::load_aligned(row_sum + n * w);
    for (int64_t k = 0; k < padded_keys; k += w) {
      vec<T> p[R];
#pragma GCC unroll 8
      for (int n = 0; n < R; ++n) p[n] = (vec<T>::load_aligned(s + n * stride + k) - vec<T>(row_max[r + n])) * scale;
      exp2_of<T, R>(p);
#pragma GCC unroll 8
      for (int n = 0; n < R; ++n) {
        sum[n] = sum[n] + p[n];
        T* const to = s + n * stride + k;
        if constexpr (Careful) {
          const auto closed = vec<T>::load_aligned(to) == vec<T>(-infinity<T>);
          p[n] = xsimd::select(closed, vec<T>(T(-0.0)), p[n] * vec<T>(care[r + n]));
        }
        p[n].store_aligned(to);
      }
    }
#pragma GCC unroll 8
    for (int n = 0; n < R; ++n) sum[n].store_aligned(row_sum + n * w);
  }

  // Raises maxima of rows r .. r + R to those of their scores.
  template <int R>
  MH_INLINE void raise(int64_t r, const T* s, int64_t padded_keys) {
    const int64_t stride = width;
    vec<T> tops[R];
#pragma GCC unroll 8
    for (int n = 0; n < R; ++n) tops[n] = vec<T>(-infinity<T>);
    for (int64_t k = 0; k < padded_keys; k += w) {
#pragma GCC unroll 8
      for (int n = 0; n < R; ++n) tops[n] = larger<T>(tops[n], vec<T>::load_aligned(s + n * stride + k));
    }
    T below = 0;
    if constexpr (has_unit && unit_headroom<D>() > 0)
      below = static_cast<T>(on_unit ? unit_headroom<D>() / c.exp_scale : 0);
    const T reach = static_cast<T>(lazy_rescale / c.exp_scale) + below;
    const vec<T> scale(static_cast<T>(c.exp_scale));
#pragma GCC unroll 8
    for (int n = 0; n < R; ++n) {
      const T before = row_max[r + n];
      if (!xsimd::any(tops[n] > vec<T>(before + reach))) continue;
      const T top = largest_of<T>(tops[n]) - below;
      // Else there is no sum and no value yet. (Where scores are the lowest number themselves there is.)
      if (!first_tile && (before > lowest<T> || xsimd::any(load(row_sums + (r + n) * w) > vec<T>(T(0))))) {
        const vec<T> factor = exp2_of<T>((vec<T>(before) - vec<T>(top)) * scale);
        const auto lower = [factor](T* lanes_of_row) MH_INLINE_LAMBDA {
          (vec<T>::load_aligned(lanes_of_row) * factor).store_aligned(lanes_of_row);
        };
        lower(row_sums + (r + n) * w);
        if (on_unit) lower(row_totals + (r + n) * w);
        T* const values = out + (r + n) * v_dim;
        for (int64_t d = 0; d < v_dim; d += w) store<T>(values + d, load(values + d) * factor);
      }
      row_max[r + n] = top;
    }
  }

  template <bool Careful, int R>
  MH_INLINE void weigh_all(int64_t r, int64_t padded_keys) {
    for (; r + R <= heads * padded_rows; r += R) weigh_rows<Careful, R>(r, padded_keys);
    if constexpr (R > 1) weigh_all<Careful, R / 2>(r, padded_keys);
  }

  // Scores s[count][width] of rows r .. r + count become weights of the unit, R rows at a time: words of two neighbours,
  // to[count][to_row], which may be where the scores are, in parts. Exponentials, and which sums are of what was rounded, as on the
  // matrix route (matrix.hpp: degree, rounds).
  template <int R>
  MH_INLINE void weigh_for_unit(int64_t r, int64_t count, T* s, int64_t keys, uint32_t* to, int64_t to_row) {
    constexpr int Parts = step_operands<D>::weight_parts();
    for (; count >= R; count -= R, r += R, s += R * width, to += R * to_row) {
      raise<R>(r, s, keys);
      const vec<T> scale(static_cast<T>(c.exp_scale));
      vec<T> sum[R], total[R];
#pragma GCC unroll 8
      for (int n = 0; n < R; ++n) {
        sum[n] = vec<T>::load_aligned(row_sums + (r + n) * w);
        total[n] = vec<T>::load_aligned(row_totals + (r + n) * w);
      }
      for (int64_t k = 0; k < keys; k += 2 * w) {
        vec<T> p[2 * R];
#pragma GCC unroll 8
        for (int n = 0; n < 2 * R; ++n) {
          p[n] = (vec<T>::load_aligned(s + n / 2 * width + k + n % 2 * w) - vec<T>(row_max[r + n / 2])) * scale;
        }
        exp2_of<T, 2 * R, Parts == 1 ? 4 : 5>(p);
#pragma GCC unroll 8
        for (int n = 0; n < R; ++n) {
          const vec<T> exact = p[2 * n] + p[2 * n + 1];
          total[n] = total[n] + exact;
          uint32_t* const of_row = to + n * to_row + k / 2;
          if constexpr (Parts == 1) {
            unit_number<D>::values::format::round_neighbours(p[2 * n], p[2 * n + 1]).store_aligned(of_row);
            sum[n] = sum[n] + (p[2 * n] + p[2 * n + 1]);
          } else {
            deinterleave<T>(p[2 * n], p[2 * n + 1]);
            word_vec parts[Parts];
            split_floats<typename unit_number<D>::values::format>(p[2 * n], p[2 * n + 1], parts);
#pragma GCC unroll 2
            for (int i = 0; i < Parts; ++i) parts[i].store_aligned(of_row + i * unit.weight_part());
            sum[n] = sum[n] + exact;
          }
        }
      }
#pragma GCC unroll 8
      for (int n = 0; n < R; ++n) {
        sum[n].store_aligned(row_sums + (r + n) * w);
        total[n].store_aligned(row_totals + (r + n) * w);
      }
    }
    if constexpr (R > 1) weigh_for_unit<R / 2>(r, count, s, keys, to, to_row);
  }
};

}  // namespace
}  // namespace manyhead::MH_ISA
