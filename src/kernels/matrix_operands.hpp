// What the matrix unit multiplies: Q of a panel, K and V of a tile, brought into its order and split into its numbers
// (unit_number.hpp). K and V once a task, for all of its panels: V transposed if the unit needs it, both padded with zeros, so
// that no size or stride is special. K of the unit's own type may be multiplied where it is (takes_in_place).
#pragma once

#include "matrix_unit.hpp"
#include "panel.hpp"

namespace manyhead::MH_ISA {
namespace {

template <class D>
struct matrix_operands {
  using T = float;
  using storage = typename D::storage;
  using values = typename unit_number<D>::values;
  static constexpr int64_t w = lanes<T>;
  static constexpr int64_t piece = 2 * w;  // values of a vector of words
  static_assert(unit_step % piece == 0, "a step is whole vectors of words");
  alignas(64) static constexpr storage no_key[w] = {};
  static constexpr int parts = values::parts;
  using raw = word_vec[pair_vectors<D>];

  const kernel_call& c;
  const kernel_task& task;
  int64_t kv_head;
  int64_t dim_steps, v_rows, key_steps;  // head_dim in steps; v_dim rounded up; keys of a tile in steps
  uint16_t* k;        // [parts][dim_steps], blocks of block_kv rows; or whole rows (unit_takes_columns)
  unit_a keys;        // those, or K where it is
  uint16_t* v;        // [parts][key_steps], blocks of v_rows rows, or of 16 pairs of keys (unit_takes_columns)
  storage* together;  // rows of K, then of V, whose elements lie apart

  // The second time (matrix.hpp: attend_again) zeros stand for rows of Q, K and V that the unit cannot take, and their bits here.
  bool leaves_out = false;
  uint32_t left_out_rows = 0;                               // of the panel's Q
  uint32_t left_out_keys[most_tile_keys / word_keys] = {};  // of the tile's K or V

  matrix_operands(const kernel_call& call, const kernel_task& t)
      : c(call),
        task(t),
        kv_head(t.kv_head_begin),
        dim_steps(steps_of(call.head_dim)),
        v_rows(round_up<unit_rows>(call.v_dim)),
        key_steps(call.block_kv / unit_step) {}

  void carve(carver& from) {
    k = from.take<uint16_t>(parts * dim_steps * c.block_kv * unit_step);
    v = from.take<uint16_t>(parts * key_steps * v_rows * unit_step);
    together = from.take<storage>(elements_apart(c));
  }

  // Asks for n elements of each of `rows` rows where these lie apart: rows one behind the other the hardware fetches ahead.
  // The layer's heads, 64 of 768 floats each: packing 160 tokens 2.1 -> 1.2 ms, the layer 1.07 times as fast. Where V is not
  // transposed packing is too short for that hardware: on Zen 5 1.02 to 1.06 with 100 MB, 1.1 with few rows, in cache 0.98 to
  // 1.0.
  MH_INLINE void ask(const storage* row, const int64_t* strides, int64_t rows, int64_t n) const {
    const bool apart = strides[2] > max_of(c.head_dim, c.v_dim);
    if (!c.prefetch || strides[3] != 1 || !(apart || unit_takes_columns)) return;
    for (; rows > 0; --rows, row += strides[2]) {
      for (int64_t d = 0; d < n; d += 64 / static_cast<int64_t>(sizeof(storage))) __builtin_prefetch(row + d);
    }
  }

  // n elements of a row from dim d on; behind the last of `dim`, and where there is no row, zeros follow.
  template <int64_t n>
  static __attribute__((noinline)) void gather(const storage* row, int64_t stride, int64_t d, int64_t dim,
                                               storage (&to)[n]) {
    const int64_t count = row != nullptr && d < dim ? min_of(n, dim - d) : 0;
    if (stride == 1 && count > 0) return load_some(row + d, count, to);
    memset(to, 0, sizeof(to));
    for (int64_t i = 0; i < count; ++i) to[i] = row[(d + i) * stride];
  }

  // The unit takes denormal numbers for 0, and small parts of f32 may be denormal. That is an error of 2^-117 of a number,
  // which counts where the other operand is as large as 2^80: such are left to the tile route. K of bf16 is not looked at, so
  // that Q must not have any denormal either.
  static constexpr bool of_pairs = std::is_same_v<D, bf16>;
  using rows_seen = std::conditional_t<of_pairs, pair_magnitudes, magnitudes>;
  static MH_INLINE bool is_usual(const magnitudes& seen) { return !seen.any_above(80); }
  static MH_INLINE bool is_usual(const pair_magnitudes& seen) { return seen.all_usual(); }
  template <class Seen>
  static MH_INLINE void take(Seen& seen, const raw& x) {
    if constexpr (pair_vectors<D> == 2 || std::is_same_v<Seen, pair_magnitudes>) {
#pragma GCC unroll 2
      for (const word_vec& each : x) seen.take(each);
    }
  }

