// The route for few rows (a decode step: query heads of a group times a few new tokens; the last rows of a prompt). Bound
// by reading K and V: each tile is read once for all rows. Lanes over dims for both products, lanes over keys for everything between:
//
//   S[row][key] = reduce(sum over dim vectors of K[key] * q[row])     4 rows x 4 keys at a time (16 registers: 4 x 2)
//   O[row] += P[row][key] * V[key]                                    4 rows x 4 vectors at a time, 2 x 8 (4 x 2, 2 x 4)
//
// 16-bit elements are widened as they are loaded, two vectors at a time, in whatever order is cheapest: q is brought
// into the same order first, and the result out of it at the end. Where a row of K or V is not whole vectors, the last
// one ends where the row ends and begins among the dims before: of K these are made 0 (by pairs of Q, and all is in vectors of
// 16 bits), the result has them twice. Rows
// shorter than a vector come here through the copy (kernel_call.copy_kv), padded with zeros; so do those whose elements
// lie apart, and copies of K have the same order, so that sums have the same bits.
//
// Where a matrix unit takes few rows and the plan says so, products are the unit's: with tiles (decode_unit.hpp), or by pairs in
// these loops (decode_pairs.hpp).
#pragma once

#include "decode_unit.hpp"

namespace manyhead::MH_ISA {
namespace {

template <class D>
struct decode_task {
  using T = typename D::real;
  static constexpr int64_t w = lanes<T>;
  static constexpr int64_t keys_at_once = 32;  // rows of V that stay in L1: 16 KB of 128 floats
  // Of K that are worked on for a head before the next head, where heads take turns; of V keys_at_once.
  static constexpr int64_t turn_keys = 16;
  // Rows worked on together. 8 of them convert each 16-bit element half as often, but were slower: V is then read in
  // pieces of 64 bytes.
  static constexpr int most_rows = 4;
  // Register budgets. Scores: R rows x dots / R keys of accumulators, a pair of vectors of each row (R <= keys) or of each
  // key (else), a pair or one of the other: of 32 registers 16 + 8 + 2 for 4 rows, of 16 8 + 4 + 1.
  static constexpr bool many_registers = max_panel_vectors == 3;
  static constexpr int dots = many_registers ? 16 : 8;
  // Values: R rows x pairs of vectors of accumulators, R weights, a pair: of 32 registers 16 + 4 + 2, of 16 8 + 4 + 2, with a
  // single vector, too, for two rows 18 + 2 + 2 and 10 + 2 + 2. One row: as many as hide the latency of a sum.
  template <int R>
  static constexpr int pairs_of = min_of(4, (many_registers ? 8 : 4) / R);

  const kernel_call& c;
  const kernel_task& task;
  positions at;
  int64_t kv_head, heads;  // those worked on together, each with its own keys
  int64_t rows;            // of a head
  int64_t padded_rows;     // of a head in scratch, those behind `rows` are zeros; those of the next head follow
  int64_t k_dim, v_dim;    // padded to whole vectors, by pairs of their elements
  int64_t k_back,
      v_back;      // by so much the last vector of a row begins earlier; of copies of V it does not, but by pairs,
  int64_t q_back;  // nor of copies of Q
  int64_t k_pairs, v_pairs;            // what of a row goes in pairs of vectors: all but the last vector or two
  int64_t width;                       // keys of a score row, padded
  T* q;                                // [heads * padded_rows][k_dim]: copies, where rows are not read in place
  const T* q_rows[most_rows_at_once];  // where each row is
  const T* const* q_row;               // the first of those worked on
  T* out;                              // [heads * padded_rows][v_dim]
  T* scores;                           // [heads * padded_rows][width]
  T* unfinished;                       // [heads * padded_rows][v_dim]: where heads take turns, a tile's sums so far
  bits<T>* words;                      // [heads][width / word_keys + 1][whole vectors of rows]
  T* k_copy;
  T* v_copy;
  T* row_sums;  // [heads * padded_rows][w], to be added up
  T row_max[most_rows_at_once];
  bool started[most_rows_at_once];  // of a head: out holds something
  alignas(64) bits<T> k_kept[w];    // of the last vector of K: all bits of a lane, or none
  // Whether results go from the registers to their place, as all keys are in one tile; where to, and times what.
  bool direct;
  T* places[most_rows_at_once];
  T factors[most_rows_at_once];
  vec<T> zeros;                       // finite_check::sum of what was written of a head
  bool is_finite[most_rows_at_once];  // of a head: its results are
  static constexpr bool has_tiles = unit_takes_tiles<D>, has_pairs = unit_takes_pairs<D>,
                        has_unit = has_tiles || has_pairs;
  template <class E>
  static constexpr bool paired = std::is_same_v<E, in_pairs>;
  step_operands<D> unit;
  bool on_unit = false;              // products are the unit's
  bool is_usual[most_rows_at_once];  // of a head: its rows are for the unit
  T* row_totals;                     // on the unit, as row_sums, before weights were rounded

