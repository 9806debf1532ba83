// O += P V of the decode route (decode.hpp) for some rows and keys of a tile.
#pragma once

#include "decode_scores.hpp"

namespace manyhead::MH_ISA {
namespace {

template <class D>
struct step_values : step_scores<D> {
  using base = step_scores<D>;
  using base::base;
  using base::c, base::has_pairs, base::keys_at_once, base::in_order, base::many_registers, base::most_rows,
      base::most_rows_of_pairs, base::padded_rows, base::place_of, base::place_of_pair, base::rows, base::scores,
      base::v_back, base::v_dim, base::v_pairs, base::w, base::widens, base::width;
  using typename base::T;

  // Register budget: R rows x pairs of vectors of accumulators, R weights, a pair: of 32 registers 16 + 4 + 2, of 16 8 + 4 + 2,
  // with a single vector, too, for two rows 18 + 2 + 2 and 10 + 2 + 2. One row: as many as hide the latency of a sum. Eight by pairs
  // 16 + 8 + 2: two rows of V are joined once for all.
  template <int R>
  static constexpr int pairs_of = max_of(1, min_of(4, (many_registers ? 8 : 4) / R));

  T* out;                           // [heads * padded_rows][v_dim]
  T* unfinished;                    // the same: where heads take turns, or rows are left out, a tile's sums so far
  bool started[most_rows_at_once];  // of a head: out holds something
  // Whether results go from the registers to their place, as all keys are in one tile; where to, and times what.
  bool direct;
  T* places[most_rows_at_once];
  T factors[most_rows_at_once];
  vec<T> zeros;  // finite_check::sum of what was written of a head

  MH_INLINE void carve(carver& from, int64_t head_count, int64_t head_rows) {
    base::carve(from, head_count, head_rows);
    out = from.take<T>(head_count * head_rows * v_dim);
    unfinished = from.take<T>(c.k_turn > 0 || (has_pairs && c.unit_steps) ? head_count * head_rows * v_dim : 0);
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
      // Few registers for addresses, and additions alone: else g++ 12 keeps them on the stack and in vectors.
      const uint16_t* row = v.base + d;
      const T* at = p;
      soon asked = next;
      for (int64_t k = 0; k < keys; k += 2, row += 2 * v.stride, ++at, asked = asked.from(2)) {
        const T* const at_fourth = at + 4 * width;
        word_vec weight[R];
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) weight[r] = word_vec(word_of((r < 4 ? at : at_fourth) + r % 4 * width));
        const uint16_t* const other = row + (k + 1 < keys ? v.stride : 0);
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
          const vec<T> x = result_of<T>(acc[r][n], vec<T>(factors[first_row + r]));
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
      constexpr int64_t dims = (2 * Pairs + (paired<E> ? 2 : 1) * Single) * w;
      // In the order of memory as many bytes of it.
      const soon asked = in_order ? soon{next.base + keys * d * size, dims * size} : next.from(0, d * size);
      add_values<Careful, R, Pairs, Single, For>(v, keys, r, p, d, of, asked);
      d += dims;
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
    if constexpr ((For == asks::own || (paired<E> && For != asks::nothing)) && R == most_rows) {
      // Where half the rows take whole rows of V: it then comes from memory in one piece, not in two.
      if (c.whole_v_rows && v_pairs / (2 * w * pairs_of<R / 2>) == 1)
        return add_all_rows<Careful, R / 2, For>(r, end, first, v, keys, of, next);
    }
    const int64_t row_end = r + round_down<R>(end - r);
    for (int64_t n = r; n < row_end; n += R) add_rows<Careful, R, For>(n, first, v, keys, of, next);
    if constexpr (R > 1) {
      if (row_end < end) add_all_rows<Careful, R / 2, For>(row_end, end, first, v, keys, of, next);
    }
  }

  // A tile's keys from `first` on. With more than four rows, which mostly take several passes, a few of them at a time, each few a
  // sum of their own, so that their rows of V stay in L1 for the next pass. In one pass by pairs too, for the same bits whatever
  // way a head takes. A sum may take several turns.
  template <bool Careful, asks For, class E>
  __attribute__((noinline)) void add_all(int64_t h, int64_t first, rows_at<E> v, int64_t keys, bool last, soon next) {
    const bool one_pass = rows <= most_rows;
    const int64_t step = one_pass ? keys : keys_at_once;
    for (int64_t i = 0; i < keys; i += step) {
      const int64_t at = first + i, count = min_of(step, keys - i);
      const bool begins = at == 0, goes_on = at % keys_at_once != 0;
      const bool ends = (at + count) % keys_at_once == 0 || (last && i + count == keys);
      add_all_rows<Careful, paired<E> ? most_rows_of_pairs : most_rows, For>(
          h * padded_rows, (h + 1) * padded_rows, at, v.from(i), count,
          one_pass ? part{!begins, last, started[h]} : part{goes_on, ends, started[h] || at >= keys_at_once},
          next.from(i));
    }
    started[h] = started[h] || last;
  }
};

}  // namespace
}  // namespace manyhead::MH_ISA
