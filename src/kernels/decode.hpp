// The route for few rows (a decode step: query heads of a group times a few new tokens). Bound by reading K and V: each
// tile is read once for all rows. Lanes over dims for both products, lanes over keys for everything between:
//
//   S[row][key] = reduce(sum over dim vectors of K[key] * q[row])     4 rows x 4 keys at a time (16 registers: 2 x 4)
//   O[row] += P[row][key] * V[key]                                    up to 4 rows x 4 vectors of accumulators
//
// 16-bit elements are widened as they are loaded. Rows of K and V must be whole vectors: other head sizes come here
// through the copy (kernel_call.copy_kv), padded with zeros.
#pragma once

#include "panel.hpp"

namespace manyhead::MH_ISA {
namespace {

inline constexpr int64_t most_decode_rows = 16;

template <class D>
struct decode_task {
  using T = typename D::real;
  static constexpr int64_t w = lanes<T>;
  static constexpr int64_t keys_at_once = 32;  // rows of V that stay in L1: 16 KB of 128 floats
  // 16 registers hold 2 x 4 accumulators, 4 vectors of V and 2 weights; 32 hold 4 x 4.
  static constexpr int value_rows = max_panel_vectors == 3 ? 4 : 2;
  // Dot products of a step: 4 rows x 4 keys and 4 vectors of the rows, or 2 x 4 and 2.
  static constexpr int dots = max_panel_vectors == 3 ? 16 : 8;

  const kernel_call& c;
  const kernel_task& task;
  positions at;
  int64_t kv_head;
  int64_t rows;
  int64_t k_dim, v_dim;  // padded to whole vectors
  int64_t width;         // keys of a score row, padded
  T* q;                  // [rows][k_dim]
  T* out;                // [rows][v_dim]
  T* scores;             // [rows][width]
  bits<T>* words;        // [width / word_keys + 1][rows]
  T* k_copy;
  T* v_copy;
  T row_max[most_decode_rows];
  T row_sum[most_decode_rows];

  MH_INLINE void carve(carver& from, int64_t row_count) {
    k_dim = round_up(c.head_dim, w);
    v_dim = round_up(c.v_dim, w);
    width = round_up(c.block_kv, max_of(w, dots));
    q = from.take<T>(row_count * k_dim);
    out = from.take<T>(row_count * v_dim);
    scores = from.take<T>(row_count * width);
    words = from.take<bits<T>>((width / word_keys + 1) * row_count);
    k_copy = from.take<T>(c.copy_kv ? c.block_kv * k_dim : 0);
    v_copy = from.take<T>(c.copy_kv ? c.block_kv * v_dim : 0);
  }

  MH_INLINE decode_task(const kernel_call& call, const kernel_task& t) : c(call), task(t) {}

  static int64_t scratch_bytes(const kernel_call& c, int64_t row_count) {
    const kernel_task none{};
    decode_task sizes(c, none);
    carver from{nullptr};
    sizes.carve(from, row_count);
    return from.used;
  }

  MH_INLINE void start() {
    at = positions_of(c, task.batch);
    kv_head = task.kv_head_begin;
    rows = task.row_end - task.row_begin;
    carver from{static_cast<char*>(task.scratch)};
    carve(from, rows);
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t row = task.row_begin + r;
      const auto* p = static_cast<const typename D::storage*>(c.q) + task.batch * c.q_strides[0] +
                      (kv_head * c.group + row % c.group) * c.q_strides[1] + row / c.group * c.q_strides[2];
      T* to = q + r * k_dim;
      widen_row<D>(p, c.q_strides[3], c.head_dim, to);
      for (int64_t d = c.head_dim; d < k_dim; ++d) to[d] = T(0);
      for (int64_t d = 0; d < k_dim; d += w) store<T>(to + d, load(to + d) * vec<T>(static_cast<T>(c.q_scale)));
    }
  }