  MH_INLINE void carve(carver& from, int64_t head_count, int64_t head_rows) {
    const int64_t row_count = head_count * head_rows;
    measure_rows(has_pairs && c.unit_steps);
    width = round_up<max_of(2 * w, dots)>(c.block_kv);
    q = from.take<T>(row_count * k_dim);
    out = from.take<T>(row_count * v_dim);
    scores = from.take<T>(row_count * width);
    row_sums = from.take<T>(row_count * w);
    if constexpr (has_unit) {
      if (c.unit_steps) {
        row_totals = from.take<T>(row_count * w);
        if constexpr (has_tiles) unit.carve(from, head_count, head_rows);
      }
    }
    unfinished = from.take<T>(c.turns ? row_count * v_dim : 0);
    words = from.take<bits<T>>(head_count * words_of_head(head_rows));
    k_copy = from.take<T>(c.copy_kv ? c.block_kv * k_dim : 0);
    v_copy = from.take<T>(c.copy_kv ? c.block_kv * v_dim : 0);
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

  MH_INLINE decode_task(const kernel_call& call, const kernel_task& t) : c(call), task(t), unit(call) {}

  static int64_t scratch_bytes(const kernel_call& c, int64_t row_count) {
    const kernel_task none{};
    decode_task sizes(c, none);
    carver from{nullptr};
    const int64_t head_count = max_of(1, row_count / max_of(1, c.rows));
    sizes.carve(from, head_count, round_up<most_rows>(head_count > 1 ? row_count / head_count : row_count));
    return from.used;
  }

  MH_INLINE int64_t words_of_head(int64_t head_rows) const { return (width / word_keys + 1) * round_up<w>(head_rows); }

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

  MH_INLINE void start() {
    at = positions_of(c, task.batch);
    on_unit = has_unit && c.unit_steps && at.used <= c.unit_keys;
    kv_head = task.kv_head_begin;
    heads = task.kv_head_end - kv_head;
    rows = task.row_end - task.row_begin;
    padded_rows = !on_unit    ? rows + (adds_row() ? 1 : 0)
                  : has_tiles ? unit_blocks(rows).rows()
                              : rows + (rows % most_rows_of_pairs == most_rows_of_pairs - 1 ? 1 : 0);
    carver from{static_cast<char*>(task.scratch)};
    carve(from, heads, padded_rows);
    if (has_pairs && !on_unit && c.unit_steps) measure_rows(false);
    q_row = q_rows;
    if (!on_unit) return copy_rows();
    if constexpr (has_tiles) {
      for (int64_t h = 0; h < heads; ++h) is_usual[h] = unit.pack_rows(task, h);
    }
    if constexpr (has_pairs) copy_pairs();
  }

  // Rows of Q for products of pairs, in the blocks that score_all takes: as many pairs of each row as a vector has for it, and
  // those of the block's next row behind them. Zeros where the last vector has dims of the one before.
  static constexpr int most_rows_of_pairs = min_of(8, static_cast<int>(w));
  MH_INLINE void copy_pairs() {
    auto* to = reinterpret_cast<uint32_t*>(q);
    alignas(64) uint16_t kept[2 * w];
    for (int64_t i = 0; i < 2 * w; ++i) kept[i] = i < k_back ? 0 : 0xffff;
    const word_vec kept_of_last = load_words(kept);
    for (int64_t h = 0; h < heads; ++h) {
      pair_magnitudes seen;
      row_walk<const typename D::storage> row = rows_of_q<D>(c, task.batch, kv_head + h, task.row_begin);
      copy_blocks<most_rows_of_pairs>(row, 0, to, kept_of_last, seen);
      is_usual[h] = seen.all_usual();
    }
  }
  template <int R>
  MH_INLINE void copy_blocks(row_walk<const typename D::storage>& row, int64_t r, uint32_t*& to, word_vec kept_of_last,
                             pair_magnitudes& seen) {
    constexpr int64_t piece = w / R;
    for (; r + R <= padded_rows; r += R, to += R * k_dim / 2) {
      for (int64_t n = 0; n < R; ++n, row.step(c)) {
        uint32_t* at_row = to + n * piece;
        for (int64_t d = 0; d < k_dim; d += 2 * w) {
          alignas(64) uint32_t pairs[w];
          const int64_t at_dim = place_of_pair(d, k_dim, k_back);
          word_vec x = words_of_row(r + n < rows ? row.at : nullptr, c.q_strides[3], at_dim);
          if (at_dim != d) x = x & kept_of_last;
          seen.take(x);
          x.store_aligned(pairs);
#pragma GCC unroll 8
          for (int i = 0; i < R; ++i, at_row += w) memcpy(at_row, pairs + i * piece, piece * sizeof(*pairs));
        }
      }
    }
    if constexpr (R > 1) copy_blocks<R / 2>(row, r, to, kept_of_last, seen);
  }

  // Rows of Q for multiply-adds.
  MH_INLINE void copy_rows() {
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

  // Rows of K or V as they are in memory, or as copied. E: the trait of their elements.
  template <class E>
  struct rows_at {
    const typename E::storage* base;
    int64_t stride;
    MH_INLINE rows_at from(int64_t row, int64_t dim = 0) const { return {base + row * stride + dim, stride}; }
  };
  MH_INLINE rows_at<D> in_place(const void* base, const int64_t* strides, int64_t batch, int64_t head,
                                int64_t begin) const {
    return {static_cast<const typename D::storage*>(base) + batch * strides[0] + head * strides[1] + begin * strides[2],
            strides[2]};
  }
  // The key that a task begins with.
  MH_INLINE int64_t first_key(const positions& p, const kernel_task& of) const {
    return max_of(range_of(c, p, of.row_begin / c.group).begin, of.chunk * c.chunk_keys);
  }
  // And where its keys end.
  MH_INLINE int64_t end_of_keys() const {
    const int64_t end = c.extra_keys > 0 ? c.kv_len : range_of(c, at, (task.row_end - 1) / c.group).end;
    return c.chunks > 1 ? min_of(end, (task.chunk + 1) * c.chunk_keys) : end;
  }
  template <class E>
  MH_INLINE auto copied_k(rows_at<D> from, int64_t keys) {
    if constexpr (paired<E>) {
      return copied_pairs(from, keys, c.k_strides[3], k_dim, k_back, k_copy);
    } else {
      for (int64_t k = 0; k < keys; ++k) arrange(from.from(k).base, c.k_strides[3], T(1), k_copy + k * k_dim);
      return rows_at<plain<D>>{k_copy, k_dim};
    }
  }
  template <class E>
  MH_INLINE auto copied_v(rows_at<D> from, int64_t keys) {
    if constexpr (paired<E>) {
      return copied_pairs(from, keys, c.v_strides[3], v_dim, v_back, v_copy);
    } else {
      for (int64_t k = 0; k < keys; ++k) {
        widen_row<D>(from.from(k).base, c.v_strides[3], c.v_dim, v_copy + k * v_dim);
        for (int64_t d = c.v_dim; d < v_dim; ++d) v_copy[k * v_dim + d] = T(0);
      }
      return rows_at<plain<D>>{v_copy, v_dim};
    }
  }
  MH_INLINE rows_at<in_pairs> copied_pairs(rows_at<D> from, int64_t keys, int64_t stride, int64_t dims, int64_t back,
                                           T* to) {
    auto* const copy = reinterpret_cast<uint16_t*>(to);
    for (int64_t k = 0; k < keys; ++k) {
      for (int64_t d = 0; d < dims; d += 2 * w) {
        const word_vec x = words_of_row(from.from(k).base, stride, place_of_pair(d, dims, back));
        memcpy(copy + k * dims + d, &x, sizeof(x));
      }
    }
    return {copy, dims};
  }

  // Rows that are needed soon: of V while K is worked on, and of the next tile's K during the values. Each step asks for
  // the bytes of the other that it reads itself, one line every few cycles: sixteen at once would fill the buffers that
  // also bring lines from L2, and all would wait. Or its own bytes some rows on (kernel_call.asks_own), where rows are
  // not widened and there are registers to read them in few passes: with many a row comes again before its lines do.
  // Own rows are few enough for L1, and so are tiles of K and V in 16 bits (other_l1), where kernel_call.asks_l1. All
  // others are asked for into L2.
  enum class asks { nothing, other, other_l1, own };
  static constexpr bool widens = sizeof(typename D::storage) < sizeof(T);
  static constexpr bool may_ask_own = many_registers && !widens;
  struct soon {
    const char* base;
    int64_t stride;  // bytes
    MH_INLINE soon from(int64_t row, int64_t bytes = 0) const { return {base + row * stride + bytes, stride}; }
  };
  template <class E>
  static MH_INLINE soon as_soon(rows_at<E> rows) {
    constexpr int64_t size = sizeof(typename E::storage);
    return {reinterpret_cast<const char*>(rows.base), rows.stride * size};
  }
  template <asks For>
  static MH_INLINE void ask(const char* p) {
    __builtin_prefetch(p, 0, For == asks::other_l1 || For == asks::own ? 3 : 2);
  }

  // All lines of the i-th of those rows.
  static constexpr int64_t lines_elements = 64 / static_cast<int64_t>(sizeof(typename D::storage));
  template <asks For>
  struct asker {
    soon next;
    int64_t lines;
    MH_INLINE void operator()(int64_t i) const {
      for (int64_t l = 0; For != asks::nothing && l < lines; ++l) ask<For>(next.base + i * next.stride + l * 64);
    }
  };

  // Where heads lie side by side: so that a line, and a page, is read for all of them at about the same time. Each asks for its
  // own rows of the next turn.
  MH_INLINE bool take_turns() const { return c.turns && heads > 1; }

  // More rows take those of K and V in several passes, and 5 to 12 were 1.06 to 1.5 times as slow.
  MH_INLINE asks way_of_asking() const {
    if (c.copy_kv || !c.prefetch) return asks::nothing;
    if (may_ask_own && c.asks_own && rows <= most_rows) return asks::own;
    return widens && c.asks_l1 ? asks::other_l1 : asks::other;
  }
  template <asks For>
  struct constant {
    static constexpr asks value = For;
  };
  // Calls f with the way as a constant, one of those that D has.
  template <class F>
  static MH_INLINE void asking(asks way, F f) {
    if constexpr (may_ask_own) {
      if (way == asks::own) return f(constant<asks::own>{});
    }
    if constexpr (widens) {
      if (way == asks::other_l1) return f(constant<asks::other_l1>{});
    }
    if (way == asks::other) return f(constant<asks::other>{});
    f(constant<asks::nothing>{});
  }
  // Three rows take two passes over K and V, four take one.
  MH_INLINE bool adds_row() const { return c.adds_rows && heads == 1 && rows % most_rows == most_rows - 1; }
  // 16 rows and 8 KB: half and twice as much are slower.
  static MH_INLINE rows_at<D> further_on(rows_at<D> rows, int64_t dim) {
    return rows.from(max_of(16, 8192 / (dim * static_cast<int64_t>(sizeof(T)))));
  }

  // R rows from row r against the next K of `keys` keys; keys behind the last are the last again.
  template <int R, int K, asks For, class E>
  MH_INLINE void score_rows(int64_t r, rows_at<E> k, int64_t keys, T* s, soon next) {
    constexpr int64_t size = sizeof(typename E::storage);
    const typename E::storage* key[K];
#pragma GCC unroll 16
    for (int i = 0; i < K; ++i) key[i] = k.from(min_of(i, keys - 1)).base;
    const T* row[R];
#pragma GCC unroll 8
    for (int n = 0; n < R; ++n) row[n] = q_row[r + n];
    vec<T> acc[R * K];
#pragma GCC unroll 16
    for (int i = 0; i < R * K; ++i) acc[i] = vec<T>(T(0));
    int64_t d = 0;
    for (; d < k_pairs; d += 2 * w) {
#pragma GCC unroll 2
      for (int64_t b = 0; For != asks::nothing && b < 2 * w * size; b += 64) {
        if (2 * w * size < 64 && d * size % 64 != 0) break;
        const char* p = next.base + d * size + b;
#pragma GCC unroll 16
        for (int i = 0; i < K; ++i, p += next.stride) ask<For>(p);
      }
      if constexpr (K < R) {  // keys in registers
        vec<T> y[K][2];
#pragma GCC unroll 16
        for (int i = 0; i < K; ++i) E::widen_pair(key[i] + d, y[i][0], y[i][1]);
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
#pragma GCC unroll 8
          for (int n = 0; n < R; ++n) {
            const vec<T> x = held<T>(load(row[n] + d + half * w));
#pragma GCC unroll 16
            for (int i = 0; i < K; ++i) acc[n * K + i] = xsimd::fma(y[i][half], x, acc[n * K + i]);
          }
        }
      } else {  // rows
        vec<T> x[R][2];
#pragma GCC unroll 8
        for (int n = 0; n < R; ++n) {
          x[n][0] = load(row[n] + d);
          x[n][1] = load(row[n] + d + w);
        }
#pragma GCC unroll 16
        for (int i = 0; i < K; ++i) {
          vec<T> y0, y1;
          E::widen_pair(key[i] + d, y0, y1);
          if constexpr (R > 1) y0 = held<T>(y0), y1 = held<T>(y1);
#pragma GCC unroll 8
          for (int n = 0; n < R; ++n) acc[n * K + i] = xsimd::fma(y0, x[n][0], acc[n * K + i]);
#pragma GCC unroll 8
          for (int n = 0; n < R; ++n) acc[n * K + i] = xsimd::fma(y1, x[n][1], acc[n * K + i]);
        }
      }
    }
    for (; d < k_dim; d += w) {
#pragma GCC unroll 16
      for (int i = 0; For != asks::nothing && i < K; ++i) ask<For>(next.base + i * next.stride + d * size);
      const auto add = [&](int64_t q_dim, int64_t dim, auto kept) MH_INLINE_LAMBDA {
        vec<T> x[R];
#pragma GCC unroll 8
        for (int n = 0; n < R; ++n) x[n] = kept(load(row[n] + q_dim));
#pragma GCC unroll 16
        for (int i = 0; i < K; ++i) {
          const vec<T> y = kept(E::widen(key[i] + dim));
#pragma GCC unroll 8
          for (int n = 0; n < R; ++n) acc[n * K + i] = xsimd::fma(y, x[n], acc[n * K + i]);
        }
      };
      if (k_back == 0 || d + w < k_dim) {
        add(d, d, [](vec<T> x) MH_INLINE_LAMBDA { return x; });
      } else {
        using U = xsimd::batch<bits<T>, MH_ARCH>;
        const U bits_kept = U::load_aligned(k_kept);
        add(d - q_back, c.copy_kv ? d : d - k_back, [=](vec<T> x) MH_INLINE_LAMBDA {  // 0 times inf would be NaN
          return xsimd::bitwise_cast<T>(xsimd::bitwise_cast<bits<T>>(x) & bits_kept);
        });
      }
    }
    // sums_of takes whole vectors: fewer keys come several times over. A sum is added up as ever, and the compiler does once what
    // is the same.
    constexpr int of_row = dots / R;
    vec<T> all[dots];
#pragma GCC unroll 16
    for (int i = 0; i < dots; ++i) all[i] = acc[i / of_row * K + i % K];
    alignas(64) T sums[dots];
#pragma GCC unroll 16
    for (int i = 0; i < dots; i += static_cast<int>(w)) sums_of<T>(all + i).store_aligned(sums + i);
#pragma GCC unroll 8
    for (int n = 0; n < R; ++n) memcpy(s + (r + n) * width, sums + n * of_row, K * sizeof(T));
  }

  // By so much the last pair of vectors of K begins earlier in memory.
  MH_INLINE int64_t back_of_last_pair() const { return c.copy_kv ? 0 : k_back; }

  // There are as many keys as a block takes, and their rows are whole vectors; or they are not; or there are fewer.
  enum class keys_of_block { whole, all, some };
  // The same by pairs (decode_pairs.hpp), of a block of R rows as copy_pairs left them. Eight keys at a time: with 16 lines come
  // from too many rows at once (0.94 to 0.97, from L3 0.83 to 0.97), with 4 each waits for its own sum (0.85 to 1.0).
  template <int R, int K, keys_of_block Keys, asks For>
  MH_INLINE void score_pairs(int64_t r, rows_at<in_pairs> k, int64_t keys, T* s, soon next) {
    constexpr int some = min_of(K, 8), fours = (some + 3) / 4;
    constexpr bool whole = Keys == keys_of_block::whole, have_all = whole || Keys == keys_of_block::all;
    const int64_t stride = k.stride, last_back = whole ? 0 : back_of_last_pair();
    vec<T> acc[K];
#pragma GCC unroll 16
    for (int i = 0; i < K; ++i) acc[i] = vec<T>(T(0));
#pragma GCC unroll 2
    for (int first = 0; first < K; first += some) {
      // Few addresses, for which there are registers: of every fourth key. Not where there are less than K keys.
      const uint16_t *four[fours], *each[some];
#pragma GCC unroll 2
      for (int i = 0; i < fours; ++i) four[i] = k.from(first + 4 * i).base;
#pragma GCC unroll 8
      for (int i = 0; i < some; ++i) each[i] = k.from(have_all ? 0 : min_of(first + i, keys - 1)).base;
      const auto key = [&](int i) MH_INLINE_LAMBDA { return have_all ? four[i / 4] + i % 4 * stride : each[i]; };
      const uint32_t* of_q = reinterpret_cast<const uint32_t*>(q) + r * (k_dim / 2);
      soon asked = next.from(first);
      for (int64_t d = 0, end = k_dim - (last_back > 0 ? 2 * w : 0);; end = k_dim) {
        do {
#pragma GCC unroll 8
          for (int n = 0; n < R; ++n, of_q += w) {
            if constexpr (For != asks::nothing) {  // an R-th of the lines
#pragma GCC unroll 8
              for (int i = 0; i < some; ++i) {
                if ((2 * w * 2 >= 64 || d * 2 % 64 == 0) && i * R / some == n) ask<For>(asked.base + i * asked.stride);
              }
            }
            const word_vec x = word_vec::load_aligned(of_q);
#pragma GCC unroll 8
            for (int i = 0; i < some; ++i) {
              acc[first + i] = add_products(acc[first + i], repeat_pairs<R>(key(i) + n * (2 * w / R)), x);
            }
          }
#pragma GCC unroll 2
          for (const uint16_t*& p : four) p += 2 * w;
#pragma GCC unroll 8
          for (const uint16_t*& p : each) p += 2 * w;
          asked.base += 4 * w;
          d += 2 * w;
        } while (d < end);
        if (whole || end == k_dim) break;
#pragma GCC unroll 2
        for (const uint16_t*& p : four) p -= last_back;
#pragma GCC unroll 8
        for (const uint16_t*& p : each) p -= last_back;
      }
    }
    vec<T> all[w];  // fewer keys come several times over
#pragma GCC unroll 16
    for (int i = 0; i < w; ++i) all[i] = acc[i % K];
    put_sums<R>(all, vec<T>(static_cast<T>(c.q_scale)), s + r * width, width);
  }

  // The last `keys` keys, up to K of them.
  template <int R, int K, asks For, class E>
  MH_INLINE void score_last(int64_t r, int64_t row_end, rows_at<E> k, int64_t keys, T* s, soon next) {
    if constexpr (K > 4) {
      if (keys <= K / 2) return score_last<R, K / 2, For>(r, row_end, k, keys, s, next);
    }
    for (; r < row_end; r += R) score_block<R, K, keys_of_block::some, For>(r, k, keys, s, next);
  }
  template <int R, int K, keys_of_block Keys, asks For, class E>
  MH_INLINE void score_block(int64_t r, rows_at<E> k, int64_t keys, T* s, soon next) {
    if constexpr (paired<E>) {
      score_pairs<R, K, Keys, For>(r, k, keys, s, next);
    } else {
      score_rows<R, K, For>(r, k, keys, s, next);
    }
  }

  // Rows r .. end against `keys` keys, R rows at a time as long as there are so many, then fewer.
  template <int R, asks For, class E>
  MH_INLINE void score_all(int64_t r, int64_t end, rows_at<E> k, int64_t keys, T* s, soon next) {
    const int64_t row_end = r + round_down<R>(end - r);
    if (r < row_end) {
      constexpr int K = paired<E> ? static_cast<int>(w) : dots / R;
      int64_t i = 0;
      const auto score_whole_blocks = [&]<keys_of_block Keys>() MH_INLINE_LAMBDA {
        for (; i + K <= keys; i += K) {
          for (int64_t n = r; n < row_end; n += R) score_block<R, K, Keys, For>(n, k.from(i), K, s + i, next.from(i));
        }
      };
      if (!paired<E> || back_of_last_pair() == 0) {
        score_whole_blocks.template operator()<keys_of_block::whole>();
      } else if constexpr (paired<E>) {
        score_whole_blocks.template operator()<keys_of_block::all>();
      }
      if (i < keys) score_last<R, K, For>(r, row_end, k.from(i), keys - i, s + i, next.from(i));
    }
    if constexpr (R > 1) {
      if (row_end < end) score_all<R / 2, For>(row_end, end, k, keys, s, next);
    }
  }

  template <asks For, class E>
  __attribute__((noinline)) void score(int64_t h, int64_t first, rows_at<E> k, int64_t keys, soon next) {
    score_all<paired<E> ? most_rows_of_pairs : most_rows, For>(h * padded_rows, (h + 1) * padded_rows, k, keys,
                                                               scores + first, next);
  }

  // What of a tile's sums some keys are: whether keys before them are in them, whether these are the last, and then whether they
  // are added to what other tiles gave. In this way sums have the same bits however many keys are worked on at once.
  struct part {
    bool goes_on, ends, begun;
  };

  // O[row .. row + R)[dims d ..] += P V for some keys, of N pairs of vectors and, where S is 1, one (by pairs
  // a pair) that may begin earlier.
  template <bool Careful, int R, int N, int S, asks For, class E>
  MH_INLINE void add_values(rows_at<E> v, int64_t keys, int64_t first_row, const T* p, int64_t d, part of, soon next) {
    constexpr int V = paired<E> ? 2 * (N + S) : 2 * N + S;
    const int64_t single = place_of(d + 2 * N * w, v_dim, v_back);
    const auto place = [=](int n) MH_INLINE_LAMBDA { return n < 2 * N ? d + n * w : single; };
    constexpr int64_t bytes = V * w * static_cast<int64_t>(sizeof(typename E::storage));
    vec<T> acc[R][V];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
      for (int n = 0; n < V; ++n) {
        acc[r][n] = of.goes_on ? vec<T>::load_aligned(unfinished + (first_row + r) * v_dim + d + n * w) : vec<T>(T(0));
      }
    }
    if constexpr (paired<E>) {
      constexpr int64_t whole = 2 * N * w;
      const int64_t last = c.copy_kv ? whole : place_of_pair(d + whole, v_dim, v_back) - d;
      for (int64_t k = 0; k < keys; k += 2) {
        const soon asked = next.from(k);
        word_vec weight[R];
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) weight[r] = word_vec(word_of(p + r * width + k / 2));
        const uint16_t *const row = v.from(k).base + d, *const other = v.from(min_of(k + 1, keys - 1)).base + d;
#pragma GCC unroll 8
        for (int n = 0; n < N + S; ++n) {
          const int64_t at_dim = n < N ? n * 2 * w : last;
          if constexpr (For != asks::nothing) {
            ask<For>(asked.base + n * 4 * w);
            ask<For>(asked.base + asked.stride + n * 4 * w);
          }
          word_vec even, odd;
          join_rows(load_words(row + at_dim), load_words(other + at_dim), even, odd);
#pragma GCC unroll 8
          for (int r = 0; r < R; ++r) {
            acc[r][2 * n] = add_products(acc[r][2 * n], even, weight[r]);
            acc[r][2 * n + 1] = add_products(acc[r][2 * n + 1], odd, weight[r]);
          }
        }
      }
    } else {
      for (int64_t k = 0; k < keys; ++k) {
#pragma GCC unroll 8
        for (int64_t b = 0; For != asks::nothing && b < bytes; b += 64) ask<For>(next.base + k * next.stride + b);
        T weight[R];
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) weight[r] = p[r * width + k];
        const auto add = [&](int n, vec<T> x) MH_INLINE_LAMBDA {
          if constexpr (R > 1) x = held<T>(x);
#pragma GCC unroll 8
          for (int r = 0; r < R; ++r) {
            if constexpr (Careful) {
              if (__builtin_signbit(weight[r])) continue;  // a slot that may not be attended: no 0 * NaN
            }
            acc[r][n] = xsimd::fma(vec<T>(weight[r]), x, acc[r][n]);
          }
        };
        const typename E::storage* const row = v.from(k).base;
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) {
          vec<T> a, b;
          E::widen_pair(row + d + n * 2 * w, a, b);
          add(2 * n, a);
          add(2 * n + 1, b);
        }
        if constexpr (S == 1) add(2 * N, E::widen(row + single));
      }
    }
    if (!widens && direct) {
      finite_check<T> finite;
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
        for (int n = 0; n < V; ++n) {
          const vec<T> x = acc[r][n] * vec<T>(factors[first_row + r]);
          finite.see(x);
          store<T>(places[first_row + r] + place(n), x);
        }
      }
      zeros = zeros + finite.sum();
      return;
    }
    T* const to = (of.ends ? out : unfinished) + first_row * v_dim + d;
    const bool adds = of.ends && of.begun;
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
      for (int n = 0; n < V; ++n) {
        T* at_row = to + r * v_dim + n * w;
        (adds ? vec<T>::load_aligned(at_row) + acc[r][n] : acc[r][n]).store_aligned(at_row);
      }
    }
  }

  // All dims of R rows.
  template <bool Careful, int R, asks For, class E>
  MH_INLINE void add_rows(int64_t r, int64_t first, rows_at<E> v, int64_t keys, part of, soon next) {
    constexpr int N = pairs_of<R>;
    constexpr int64_t step = 2 * N * w;
    constexpr int64_t size = sizeof(typename E::storage);
    const T* p = scores + r * width + (paired<E> ? first / 2 : first);
    int64_t d = 0;
    const auto add = [&]<int Pairs, int Single>() MH_INLINE_LAMBDA {
      add_values<Careful, R, Pairs, Single, For>(v, keys, r, p, d, of, next.from(0, d * size));
      d += (2 * Pairs + (paired<E> ? 2 : 1) * Single) * w;
    };
    // Up to two rows, of few vectors: in one pass what would else be two, in which each waits for its own sums. Three
    // pairs with a single vector stay two passes, four with one of 16 lanes, too (heads of 112 and 144): each adds 2 % to the
    // library's code.
    if constexpr (R <= 2 && !Careful) {
      if (v_dim - v_pairs == (paired<E> ? 2 * w : w)) {
        if (v_pairs == 2 * w) return add.template operator()<1, 1>();
        if (v_pairs == 4 * w) return add.template operator()<2, 1>();
        if constexpr (N >= 4 && paired<E>) {
          if (v_pairs == 6 * w) return add.template operator()<3, 1>();
        }
        if constexpr (N >= 4 && w < 16 && !paired<E>) {
          if (v_pairs == 8 * w) return add.template operator()<4, 1>();
        }
      }
    }
    if constexpr (N > 3 && !Careful) {
      if (v_pairs == 6 * w) add.template operator()<3, 0>();
    }
    while (d + step <= v_pairs) add.template operator()<N, 0>();
    if constexpr (N > 2) {
      while (d + 4 * w <= v_pairs) add.template operator()<2, 0>();
    }
    if constexpr (N > 1) {
      while (d + 2 * w <= v_pairs) add.template operator()<1, 0>();
    }
    while (d < v_dim) add.template operator()<0, 1>();
  }

  template <bool Careful, int R, asks For, class E>
  MH_INLINE void add_all_rows(int64_t r, int64_t end, int64_t first, rows_at<E> v, int64_t keys, part of, soon next) {
    if constexpr (For == asks::own && R == most_rows) {
      // Where half the rows take whole rows of V: it then comes from memory in one piece, not in two.
      if (v_pairs / (2 * w * pairs_of<R / 2>) == 1)
        return add_all_rows<Careful, R / 2, For>(r, end, first, v, keys, of, next);
    }
    const int64_t row_end = r + round_down<R>(end - r);
    for (int64_t n = r; n < row_end; n += R) add_rows<Careful, R, For>(n, first, v, keys, of, next);
    if constexpr (R > 1) {
      if (row_end < end) add_all_rows<Careful, R / 2, For>(row_end, end, first, v, keys, of, next);
    }
  }

  // A tile's keys from `first` on. With more rows than one pass takes, a few of them at a time, each few a sum of their own, so
  // that their rows of V stay in L1 for the next pass.
  template <bool Careful, asks For, class E>
  __attribute__((noinline)) void add_all(int64_t h, int64_t first, rows_at<E> v, int64_t keys, bool last, soon next) {
    const bool one_pass = rows <= most_rows;
    const int64_t step = one_pass ? keys : keys_at_once;
    for (int64_t i = 0; i < keys; i += step) {
      const bool begins = first + i == 0;
      add_all_rows<Careful, most_rows, For>(
          h * padded_rows, (h + 1) * padded_rows, first + i, v.from(i), min_of(step, keys - i),
          one_pass ? part{!begins, last, started[h]} : part{false, true, started[h] || !begins}, next.from(i));
    }
    started[h] = started[h] || last;
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
  MH_INLINE void weigh_rows(int64_t r, int64_t padded_keys, T careful_factor) {
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
          p[n] = xsimd::select(closed, vec<T>(T(-0.0)), p[n] * vec<T>(careful_factor));
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
      if (before > lowest<T>) {  // else there is no sum and no value yet
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
  MH_INLINE void weigh_all(int64_t r, int64_t padded_keys, T careful_factor) {
    for (; r + R <= heads * padded_rows; r += R) weigh_rows<Careful, R>(r, padded_keys, careful_factor);
    if constexpr (R > 1) weigh_all<Careful, R / 2>(r, padded_keys, careful_factor);
  }

  // Every eighth tile is timed, for itself and those up to the next one: a tile can be half a microsecond.
  MH_INLINE phase_clock* clock_of(int64_t tile, int64_t tiles_left) const {
    constexpr int64_t timed = 8;
    if (__builtin_expect(task.clock == nullptr || tile % timed != 0, 1)) return nullptr;
    resume_clock(*task.clock, min_of(timed, tiles_left));
    return task.clock;
  }

  // A tile of keys, of whichever head.
  struct key_tile {
    int64_t begin, end;
    bool all_visible;  // as far as positions go, and there are no masks
    MH_INLINE int64_t keys() const { return end - begin; }
  };

  MH_INLINE bits<T>* words_of(int64_t h) const { return words + h * words_of_head(padded_rows); }

  // Which of a tile's keys head h sees. Where none, its scores say so.
  MH_INLINE visibility see_head(int64_t h, const key_tile& tile) {
    if (tile.all_visible) return visibility::all;
    const visibility see = see_tile<T>(c, at, task.batch, kv_head + h, task.row_begin, rows, round_up<w>(rows),
                                       tile.begin, tile.end, words_of(h));
    if (see != visibility::none) return see;
    const int64_t padded = round_up<w>(tile.keys());
    T* const s = scores + h * padded_rows * width;
    for (int64_t r = 0; r < padded_rows; ++r) {
      for (int64_t k = 0; k < padded; k += w) vec<T>(-infinity<T>).store_aligned(s + r * width + k);
    }
    return see;
  }

  // Head h's products with `keys` of a tile's keys, from its key `first` on.
  template <class E>
  MH_INLINE void score_head(int64_t h, const key_tile& tile, int64_t first, int64_t keys) {
    const int64_t begin = tile.begin + first;
    const rows_at<D> k = in_place(c.k, c.k_strides, task.batch, kv_head + h, begin);
    if (c.copy_kv) {
      score<asks::nothing>(h, first, copied_k<E>(k, keys), keys, soon{});
      return;
    }
    asking(way_of_asking(), [&](auto way) MH_INLINE_LAMBDA {
      constexpr asks For = decltype(way)::value;
      const rows_at<D> next = take_turns()       ? k.from(turn_keys)
                              : For == asks::own ? further_on(k, k_dim)
                                                 : in_place(c.v, c.v_strides, task.batch, kv_head + h, begin);
      score<For>(h, first, rows_at<E>{k.base, k.stride}, keys, as_soon(next));
    });
  }

  // What else is done to scores s of head h before the softmax takes them.
  MH_INLINE void change_scores(int64_t h, const key_tile& tile, visibility see, T* s) {
    const int64_t padded = round_up<w>(tile.keys());
    if (has_score_passes(c)) change_scores_of(kv_head + h, tile, s, padded);
    if (see == visibility::some) visibility_pass_rows<T>(words_of(h), round_up<w>(rows), rows, padded, width, s);
  }

  __attribute__((noinline)) void change_scores_of(int64_t head, const key_tile& tile, T* s, int64_t padded) {
    if (c.softcap > 0) {
      for (int64_t r = 0; r < rows; ++r) softcap_pass<T>(c, s + r * width, padded);
    }
    const tile_at t{task.batch, head, task.row_begin, rows, tile.begin, tile.end};
    if (c.alibi_slopes != nullptr) alibi_pass_rows<T>(c, at, t, width, s);
    if (c.bias != nullptr) bias_pass_rows<T>(c, t, width, s);
  }

  // The rows of K that head h reads after a tile: of the next tile, or of the head in its place of the next task.
  MH_INLINE rows_at<D> following_k(int64_t h, const key_tile& tile, int64_t end) const {
    if (tile.end < end) return in_place(c.k, c.k_strides, task.batch, kv_head + h, tile.end);
    const kernel_task& next = *task.next;
    return in_place(c.k, c.k_strides, next.batch, min_of(next.kv_head_begin + h, next.kv_head_end - 1),
                    first_key(positions_of(c, next.batch), next));
  }

  // O of head h += P V for `keys` of a tile's keys, from its key `first` on, with more tiles to come up to `end`.
  template <bool Careful, class E>
  MH_INLINE void add_head(int64_t h, const key_tile& tile, int64_t first, int64_t keys, int64_t end) {
    const rows_at<D> v = in_place(c.v, c.v_strides, task.batch, kv_head + h, tile.begin + first);
    const bool last = first + keys == tile.keys();
    asks way = Careful ? asks::nothing : way_of_asking();
    if (way != asks::own && tile.end >= end && task.next == nullptr) way = asks::nothing;
    if (c.copy_kv) {
      add_all<Careful, asks::nothing>(h, first, copied_v<E>(v, keys), keys, last, soon{});
    } else if constexpr (Careful) {
      add_all<Careful, asks::nothing>(h, first, v, keys, last, soon{});
    } else {
      asking(way, [&](auto as) MH_INLINE_LAMBDA {
        constexpr asks For = decltype(as)::value;
        const rows_at<E> rows_of_v{v.base, v.stride};
        if constexpr (For == asks::nothing) return add_all<Careful, For>(h, first, rows_of_v, keys, last, soon{});
        const rows_at<D> next = take_turns()       ? v.from(turn_keys)
                                : For == asks::own ? further_on(v, v_dim)
                                                   : following_k(h, tile, end);
        add_all<Careful, For>(h, first, rows_of_v, keys, last, as_soon(next));
      });
    }
  }

  // Whether results go to their place at once: all keys are here, and all rows have some.
  MH_INLINE bool ends_here(int64_t keys, const visibility* see) const {
    if (widens || c.copy_kv || c.chunks > 1 || c.out_strides[3] != 1 || padded_rows != rows || take_turns())
      return false;
    if (rows > most_rows && keys > keys_at_once) return false;
    for (int64_t h = 0; h < heads; ++h) {
      if (see[h] == visibility::none) return false;
    }
    return true;
  }

  // What row r is multiplied with. Its state and lse are written.
  MH_INLINE T end_row(int64_t r, int64_t head, int64_t query, double undo) const {
    const T sum = xsimd::reduce_add(load(row_sums + r * w));
    if (ends_count(c)) {
      const T total = on_unit ? xsimd::reduce_add(load(row_totals + r * w)) : sum;
      const row_end e = finish_row<T>(row_max[r], total, c.exp_scale, sink_of<T>(c, head, task.chunk));
      write_state<T>(c, task.batch, head, query, task.chunk, e);
      const double rounding = total == sum ? 1.0 : static_cast<double>(total) / static_cast<double>(sum);
      if (c.sinks != nullptr) return static_cast<T>(e.factor * undo * rounding);
    }
    return sum == T(0) ? T(0) : static_cast<T>(undo) / sum;
  }

  __attribute__((noinline)) void end_rows_here() {
    const int64_t count = heads, rows_of_head = rows;
    for (int64_t h = 0, r = 0; h < count; ++h) {
      row_walk<char> to = rows_of_results<D>(c, task, kv_head + h, task.row_begin);
      for (int64_t i = 0; i < rows_of_head; ++i, ++r, to.step(c)) {
        places[r] = reinterpret_cast<T*>(to.at);
        factors[r] = end_row(r, (kv_head + h) * c.group + to.of.member, to.of.query, 1.0);
      }
    }
  }

  // Head after head in each step of a tile, so that one need not wait for what the step before made of the last. Where they
  // take turns, products of a few keys are a step.
  template <bool Careful, class E>
  __attribute__((noinline)) void attend_all() {
    const T careful_factor = Careful ? static_cast<T>(::exp2(-careful_shift(c.kv_len))) : T(1);
    over_tiles([&](const key_tile& t, int64_t begin, int64_t end, phase_clock* clock) MH_INLINE_LAMBDA {
      visibility see[most_rows_at_once];
      bool any = false, all = true;
      for (int64_t h = 0; h < heads; ++h) {
        see[h] = see_head(h, t);
        any = any || see[h] != visibility::none;
        all = all && see[h] == visibility::all;
      }
      if (!t.all_visible) lap(clock, phase_mask);
      if (!any) return;
      const int64_t keys = t.keys(), padded = round_up<paired<E> ? 2 * w : w>(keys);
      const int64_t of_k = take_turns() ? turn_keys : keys, of_v = take_turns() ? keys_at_once : keys;
      for (int64_t first = 0; first < keys; first += of_k) {
        for (int64_t h = 0; h < heads; ++h) {
          if (see[h] != visibility::none) score_head<E>(h, t, first, min_of(of_k, keys - first));
        }
      }
      lap(clock, phase_scores);
      if (!all || has_score_passes(c)) {
        for (int64_t h = 0; h < heads; ++h) {
          if (see[h] != visibility::none) change_scores(h, t, see[h], scores + h * padded_rows * width);
        }
        lap(clock, phase_mask);
      }
      if (keys < padded) close_slots(heads * padded_rows, keys, padded);
      if constexpr (paired<E>) {
        weigh_for_unit<most_rows>(0, heads * padded_rows, scores, padded, reinterpret_cast<uint32_t*>(scores), width);
      } else {
        weigh_all<Careful, min_of(most_rows, exp2_vectors)>(0, padded, careful_factor);
      }
      lap(clock, phase_softmax);
      if constexpr (!Careful) direct = t.begin == begin && t.end == end && ends_here(keys, see);
      if (direct) end_rows_here();
      for (int64_t first = 0; first < keys; first += of_v) {
        for (int64_t h = 0; h < heads; ++h) {
          zeros = vec<T>(T(0));
          if (see[h] != visibility::none) add_head<Careful, E>(h, t, first, min_of(of_v, keys - first), end);
          if (direct) is_finite[h] = finite_check<T>::passed(zeros);
        }
      }
      lap(clock, phase_values);
    });
  }

  // How far ahead of need lines are asked for here, each with those in its place now: on an Intel Xeon (AMX) with heads of
  // 64 and 128, from L3 and memory, one thread and two, 8 rows 0.86 to 1.0 of it, 12 rows 0.9 to 0.99, 16 rows 0.93 to 1.02,
  // 24 rows 0.91 to 0.98, the next 32 keys 0.83 to 0.98, and 40 rows 0.9 to 1.0.
  static constexpr int64_t unit_rows_ahead = 20;

  // All heads in turn against 32 keys at a time. What the unit has made is loaded after something else has been done: V is
  // brought into its order between its scores and the softmax.
  __attribute__((noinline)) void attend_on_unit() {
    const step_unit_of<D> told(unit.of.size);
    over_tiles([&](const key_tile& t, int64_t, int64_t, phase_clock* clock) MH_INLINE_LAMBDA {
      const int64_t keys = t.keys();
      for (int64_t h = 0; h < heads; ++h) {
        const visibility see = see_head(h, t);
        if (!t.all_visible) lap(clock, phase_mask);
        if (see == visibility::none) continue;
        const rows_at<D> k = in_place(c.k, c.k_strides, task.batch, kv_head + h, t.begin);
        const rows_at<D> v = in_place(c.v, c.v_strides, task.batch, kv_head + h, t.begin);
        asking(way_of_asking(), [&](auto way) MH_INLINE_LAMBDA {
          constexpr asks For = decltype(way)::value;
          const asker<For> ask_k{as_soon(k.from(unit_rows_ahead)), c.head_dim / lines_elements};
          const asker<For> ask_v{as_soon(v.from(unit_rows_ahead)), c.v_dim / lines_elements};
          unit.multiply_k(h, k.base, keys, ask_k);
          unit.pack_v(v.base, keys, ask_v);
          lap(clock, phase_scores);
          unit.put_scores(keys, scores, width);
          if (see == visibility::some || has_score_passes(c)) {
            change_scores(h, t, see, scores);
            lap(clock, phase_mask);
          }
          if (keys < width) close_slots(padded_rows, keys, width);
          weigh_for_unit<most_rows>(h * padded_rows, padded_rows, scores, width, unit.weights, w);
          lap(clock, phase_softmax);
          unit.multiply_v(out + h * padded_rows * v_dim, started[h], ask_v);
          lap(clock, phase_values);
        });
        started[h] = true;
      }
    });
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

  // Calls f(tile, begin, end, clock) for each tile of the task's keys [begin, end).
  template <class F>
  MH_INLINE void over_tiles(F f) {
    const int64_t all_rows = heads * padded_rows;
    direct = false;
    for (int64_t r = 0; r < all_rows; ++r) {
      vec<T>(T(0)).store_aligned(row_sums + r * w);
      if (on_unit) vec<T>(T(0)).store_aligned(row_totals + r * w);
      row_max[r] = lowest<T>;
    }
    for (int64_t h = 0; h < heads; ++h) started[h] = false;
    const key_range of_first = range_of(c, at, task.row_begin / c.group);
    const key_range of_last = range_of(c, at, (task.row_end - 1) / c.group);
    const int64_t begin = first_key(at, task);
    const int64_t end = end_of_keys();
    int64_t tile = 0;
    for (int64_t b = begin / c.block_kv * c.block_kv; b < end; b += c.block_kv) {
      phase_clock* const clock = clock_of(tile++, (end - b + c.block_kv - 1) / c.block_kv);
      key_tile t{max_of(b, begin), min_of(b + c.block_kv, end), false};
      if (t.keys() <= 0) continue;  // a window that begins behind the last key
      t.all_visible = c.mask == nullptr && c.key_mask == nullptr && t.begin >= of_last.begin && t.end <= of_first.end;
      f(t, begin, end, clock);
    }
    for (int64_t h = 0; h < heads; ++h) {
      if (!started[h]) memset(out + h * padded_rows * v_dim, 0, static_cast<size_t>(rows * v_dim) * sizeof(T));
    }
    if (task.clock != nullptr) resume_clock(*task.clock, 1);
  }

  // Divides and stores the rows of head h. False: something is not finite.
  bool finish(int64_t h, bool careful) {
    finite_check<T> finite;
    const double undo = careful ? ::exp2(careful_shift(c.kv_len)) : 1.0;
    // Stores of vectors may change members, for all that a compiler knows.
    const int64_t dims = v_dim, back = v_back, pairs = on_unit ? v_dim : D::pairs_apart && !c.copy_kv ? v_pairs : 0;
    const bool partial = c.chunks > 1, in_vectors = back == dims - c.v_dim && (partial || c.out_strides[3] == 1);
    row_walk<char> to = rows_of_results<D>(c, task, kv_head + h, task.row_begin);
    for (int64_t r = h * padded_rows; r < h * padded_rows + rows; ++r, to.step(c)) {
      const vec<T> times(end_row(r, (kv_head + h) * c.group + to.of.member, to.of.query, undo));
      const T* const values = out + r * dims;
      void* const row = to.at;
      const auto value = [&](int64_t d) MH_INLINE_LAMBDA {
        const vec<T> x = vec<T>::load_aligned(values + d) * times;
        finite.see(x);
        return x;
      };
      const auto write = [&](int64_t d, vec<T> x) MH_INLINE_LAMBDA {
        if (!in_vectors) return write_values<D>(c, row, d, min_of(w, c.v_dim - d), x);
        if (partial) return store<T>(static_cast<T*>(row) + d, x);
        D::narrow(x, static_cast<typename D::storage*>(row) + d);
      };
      int64_t d = 0;
      if constexpr (D::pairs_apart || has_unit) {
        for (; d < pairs; d += 2 * w) {
          vec<T> even = value(d), odd = value(d + w);
          const int64_t at_dim = place_of_pair(d, dims, back);
          if (in_vectors && !partial) {
            const word_vec both = D::narrow(even) | (D::narrow(odd) << 16);
            memcpy(static_cast<typename D::storage*>(row) + at_dim, &both, sizeof(both));
          } else {
            interleave<T>(even, odd);
            write(at_dim, even);
            write(at_dim + w, odd);
          }
        }
      }
      for (; d < dims; d += w) write(place_of(d, dims, back), value(d));
    }
    return finite.passed();
  }

  // Whether the unit could do head h: as for a panel of the matrix route (matrix.hpp: run), results that are all tiny, and rows
  // without a weight that see a key, may owe that to it.
  MH_INLINE bool suits_unit(int64_t h) const {
    if (!is_usual[h]) return false;
    if (!started[h]) return true;
    const auto total = [&](int64_t i)
                           MH_INLINE_LAMBDA { return xsimd::reduce_add(load(row_totals + (h * padded_rows + i) * w)); };
    bool some = false, empty = false;
    for (int64_t i = 0; i < rows; ++i) {
      const T sum = total(i);
      empty = empty || sum == T(0);
      if (!(sum >= T(0))) return false;  // NaN, of which rounding may have made 0
      for (int64_t d = 0; d < v_dim && !some; d += w) {
        some = xsimd::any(xsimd::abs(load(out + (h * padded_rows + i) * v_dim + d)) > vec<T>(T(0x1p-100)));
      }
    }
    if (!some || !empty) return some;
    const tile_at all{task.batch, kv_head + h, task.row_begin, rows, first_key(at, task), end_of_keys()};
    return !any_sees<T>(c, at, all, [&](int64_t i) { return total(i) == T(0); });
  }

  void run() {
    start();
    lap(task.clock, phase_pack);
    if constexpr (has_tiles) {
      if (on_unit) attend_on_unit();
    }
    if constexpr (has_pairs) {
      if (on_unit) attend_all<false, in_pairs>();
    }
    if (!on_unit) attend_all<false, D>();
    bool all_finite = true;
    for (int64_t h = 0; h < heads; ++h) {
      if (!direct) is_finite[h] = finish(h, false);
      if (on_unit) is_finite[h] = is_finite[h] && suits_unit(h);
      all_finite = all_finite && is_finite[h];
    }
    lap(task.clock, phase_store);
    if (all_finite) return;
    if (on_unit) {
      on_unit = false;
      padded_rows = rows;
      measure_rows(false);
      copy_rows();
      lap(task.clock, phase_pack);
    }
    // See tile_task::run. Alone: what its neighbours get must not depend on it.
    const int64_t count = heads;
    heads = 1;
    for (int64_t h = 0; h < count; ++h) {
      if (is_finite[h]) continue;
      kv_head = task.kv_head_begin + h;
      q_row = q_rows + h * padded_rows;
      attend_all<true, D>();
      finish(0, true);
      lap(task.clock, phase_store);
    }
  }
};

template <class D>
void attention_decode(const kernel_call* c, const kernel_task* t) {
  decode_task<D>(*c, *t).run();
}

}  // namespace
}  // namespace manyhead::MH_ISA