  // A row of K or V, for key `key` of the tile: as it is, or none, for which zeros stand.
  MH_INLINE const storage* unless_left_out(const storage* row, int64_t key) const {
    return leaves_out && (left_out_keys[key / word_keys] >> key % word_keys & 1) != 0 ? nullptr : row;
  }
  // Of bf16 and f16 K is taken as it is: NaN and inf stay in a key's scores, which masks and biases close.
  static constexpr bool k_is_left_out = pair_vectors<D> == 2;
  void find_left_out_keys(int64_t begin, int64_t end) {
    const auto* k_row = static_cast<const storage*>(c.k) + task.batch * c.k_strides[0] + kv_head * c.k_strides[1];
    const auto* v_row = static_cast<const storage*>(c.v) + task.batch * c.v_strides[0] + kv_head * c.v_strides[1];
    memset(left_out_keys, 0, sizeof(left_out_keys));
    for (int64_t key = begin; key < end; ++key) {
      bool good = all_finite<D>(v_row + key * c.v_strides[2], c.v_strides[3], c.v_dim);
      if constexpr (k_is_left_out) {
        constexpr uint32_t most = (127U + 80U) << 23;  // is_usual
        good = good && all_up_to<D>(most, k_row + key * c.k_strides[2], c.k_strides[3], c.head_dim);
      }
      left_out_keys[(key - begin) / word_keys] |= static_cast<uint32_t>(!good) << (key - begin) % word_keys;
    }
  }
  MH_INLINE bool is_usual_row(const storage* row) const {
    rows_seen seen;
    for (int64_t d = 0; d < c.head_dim; d += piece) {
      raw x;
      pairs_of_row(row, c.q_strides[3], d, c.head_dim, x);
      take(seen, x);
    }
    return is_usual(seen) && all_finite<D>(row, c.q_strides[3], c.head_dim);
  }

  // The pairs of a row from dim d on.
  static MH_INLINE void pairs_of_row(const storage* row, int64_t stride, int64_t d, int64_t dim, raw& x) {
    if (row != nullptr && stride == 1 && d + piece <= dim) return load_pairs<D>(row + d, x);
    alignas(64) storage buffer[piece];
    gather(row, stride, d, dim, buffer);
    load_pairs<D>(buffer, x);
  }

  // `lines` of pairs become columns, and parts: put(i, part), i < lanes.
  template <class Put>
  static MH_INLINE void turn(raw (&lines)[w], const Put& put) {
#pragma GCC unroll 2
    for (int n = 0; n < pair_vectors<D>; ++n) {
      word_vec x[w];
#pragma GCC unroll 16
      for (int64_t l = 0; l < w; ++l) x[l] = lines[l][n];
      transpose_words(x);
#pragma GCC unroll 16
      for (int64_t l = 0; l < w; ++l) lines[l][n] = x[l];
    }
#pragma GCC unroll 16
    for (int64_t i = 0; i < w; ++i) {
      word_vec part[parts];
      split_pairs<D, typename values::format>(lines[i], part);
      put(i, part);
    }
  }

  // Q^T of a panel, so many columns of it: B of the scores. False: not for the unit.
  __attribute__((noinline)) bool pack_rows(const panel<T>& x, int64_t columns) {
    rows_seen seen;
    left_out_rows = 0;
    row_walk<const storage> r = rows_of_q<D>(c, task.batch, kv_head, x.row);
    auto* to = reinterpret_cast<uint32_t*>(x.q);
    for (int64_t l0 = 0; l0 < columns; l0 += w) {
      const storage* from[w] = {};
      const int64_t count = max_of(0, min_of(w, x.count - l0));
      for (int64_t l = 0; l < count; ++l, r.step(c)) {
        from[l] = r.at;
        if (!leaves_out || is_usual_row(r.at)) continue;
        left_out_rows |= 1U << (l0 + l);
        from[l] = nullptr;
      }
      if (c.group == 1 && count > 0 && !leaves_out) ask(from[0] + w * c.q_strides[2], c.q_strides, w, c.head_dim);
      for (int64_t d = 0; d < dim_steps * unit_step; d += piece) {
        raw lines[w];
        if (count == w && c.q_strides[3] == 1 && d + piece <= c.head_dim && left_out_rows == 0) {
#pragma GCC unroll 16
          for (int64_t l = 0; l < w; ++l) load_pairs<D>(from[l] + d, lines[l]);
        } else {
          for (int64_t l = 0; l < w; ++l) pairs_of_row(from[l], c.q_strides[3], d, c.head_dim, lines[l]);
        }
#pragma GCC unroll 16
        for (int64_t l = 0; l < w; ++l) take(seen, lines[l]);
        if constexpr (parts == 1) {
          put_columns(to, l0, d, lines);
        } else {
          turn(lines, [&](int64_t i, const word_vec(&part)[parts]) MH_INLINE_LAMBDA {
#pragma GCC unroll 3
            for (int n = 0; n < parts; ++n) put_pair(to + n * dim_steps * unit_block, l0, d + 2 * i, part[n]);
          });
        }
      }
    }
    return is_usual(seen);
  }

