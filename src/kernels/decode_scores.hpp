// S[row][key] of the decode route (decode.hpp) for some rows and keys of a tile.
#pragma once

#include "decode_rows.hpp"

namespace manyhead::MH_ISA {
namespace {

template <class D>
struct step_scores : step_rows<D> {
  using base = step_rows<D>;
  using base::base;
  using base::c, base::has_pairs, base::in_order, base::k_back, base::k_dim, base::k_kept, base::k_pairs,
      base::many_registers, base::most_rows, base::most_rows_of_pairs, base::padded_rows, base::q, base::q_back,
      base::q_row, base::w;
  using typename base::T;

  // Register budget: R rows x dots / R keys of accumulators, a pair of vectors of each row (R <= keys) or of each key (else), a
  // pair or one of the other: of 32 registers 16 + 8 + 2 for 4 rows, of 16 8 + 4 + 1.
  static constexpr int dots = many_registers ? 16 : 8;
  static constexpr int least_block = 4;  // keys, for which fewer are computed as if they were so many

  int64_t width;  // keys of a score row, padded
  T* scores;      // [heads * padded_rows][width]

  MH_INLINE void carve(carver& from, int64_t head_count, int64_t head_rows) {
    base::carve(from, head_count, head_rows);
    // So many scores are stored at once, behind the last of a shorter turn, too.
    constexpr int64_t stored = has_pairs ? w : least_block;
    width = round_up<max_of(2 * w, dots)>(c.block_kv) + (c.k_turn % stored != 0 ? round_up<w>(stored) : 0);
    scores = from.take<T>(head_count * head_rows * width);
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
    asked_rows<K> asked(in_order, next);
    const auto ask_lines = [&]() MH_INLINE_LAMBDA {
#pragma GCC unroll 16
      for (int i = 0; i < K; ++i) asked.template ask_line<For>();
      asked.go_back();
    };
    int64_t d = 0;
    for (; d < k_pairs; d += 2 * w) {
#pragma GCC unroll 2
      for (int64_t b = 0; For != asks::nothing && b < 2 * w * size; b += 64) {
        if (2 * w * size >= 64 || d * size % 64 == 0) ask_lines();
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
      if (For != asks::nothing && d * size % 64 == 0) ask_lines();
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
    const int64_t to_row = width;  // read once: memcpy may write to it, as far as compilers know
    T* to = s + r * to_row;
#pragma GCC unroll 8
    for (int n = 0; n < R; ++n, to += to_row) memcpy(to, sums + n * of_row, K * sizeof(T));
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
    // Of 8 rows two sums a key: with one, 8 products that follow each other's were 1.3 a cycle on Zen 5, which can begin 2.
    constexpr int chains = R == 8 ? 2 : 1;
    constexpr bool whole = Keys == keys_of_block::whole, have_all = whole || Keys == keys_of_block::all;
    const int64_t stride = k.stride, last_back = whole ? 0 : back_of_last_pair();
    vec<T> acc[K];
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
      asked_rows<some> asked(in_order, next.from(first));
      vec<T> sum[chains][some];
#pragma GCC unroll 16
      for (int i = 0; i < chains * some; ++i) sum[i / some][i % some] = vec<T>(T(0));
      for (int64_t d = 0, end = k_dim - (last_back > 0 ? 2 * w : 0);; end = k_dim) {
        do {
#pragma GCC unroll 8
          for (int n = 0; n < R; ++n, of_q += w) {
            if (For != asks::nothing && (2 * w * 2 >= 64 || d * 2 % 64 == 0)) {  // an R-th of the lines
#pragma GCC unroll 8
              for (int i = 0; i < some; ++i) {
                if (i * R / some == n) asked.template ask_line<For>();
              }
              if (n + 1 == R) asked.go_back();
            }
            const word_vec x = word_vec::load_aligned(of_q);
#pragma GCC unroll 8
            for (int i = 0; i < some; ++i) {
              vec<T>& of_key = sum[n % chains][i];
              of_key = add_products(of_key, repeat_pairs<R>(key(i) + n * (2 * w / R)), x);
            }
          }
#pragma GCC unroll 2
          for (const uint16_t*& p : four) p += 2 * w;
#pragma GCC unroll 8
          for (const uint16_t*& p : each) p += 2 * w;
          d += 2 * w;
        } while (d < end);
        if (whole || end == k_dim) break;
#pragma GCC unroll 2
        for (const uint16_t*& p : four) p -= last_back;
#pragma GCC unroll 8
        for (const uint16_t*& p : each) p -= last_back;
      }
#pragma GCC unroll 8
      for (int i = 0; i < some; ++i) acc[first + i] = chains == 1 ? sum[0][i] : sum[0][i] + sum[chains - 1][i];
    }
    vec<T> all[w];  // fewer keys come several times over
#pragma GCC unroll 16
    for (int i = 0; i < w; ++i) all[i] = acc[i % K];
    put_sums<R>(all, vec<T>(static_cast<T>(c.q_scale)), s + r * width, width);
  }

  // The last `keys` keys, up to K of them.
  template <int R, int K, asks For, class E>
  MH_INLINE void score_last(int64_t r, int64_t row_end, rows_at<E> k, int64_t keys, T* s, soon next) {
    if constexpr (K > least_block) {
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
};

}  // namespace
}  // namespace manyhead::MH_ISA
