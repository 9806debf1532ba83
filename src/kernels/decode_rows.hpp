// What the two products of the decode route share: rows of Q as they take them, where rows of K and V are, and what is asked for
// ahead of need.
#pragma once

#include "decode_unit.hpp"
#include "together.hpp"

namespace manyhead::MH_ISA {
namespace {

// Rows that are needed soon: of V while K is worked on, and of the next tile's K during the values. Each step asks for
// the bytes of the other that it reads itself, one line every few cycles: sixteen at once would fill the buffers that
// also bring lines from L2, and all would wait. Or its own bytes some rows on (kernel_call.asks_own), where rows are
// not widened and there are registers to read them in few passes: with many a row comes again before its lines do.
// Own rows are few enough for L1, and so are tiles of K and V in 16 bits (other_l1), where kernel_call.asks_l1. All
// others are asked for into L2.
enum class asks { nothing, other, other_l1, own };
struct soon {
  const char* base;
  int64_t stride;  // bytes
  MH_INLINE soon from(int64_t row, int64_t bytes = 0) const { return {base + row * stride + bytes, stride}; }
};
template <class E>
MH_INLINE soon as_soon(rows_at<E> rows) {
  constexpr int64_t size = sizeof(typename E::storage);
  return {reinterpret_cast<const char*>(rows.base), rows.stride * size};
}
template <asks For>
MH_INLINE void ask(const char* p) {
  __builtin_prefetch(p, 0, For == asks::other_l1 || For == asks::own ? 3 : 2);
}

// The next lines of N rows, N at a time: of rows without gaps in the order of memory (step_rows::in_order), else one of each.
template <int N>
struct asked_rows {
  const char* at;
  int64_t apart;  // from a line to the next
  int64_t back;   // from behind the N-th to the first of the next N
  MH_INLINE asked_rows(bool in_order, soon rows)
      : at(rows.base), apart(in_order ? 64 : rows.stride), back(in_order ? 0 : 64 - N * rows.stride) {}
  template <asks For>
  MH_INLINE void ask_line() {
    ask<For>(at);
    at += apart;
    asm volatile("" : "+r"(at));  // one after the other: where g++ mixed two steps' lines, nothing was gained
  }
  MH_INLINE void go_back() { at += back; }
};

template <class D>
struct step_rows {
  using T = typename D::real;
  static constexpr int64_t w = lanes<T>;
  static constexpr bool many_registers = max_panel_vectors == 3;
  // Rows worked on together. 8 of them convert each 16-bit element half as often, but were slower: V is then read in
  // pieces of 64 bytes.
  static constexpr int most_rows = 4;
  static constexpr bool widens = sizeof(typename D::storage) < sizeof(T);
  static constexpr int64_t keys_at_once = 32;  // rows of V that stay in L1: 16 KB of 128 floats
  static constexpr bool has_tiles = unit_takes_tiles<D>, has_pairs = unit_takes_pairs<D>,
                        has_unit = has_tiles || has_pairs;

  const kernel_call& c;
  const kernel_task& task;
  int64_t kv_head, heads;  // those worked on together, each with its own keys
  int64_t rows;            // of a head
  int64_t padded_rows;     // of a head in scratch, those behind `rows` are zeros; those of the next head follow
  int64_t k_dim, v_dim;    // padded to whole vectors, by pairs of their elements
  // By so much the last vector of a row begins earlier. Not so in copies of Q, nor in those of V but by pairs.
  int64_t k_back, v_back, q_back;
  int64_t k_pairs, v_pairs;            // what of a row goes in pairs of vectors: all but the last vector or two
  T* q;                                // [heads * padded_rows][k_dim]: copies, where rows are not read in place
  const T* q_rows[most_rows_at_once];  // where each row is
  const T* const* q_row;               // the first of those worked on
  T* k_copy;
  T* v_copy;
  typename D::storage* together;  // rows of K or V as they are, where elements lie apart
  bool no_gaps;          // between the rows that this task reads: of its head, or of its heads where they take turns
  bool in_order;         // lines are asked for in the order of memory
  bool on_unit = false;  // products are the unit's
  bool is_usual[most_rows_at_once];  // of a head: its rows are for the unit
  bool leaves_out = false;           // zeros stand for rows of V that are not finite
  alignas(64) bits<T> k_kept[w];     // of the last vector of K: all bits of a lane, or none

  MH_INLINE step_rows(const kernel_call& call, const kernel_task& t) : c(call), task(t) {}

  MH_INLINE void carve(carver& from, int64_t head_count, int64_t head_rows) {
    measure_rows(has_pairs && c.unit_steps);
    q = from.take<T>(head_count * head_rows * k_dim);
    k_copy = from.take<T>(c.copy_kv ? c.block_kv * k_dim : 0);
    v_copy = from.take<T>(c.copy_kv ? c.block_kv * v_dim : has_pairs && c.unit_steps ? keys_at_once * v_dim / 2 : 0);
    together = from.take<typename D::storage>(elements_apart(c));
  }