  // Keys [begin, end) of K or V, as neighbours.
  MH_INLINE rows_at<D> tile_rows(const void* base, const int64_t* strides, int64_t begin, int64_t end,
                                 int64_t dim) const {
    const auto* from = static_cast<const storage*>(base) + task.batch * strides[0] + kv_head * strides[1];
    return neighbours(rows_at<D>{from + begin * strides[2], strides[2]}, end - begin, strides, dim, together);
  }

  // Whether keys [begin, end) of K can be multiplied where they are. For two panels that is faster than a copy with AMX
  // (bf16, 16 to 64 rows of a kv head and 4096 keys: 1.07 to 1.17), for more it is not (128 rows 0.99, 512 and more 0.96 to
  // 1.02). VDPBF16PS reads single pairs anyway: 1.0 to 1.06.
  bool takes_in_place(int64_t begin, int64_t end, int64_t panels) const {
    return unit_takes_memory && parts == 1 && (panels <= 2 || unit_grain.rows == 1) && c.k_strides[3] == 1 &&
           c.head_dim % unit_grain.sums == 0 && (end - begin) % unit_grain.rows == 0;
  }

  // Keys [begin, end) of K: A of the scores. Up to a whole step of keys, zeros follow. False: not for the unit.
  __attribute__((noinline)) bool pack_keys(int64_t begin, int64_t end, int64_t panels) {
    magnitudes seen;
    const rows_at<D> rows = tile_rows(c.k, c.k_strides, begin, end, c.head_dim);
    const int64_t step_size = c.block_kv * unit_step;
    if (leaves_out) find_left_out_keys(begin, end);
    if constexpr (sizeof(storage) == sizeof(uint16_t)) {
      if (takes_in_place(begin, end, panels)) {
        keys = {rows.base, 0, unit_step, rows.stride};
        return true;
      }
    }
    keys = unit_takes_columns ? unit_a{k, dim_steps * step_size, unit_step, dim_steps * unit_step}
                              : unit_a{k, dim_steps * step_size, step_size, unit_step};
    for (int64_t key = 0; key < round_up<unit_step>(end - begin); ++key) {
      const storage* row = begin + key < end ? rows.from(key).base : nullptr;
      if (k_is_left_out && row != nullptr) row = unless_left_out(row, key);
      if (row != nullptr) ask(row + 16 * c.k_strides[2], c.k_strides, 1, c.head_dim);
      for (int64_t step = 0; step < dim_steps; ++step) {
        for (int64_t d = 0; d < unit_step; d += piece) {
          raw x;
          word_vec part[parts];
          pairs_of_row(row, 1, step * unit_step + d, c.head_dim, x);
          take(seen, x);
          split_pairs<D, typename values::format>(x, part);
#pragma GCC unroll 3
          for (int n = 0; n < parts; ++n) {
            uint16_t* const to = k + n * keys.part + step * keys.step;
            put_row(to, keys.row, key, d, part[n]);
          }
        }
      }
    }
    return is_usual(seen);
  }

  // Of the sum of a score. Whole pieces where load_pairs changes their order.
  int64_t score_sums() const { return pair_vectors<D> == 2 ? round_up<piece>(c.head_dim) : c.head_dim; }

  // A of the values: V from key `first` of the tile on, in whole steps, and from dim d.
  MH_INLINE unit_a values_from(int64_t first, int64_t d) const {
    const int64_t step = v_rows * unit_step;
    const uint16_t* const base = v + first / unit_step * step;
    if constexpr (unit_takes_columns) return {base + 2 * d, key_steps * step, step, 2, 2 * v_rows};
    return {base + d * unit_step, key_steps * step, step, unit_step};
  }