  // Rows of K or V as they are in memory, or as copied. E: the trait of their elements.
  template <class E>
  struct rows_at {
    const typename E::storage* base;
    int64_t stride;
    MH_INLINE rows_at from(int64_t row, int64_t dim = 0) const { return {base + row * stride + dim, stride}; }
  };
  MH_INLINE rows_at<D> in_place(const void* base, const int64_t* strides, int64_t begin) const {
    return {static_cast<const typename D::storage*>(base) + task.batch * strides[0] + kv_head * strides[1] +
                begin * strides[2],
            strides[2]};
  }
  MH_INLINE rows_at<plain<D>> copied(rows_at<D> from, int64_t keys, int64_t dim, int64_t dim_stride, int64_t padded,
                                     T* copy) {
    for (int64_t k = 0; k < keys; ++k) {
      widen_row<D>(from.from(k).base, dim_stride, dim, copy + k * padded);
      for (int64_t d = dim; d < padded; ++d) copy[k * padded + d] = T(0);
    }
    return {copy, padded};
  }

  // R rows from row r against the next of `keys` keys, dots / R of them; keys behind the last are the last again.
  template <int R, class E>
  MH_INLINE void score_rows(int64_t r, rows_at<E> k, int64_t keys, T* s) {
    constexpr int K = dots / R;
    const typename E::storage* key[K];
#pragma GCC unroll 16
    for (int i = 0; i < K; ++i) key[i] = k.from(min_of(i, keys - 1)).base;
    const T* row = q + r * k_dim;
    vec<T> acc[dots];
#pragma GCC unroll 16
    for (int i = 0; i < dots; ++i) acc[i] = vec<T>(T(0));
    for (int64_t d = 0; d < k_dim; d += w) {
      vec<T> x[R];
#pragma GCC unroll 4
      for (int n = 0; n < R; ++n) x[n] = vec<T>::load_aligned(row + n * k_dim + d);
#pragma GCC unroll 16
      for (int i = 0; i < K; ++i) {
        const vec<T> y = E::widen(key[i] + d);
#pragma GCC unroll 4
        for (int n = 0; n < R; ++n) acc[n * K + i] = xsimd::fma(y, x[n], acc[n * K + i]);
      }
    }
    alignas(64) T sums[dots];
#pragma GCC unroll 16
    for (int i = 0; i < dots; i += static_cast<int>(w)) sums_of<T>(acc + i).store_aligned(sums + i);
#pragma GCC unroll 4
    for (int n = 0; n < R; ++n) memcpy(s + (r + n) * width, sums + n * K, K * sizeof(T));
  }

  // Rows r .. row_end against `keys` keys, R rows at a time.
  template <int R, class E>
  MH_INLINE void score_all(int64_t r, int64_t row_end, rows_at<E> k, int64_t keys, upcoming next) {
    for (int64_t i = 0; i < keys; i += dots / R) {
      for (int64_t n = r; n < row_end; n += R) {
        next.part((n - r) / R, (row_end - r) / R).fetch(i, min_of(i + dots / R, keys));
        score_rows<R>(n, k.from(i), keys - i, scores + i);
      }
    }
  }

  template <class E>
  __attribute__((noinline)) void score(rows_at<E> k, int64_t keys, upcoming next) {
    const int64_t whole = rows / value_rows * value_rows;
    const int64_t pairs = rows / 2 * 2;
    if (whole > 0) score_all<value_rows>(0, whole, k, keys, next);
    if (whole < pairs) score_all<2>(whole, pairs, k, keys, whole == 0 ? next : upcoming{});
    if (pairs < rows) score_all<1>(pairs, rows, k, keys, pairs == 0 ? next : upcoming{});
  }