  MH_INLINE void measure_rows(bool by_pairs) {
    const auto padded = [=](int64_t dims) { return by_pairs ? round_up<2 * w>(dims) : round_up<w>(dims); };
    k_dim = padded(c.head_dim);
    v_dim = padded(c.v_dim);
    k_back = c.head_dim < w ? 0 : k_dim - c.head_dim;
    v_back = c.copy_kv && !by_pairs ? 0 : v_dim - c.v_dim;
    const auto pairs = [=](int64_t dims, int64_t back) { return round_down<2 * w>(dims - (back > 0 ? w : 0)); };
    k_pairs = pairs(k_dim, k_back);
    v_pairs = pairs(v_dim, v_back);
  }

  // Out of line: clang keeps an address for each element, of which the usual way would pay.
  static __attribute__((noinline)) void gather(const typename D::storage* row, int64_t stride, T (&to)[2 * w]) {
    widen_row<D>(row, stride, 2 * w, to);
  }

  // A row of q or K, elements `stride` apart, as T in the order that the scores are computed in, times `scale`.
  MH_INLINE void arrange(const typename D::storage* row, int64_t stride, T scale, T* to) const {
    const int64_t dim = c.head_dim, padded = k_dim, pairs = k_pairs, back = k_back;  // in registers through the stores
    const vec<T> factor(scale);
    int64_t d = 0;
    for (; d < pairs; d += 2 * w) {
      vec<T> a, b;
      if (stride == 1) {
        D::widen_pair(row + d, a, b);
      } else {
        alignas(64) T apart[2 * w];
        gather(row + d * stride, stride, apart);
        a = vec<T>::load_aligned(apart);
        b = vec<T>::load_aligned(apart + w);
        if constexpr (D::pairs_apart) deinterleave<T>(a, b);
      }
      (a * factor).store_aligned(to + d);
      (b * factor).store_aligned(to + d + w);
    }
    if (d == padded) return;
    const int64_t whole = back > 0 ? padded - w : dim;  // what is left goes behind `back` zeros
    widen_row<D>(row + d * stride, stride, whole - d, to + d);
    for (int64_t i = whole; i < padded; ++i) to[i] = T(0);
    if (back > 0) widen_row<D>(row + whole * stride, stride, dim - whole, to + whole + back);
    for (; d < padded; d += w) (vec<T>::load_aligned(to + d) * factor).store_aligned(to + d);
  }

  // With few keys copies of Q take as long as a sixth of all else (8 rows against 8 keys of 80). There rows are read in place, where
  // nothing is multiplied with them (kernel_api.hpp: q_scale).
  MH_INLINE bool reads_q_in_place() const {
    constexpr int64_t few = 32;
    return !widens && c.q_scale == 1 && c.q_strides[3] == 1 && c.head_dim >= w && c.kv_len <= few;
  }

  // Where vector d of such a row lies in memory; and, in pairs of vectors of which the last may begin earlier, too, pair d.
  static MH_INLINE int64_t place_of(int64_t d, int64_t padded, int64_t back) { return d + w == padded ? d - back : d; }
  static MH_INLINE int64_t place_of_pair(int64_t d, int64_t padded, int64_t back) {
    return d + 2 * w == padded ? d - back : d;
  }

  // Rows of Q for products of pairs, in the blocks that score_all takes: as many pairs of each row as a vector has for it, and
  // those of the block's next row behind them. Zeros where the last vector has dims of the one before.
  // left: zeros for rows that are not for the unit too, and a bit there for each.
  static constexpr int most_rows_of_pairs = min_of(8, static_cast<int>(w));
  MH_INLINE void copy_pairs(uint32_t* left_rows = nullptr) {
    auto* to = reinterpret_cast<uint32_t*>(q);
    for (int64_t h = 0; h < heads; ++h) {
      pair_magnitudes seen;
      row_walk<const typename D::storage> row = rows_of_q<D>(c, task.batch, kv_head + h, task.row_begin);
      copy_blocks<most_rows_of_pairs>(row, 0, to, seen, left_rows != nullptr ? left_rows + h : nullptr);
      is_usual[h] = seen.all_usual();
    }
  }
  template <int R>
  MH_INLINE void copy_blocks(row_walk<const typename D::storage>& row, int64_t r, uint32_t*& to, pair_magnitudes& seen,
                             uint32_t* left) {
    constexpr int64_t piece = w / R;
    for (; r + R <= padded_rows; r += R, to += R * k_dim / 2) {
      for (int64_t n = 0; n < R; ++n, row.step(c)) {
        uint32_t* at_row = to + n * piece;
        bool is_left = false;
        if (left != nullptr && r + n < rows && !is_usual_row(row.at, c.q_strides[3], c.head_dim)) {
          *left |= 1U << (r + n);
          is_left = true;
        }
        for (int64_t d = 0; d < k_dim; d += 2 * w) {
          alignas(64) uint32_t pairs[w];
          const int64_t at_dim = place_of_pair(d, k_dim, k_back);
          const word_vec x = words_of_row(r + n < rows && !is_left ? row.at : nullptr, c.q_strides[3], at_dim);
          seen.take(x);
          x.store_aligned(pairs);
          if (at_dim != d) memset(pairs, 0, static_cast<size_t>(k_back) * sizeof(uint16_t));
#pragma GCC unroll 8
          for (int i = 0; i < R; ++i, at_row += w) memcpy(at_row, pairs + i * piece, piece * sizeof(*pairs));
        }
      }
    }
    if constexpr (R > 1) copy_blocks<R / 2>(row, r, to, seen, left);
  }