  // A row of V for key `key` of a tile that has so many, or none, for which zeros stand.
  MH_INLINE const storage* row_of_v(const rows_at<D>& rows, int64_t key, int64_t count) const {
    return key < count ? unless_left_out(rows.from(key).base, key) : nullptr;
  }

  // `lanes` neighbours from dim d on of two rows, of which either may be none.
  MH_INLINE void neighbours_of(const storage* even, const storage* odd, int64_t d, raw& x) const {
    if (d + w <= c.v_dim)  // 16 rows of bf16 and up to 577 keys 1.04 to 1.09 times as fast as by way of the buffer
      return load_pairs<D>(even != nullptr ? even + d : no_key, odd != nullptr ? odd + d : no_key, x);
    alignas(64) storage buffer[2][w];
    gather(even, 1, d, c.v_dim, buffer[0]);
    gather(odd, 1, d, c.v_dim, buffer[1]);
    load_pairs<D>(buffer[0], buffer[1], x);
  }

  // The same keys of V: A of the values.
  __attribute__((noinline)) void pack_values(int64_t begin, int64_t end, lines_ahead* ahead) const {
    const rows_at<D> rows = tile_rows(c.v, c.v_strides, begin, end, c.v_dim);
    if constexpr (unit_takes_columns) {
      pack_by_keys(rows, end - begin);
    } else {
      pack_by_dims(rows, end - begin, ahead);
    }
  }

  // Pair after pair of keys, along which all that is read and written lies side by side.
  MH_INLINE void pack_by_keys(const rows_at<D>& rows, int64_t count) const {
    const int64_t to_part = key_steps * v_rows * unit_step, dims = c.v_dim;
    uint16_t* to = v;
    for (int64_t key = 0; key < round_up<unit_step>(count); key += 2, to += 2 * v_rows) {
      const storage *even = row_of_v(rows, key, count), *odd = row_of_v(rows, key + 1, count);
      if (key < count) ask(rows.from(key + unit_step).base, c.v_strides, 2, dims);
      const auto put = [&](int64_t d, const raw& x) MH_INLINE_LAMBDA {
        word_vec part[parts];
        split_pairs<D, typename values::format>(x, part);
#pragma GCC unroll 3
        for (int n = 0; n < parts; ++n) part[n].store_aligned(reinterpret_cast<uint32_t*>(to + n * to_part + 2 * d));
      };
      const storage *from = even != nullptr ? even : no_key, *from_odd = odd != nullptr ? odd : no_key;
      const int64_t step = even != nullptr ? w : 0, step_odd = odd != nullptr ? w : 0;
      raw x;
      int64_t d = 0;
      for (; d + w <= dims; d += w, from += step, from_odd += step_odd) {
        load_pairs<D>(from, from_odd, x);
        put(d, x);
      }
      if (d == dims) continue;
      neighbours_of(even, odd, d, x);
      put(d, x);
    }
  }

  // Transposed, so many keys and dims at a time. With each line one of `ahead` is asked for, if any.
  MH_INLINE void pack_by_dims(const rows_at<D>& rows, int64_t count, lines_ahead* ahead) const {
    for (int64_t first = 0; first < round_up<unit_step>(count); first += piece) {
      for (int64_t d = 0; d < v_rows; d += w) {
        raw lines[w];
        if (d + w <= c.v_dim && first + piece <= count && !leaves_out) {
          const storage* row = rows.from(first, d).base;
#pragma GCC unroll 16
          for (int64_t l = 0; l < w; ++l, row += 2 * rows.stride) load_pairs<D>(row, row + rows.stride, lines[l]);
          if (d * static_cast<int64_t>(sizeof(storage)) % 64 == 0) ask(row, c.v_strides, piece, w);  // a line once
          if (ahead != nullptr) ahead->ask(piece * w * static_cast<int64_t>(sizeof(storage)) / 64);
        } else {
          for (int64_t l = 0; l < w; ++l) {
            const int64_t key = first + 2 * l;
            neighbours_of(row_of_v(rows, key, count), row_of_v(rows, key + 1, count), d, lines[l]);
          }
        }
        uint16_t* const block = v + first / unit_step * v_rows * unit_step;
        const int64_t to_part = key_steps * v_rows * unit_step;
        turn(lines, [&](int64_t i, const word_vec(&part)[parts]) MH_INLINE_LAMBDA {
#pragma GCC unroll 3
          for (int n = 0; n < parts; ++n) put_row(block + n * to_part, unit_step, d + i, first % unit_step, part[n]);
        });
      }
    }
  }
};

}  // namespace
}  // namespace manyhead::MH_ISA