  // O[row .. row + R)[dims of N vectors] += P V for one tile.
  template <bool Careful, int R, int N, class E>
  MH_INLINE void add_values(rows_at<E> v, int64_t keys, const T* p, T* to, upcoming next) {
    vec<T> acc[R][N];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) acc[r][n] = vec<T>(T(0));
    }
    for (int64_t k = 0; k < keys; ++k) {
      next.fetch(k, k + 1);
      vec<T> x[N];
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) x[n] = E::widen(v.from(k).base + n * w);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const T weight = p[r * width + k];
        if constexpr (Careful) {
          if (__builtin_signbit(weight)) continue;  // a slot that may not be attended: no 0 * NaN
        }
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) acc[r][n] = xsimd::fma(vec<T>(weight), x[n], acc[r][n]);
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) {
        T* at_row = to + r * v_dim + n * w;
        (vec<T>::load_aligned(at_row) + acc[r][n]).store_aligned(at_row);
      }
    }
  }

  // All dims of R rows, the part `pass` of `passes` over these keys.
  template <bool Careful, int R, class E>
  MH_INLINE void add_rows(int64_t r, int64_t first, rows_at<E> v, int64_t keys, upcoming next) {
    const T* p = scores + r * width + first;
    const int64_t passes = (rows + R - 1) / R * ((v_dim + 4 * w - 1) / (4 * w));
    int64_t pass = r / R * ((v_dim + 4 * w - 1) / (4 * w));
    int64_t d = 0;
    for (; d + 4 * w <= v_dim; d += 4 * w, ++pass)
      add_values<Careful, R, 4>(v.from(0, d), keys, p, out + r * v_dim + d, next.part(pass, passes));
    for (; d + w <= v_dim; d += w) add_values<Careful, R, 1>(v.from(0, d), keys, p, out + r * v_dim + d, upcoming{});
  }

  // With more rows than one pass takes, a few keys at a time, so that their rows of V stay in L1 for the next pass.
  template <bool Careful, class E>
  __attribute__((noinline)) void add_all(rows_at<E> v, int64_t keys, upcoming next) {
    const int64_t step = rows > value_rows ? keys_at_once : keys;
    for (int64_t first = 0; first < keys; first += step) {
      const int64_t n = min_of(step, keys - first);
      const rows_at<E> from = v.from(first);
      const upcoming near = next.from(first);
      int64_t r = 0;
      for (; r + value_rows <= rows; r += value_rows) add_rows<Careful, value_rows>(r, first, from, n, near);
      if (value_rows == 4 && r + 2 <= rows) {
        add_rows<Careful, 2>(r, first, from, n, r == 0 ? near : upcoming{});
        r += 2;
      }
      if (r < rows) add_rows<Careful, 1>(r, first, from, n, r == 0 ? near : upcoming{});
    }
  }

  // Takes in the scores of row r: raises its maximum, turns scores into weights.
  template <bool Careful>
  MH_INLINE void weigh(int64_t r, int64_t padded_keys, T careful_factor) {
    T* s = scores + r * width;
    vec<T> tops(-infinity<T>);
    for (int64_t k = 0; k < padded_keys; k += w) tops = larger<T>(tops, load(s + k));
    const T top = xsimd::reduce_max(tops);
    const vec<T> scale(static_cast<T>(c.exp_scale));
    if (top > row_max[r] + static_cast<T>(lazy_rescale / c.exp_scale)) {
      const vec<T> factor = exp2_of<T>((vec<T>(row_max[r]) - vec<T>(top)) * scale);
      row_max[r] = top;
      row_sum[r] *= factor.get(0);
      for (int64_t d = 0; d < v_dim; d += w) store<T>(out + r * v_dim + d, load(out + r * v_dim + d) * factor);
    }
    const vec<T> max_now(row_max[r]);
    vec<T> sum(T(0));
    for (int64_t k = 0; k < padded_keys; k += w) {
      const vec<T> score = load(s + k);
      vec<T> p = exp2_of<T>((score - max_now) * scale);
      sum = sum + p;
      if constexpr (Careful)
        p = xsimd::select(score == vec<T>(-infinity<T>), vec<T>(T(-0.0)), p * vec<T>(careful_factor));
      store<T>(s + k, p);
    }
    row_sum[r] += xsimd::reduce_add(sum);
  }

  template <bool Careful>
  __attribute__((noinline)) void attend_all() {
    const T careful_factor = static_cast<T>(::exp2(-careful_shift(c.kv_len)));
    memset(out, 0, static_cast<size_t>(rows * v_dim) * sizeof(T));
    for (int64_t r = 0; r < rows; ++r) {
      row_max[r] = lowest<T>;
      row_sum[r] = T(0);
    }
    const key_range first = range_of(c, at, task.row_begin / c.group);
    const key_range last = range_of(c, at, (task.row_end - 1) / c.group);
    int64_t begin = max_of(first.begin, task.chunk * c.chunk_keys);
    int64_t end = c.extra_keys > 0 ? c.kv_len : last.end;
    if (c.chunks > 1) end = min_of(end, (task.chunk + 1) * c.chunk_keys);
    for (int64_t b = begin / c.block_kv * c.block_kv; b < end; b += c.block_kv) {
      const tile_at t{task.batch, kv_head, task.row_begin, rows, max_of(b, begin), min_of(b + c.block_kv, end)};
      const int64_t keys = t.keys();
      const int64_t padded = round_up(keys, w);
      bool restricted = keys != padded;  // the padding must be closed
      if (restricted || c.mask != nullptr || c.key_mask != nullptr || t.begin < last.begin || t.end > first.end) {
        const visibility see = see_tile<T>(c, at, t.batch, kv_head, t.row, rows, rows, t.begin, t.end, words);
        if (see == visibility::none) continue;
        restricted = restricted || see == visibility::some;
      }
      const rows_at<D> k = in_place(c.k, c.k_strides, t.begin);
      const rows_at<D> v = in_place(c.v, c.v_strides, t.begin);
      const upcoming values = rows_ahead<D>(c, c.v, c.v_strides, t.batch, kv_head, t.begin, keys, c.v_dim);
      if (c.copy_kv) {
        score(copied(k, keys, c.head_dim, c.k_strides[3], k_dim, k_copy), keys, values);
      } else {
        score(k, keys, values);
      }
      if (c.softcap > 0) {
        for (int64_t r = 0; r < rows; ++r) softcap_pass<T>(c, scores + r * width, padded);
      }
      if (c.alibi_slopes != nullptr) alibi_pass_rows<T>(c, at, t, width, scores);
      if (c.bias != nullptr) bias_pass_rows<T>(c, t, width, scores);
      if (restricted) visibility_pass_rows<T>(words, rows, padded, width, scores);
      for (int64_t r = 0; r < rows; ++r) weigh<Careful>(r, padded, careful_factor);
      const upcoming next_keys =
          rows_ahead<D>(c, c.k, c.k_strides, t.batch, kv_head, t.end, min_of(c.block_kv, end - t.end), c.head_dim);
      if (c.copy_kv) {
        add_all<Careful>(copied(v, keys, c.v_dim, c.v_strides[3], v_dim, v_copy), keys, next_keys);
      } else {
        add_all<Careful>(v, keys, next_keys);
      }
    }
  }

  // Divides and stores. False: something is not finite.
  bool finish(bool careful) {
    vec<T> not_finite(T(0));
    const double undo = careful ? ::exp2(careful_shift(c.kv_len)) : 1.0;
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t row = task.row_begin + r;
      const int64_t head = kv_head * c.group + row % c.group;
      const row_end e = finish_row<T>(row_max[r], row_sum[r], c.exp_scale, sink_of<T>(c, head, task.chunk));
      write_state<T>(c, task.batch, head, row / c.group, task.chunk, e);
      const T factor = static_cast<T>(e.factor * undo);
      void* const place = place_of_row<D>(c, task.batch, head, row / c.group, task.chunk);
      for (int64_t d = 0; d < c.v_dim; d += w) {
        const vec<T> x = load(out + r * v_dim + d) * vec<T>(factor);
        not_finite = xsimd::fma(x, vec<T>(T(0)), not_finite);
        write_values<D>(c, place, d, min_of(w, c.v_dim - d), x);
      }
    }
    return xsimd::all(not_finite == vec<T>(T(0)));
  }

  void run() {
    start();
    attend_all<false>();
    if (finish(false)) return;
    attend_all<true>();  // see tile_task::run
    finish(true);
  }
};

template <class D>
void attention_decode(const kernel_call* c, const kernel_task* t) {
  decode_task<D>(*c, *t).run();
}

}  // namespace
}  // namespace manyhead::MH_ISA