  // Rows of Q for multiply-adds. Where the call may go by pairs, sizes were of these.
  MH_INLINE void copy_rows() {
    if (has_pairs && c.unit_steps) measure_rows(false);
    for (int64_t l = 0; l < w && k_back > 0; ++l) k_kept[l] = l < k_back ? bits<T>(0) : ~bits<T>(0);
    const bool in_place = reads_q_in_place();
    q_back = in_place ? k_back : 0;
    T* to = q;
    const T** row_at = q_rows;
    // In registers through the stores.
    const int64_t dims = k_dim, count = rows, padded = padded_rows, head_end = task.kv_head_end;
    for (int64_t head = task.kv_head_begin; head < head_end; ++head) {
      row_walk<const typename D::storage> row = rows_of_q<D>(c, task.batch, head, task.row_begin);
      for (int64_t r = 0; r < count; ++r, row.step(c), to += dims) {
        if (in_place) {
          *row_at++ = reinterpret_cast<const T*>(row.at);
        } else {
          arrange(row.at, c.q_strides[3], static_cast<T>(c.q_scale), to);
          *row_at++ = to;
        }
      }
      for (int64_t r = count; r < padded; ++r, to += dims) {
        memset(to, 0, static_cast<size_t>(dims) * sizeof(T));
        *row_at++ = to;
      }
    }
  }

  MH_INLINE rows_at<D> in_place(const void* base, const int64_t* strides, int64_t batch, int64_t head,
                                int64_t begin) const {
    return {static_cast<const typename D::storage*>(base) + batch * strides[0] + head * strides[1] + begin * strides[2],
            strides[2]};
  }

  // Whether they are what a copy would be: of T, and whole vectors.
  MH_INLINE const T* already_copied(rows_at<D> there, rows_at<D> from, bool whole) const {
    return !widens && whole && from.base != there.base ? reinterpret_cast<const T*>(from.base) : nullptr;
  }

  template <class E>
  MH_INLINE auto copied_k(rows_at<D> there, int64_t keys) {
    const rows_at<D> from = neighbours(there, keys, c.k_strides, c.head_dim, together);
    if constexpr (paired<E>) {
      return copied_pairs(from, keys, k_dim, k_back, k_copy);
    } else {
      if (const T* copy = already_copied(there, from, k_dim == c.head_dim)) return rows_at<plain<D>>{copy, k_dim};
      for (int64_t k = 0; k < keys; ++k) arrange(from.from(k).base, 1, T(1), k_copy + k * k_dim);
      return rows_at<plain<D>>{k_copy, k_dim};
    }
  }
  template <class E>
  MH_INLINE auto copied_v(rows_at<D> there, int64_t keys) {
    const rows_at<D> from = neighbours(there, keys, c.v_strides, c.v_dim, together);
    if constexpr (paired<E>) {
      return copied_pairs(from, keys, v_dim, v_back, v_copy);
    } else {
      if (const T* copy = already_copied(there, from, v_dim == c.v_dim)) return rows_at<plain<D>>{copy, v_dim};
      for (int64_t k = 0; k < keys; ++k) {
        widen_row<D>(from.from(k).base, 1, c.v_dim, v_copy + k * v_dim);
        for (int64_t d = c.v_dim; d < v_dim; ++d) v_copy[k * v_dim + d] = T(0);
      }
      return rows_at<plain<D>>{v_copy, v_dim};
    }
  }
  // Up to keys_at_once of them, with zeros for those that are not finite.
  MH_INLINE rows_at<in_pairs> finite_pairs_of_v(rows_at<D> there, int64_t keys) {
    const rows_at<D> from = neighbours(there, keys, c.v_strides, c.v_dim, together);
    const rows_at<in_pairs> copy = copied_pairs(from, keys, v_dim, v_back, v_copy);
    for (int64_t k = 0; k < keys; ++k) {
      if (all_finite<D>(from.from(k).base, 1, c.v_dim)) continue;
      memset(reinterpret_cast<uint16_t*>(v_copy) + k * v_dim, 0, static_cast<size_t>(v_dim) * sizeof(uint16_t));
    }
    return copy;
  }
  MH_INLINE rows_at<in_pairs> copied_pairs(rows_at<D> from, int64_t keys, int64_t dims, int64_t back, T* to) {
    auto* const copy = reinterpret_cast<uint16_t*>(to);
    for (int64_t k = 0; k < keys; ++k) {
      for (int64_t d = 0; d < dims; d += 2 * w) {
        const int64_t at_dim = place_of_pair(d, dims, back);
        const word_vec x = load_words(from.from(k).base + at_dim);
        memcpy(copy + k * dims + (c.copy_kv ? d : at_dim), &x, sizeof(x));
      }
    }
    return {copy, dims};
  }
};

}  // namespace
}  // namespace manyhead::MH_ISA
