// The second pass: weights, their mean over heads, their sums over queries, row by row from the scores that the first pass kept.
// A row's weights are divided by their own sum, in which exponentials are exact, whatever the first pass made of them.
#pragma once

#include "panel.hpp"

namespace manyhead::MH_ISA {
namespace {

template <class Real>
struct weights_task {
  using T = typename Real::real;
  static constexpr int64_t w = lanes<T>;
  static constexpr int at_once = exp2_vectors > 4 ? 4 : exp2_vectors;

  const kernel_call& c;
  const kernel_task& task;
  positions at;

  MH_INLINE weights_task(const kernel_call& call, const kernel_task& t)
      : c(call), task(t), at(positions_of(call, t.batch)) {}

  static MH_INLINE void add(T* to, int64_t stride, int64_t n, vec<T> x) {
    if (n == w && stride == 1) return store<T>(to, load(to) + x);
    alignas(64) T buffer[w];
    x.store_aligned(buffer);
    for (int64_t i = 0; i < n; ++i) to[i * stride] += buffer[i];
  }

  MH_INLINE T* column_sums_of(int64_t head) const {
    return static_cast<T*>(c.column_partials) +
           ((task.batch * c.heads + head) * c.row_blocks + task.row_block) * c.kv_len;
  }

  // Where a row's weights go: NULL, or its first key's.
  struct outputs {
    T *weights, *mean, *columns;
    int64_t weights_stride, mean_stride;
    bool first_head;  // of the mean
  };
  MH_INLINE outputs outputs_of(int64_t head, int64_t query) const {
    outputs to{};
    if (c.weights != nullptr) {
      to.weights = static_cast<T*>(c.weights) + task.batch * c.weights_strides[0] + head * c.weights_strides[1] +
                   query * c.weights_strides[2];
      to.weights_stride = c.weights_strides[3];
    }
    if (c.mean_weights != nullptr) {
      to.mean =
          static_cast<T*>(c.mean_weights) + task.batch * c.mean_weights_strides[0] + query * c.mean_weights_strides[1];
      to.mean_stride = c.mean_weights_strides[2];
      to.first_head = head == 0;
    }
    if (c.column_partials != nullptr) to.columns = column_sums_of(head);
    return to;
  }

  // Keys of a row: in [seen_begin, seen_end) lie all that it sees; [begin, end) are the whole vectors that hold these.
  struct row_keys {
    int64_t begin, end, seen_begin, seen_end;
  };
  MH_INLINE row_keys keys_of(int64_t query) const {
    const key_range seen = range_of(c, at, query);
    const int64_t end = max_of(seen.begin, c.extra_keys > 0 ? c.kv_len : seen.end);
    return {round_down<w>(seen.begin), round_up<w>(end), seen.begin, end};
  }

  // Calls f.operator()<N>(k) for all of them, N vectors from key k on; all of several are keys that lie in between.
  template <class F>
  static MH_INLINE void over_keys(const row_keys& keys, const F& f) {
    int64_t k = keys.begin;
    if (k < keys.seen_begin && k < keys.end) {
      f.template operator()<1>(k);
      k += w;
    }
    for (; k + at_once * w <= keys.seen_end; k += at_once * w) f.template operator()<at_once>(k);
    for (; k < keys.end; k += w) f.template operator()<1>(k);
  }

  // Scores s become exponentials, those of keys that are not seen -1: their weights are 0 in a NaN row too. Returns what the others
  // are to be multiplied with. sink: natural units. soon: where the row's weights go, a key after the other, or NULL; its lines are
  // asked for.
  MH_INLINE T exponentials(T* s, const row_keys& keys, double sink, const T* soon) const {
    const vec<T> unseen(-infinity<T>);
    const auto score = [=]<int N>(int64_t k) MH_INLINE_LAMBDA {
      const vec<T> x = load(s + k);
      if (N > 1 || (k >= keys.seen_begin && k + w <= keys.seen_end)) return x;
      const vec<T> begin(static_cast<T>(keys.seen_begin - k)), end(static_cast<T>(keys.seen_end - k));
      return xsimd::select((lane_numbers<T>() < begin) | (lane_numbers<T>() >= end), unseen, x);
    };
    vec<T> tops[at_once];
    for (vec<T>& top : tops) top = vec<T>(lowest<T>);  // above -inf: weights of a row that sees no key are 0
    over_keys(keys, [&]<int N>(int64_t k) MH_INLINE_LAMBDA {
#pragma GCC unroll 8
      for (int i = 0; i < N; ++i) tops[i] = larger<T>(tops[i], score.template operator()<N>(k + i * w));
    });
    for (const vec<T>& top : tops) tops[0] = larger<T>(tops[0], top);
    const T top = largest_of<T>(tops[0]);
    const vec<T> scale(static_cast<T>(c.exp_scale)), high(top);
    vec<T> sums[at_once];
    for (vec<T>& sum : sums) sum = vec<T>(T(0));
    over_keys(keys, [&]<int N>(int64_t k) MH_INLINE_LAMBDA {
      vec<T> of[N], x[N];
#pragma GCC unroll 8
      for (int i = 0; i < N; ++i) {
        of[i] = score.template operator()<N>(k + i * w);
        x[i] = (of[i] - high) * scale;
        if (asks_ahead && soon != nullptr && i * w * static_cast<int64_t>(sizeof(T)) % 64 == 0)
          __builtin_prefetch(soon + k + i * w, 1);
      }
      exp2_of<T, N>(x);
#pragma GCC unroll 8
      for (int i = 0; i < N; ++i) {
        const auto closed = of[i] == unseen;
        sums[i] = sums[i] + xsimd::select(closed, vec<T>(T(0)), x[i]);
        store<T>(s + k + i * w, xsimd::select(closed, vec<T>(T(-1)), x[i]));
      }
    });
    for (int i = 1; i < at_once; ++i) sums[0] = sums[0] + sums[i];
    auto total = static_cast<double>(xsimd::reduce_add(sums[0]));
    if (c.sinks != nullptr) total += ::exp2(sink * log2e - static_cast<double>(top) * c.exp_scale);
    if (sink == __builtin_inf()) total = __builtin_nan("");  // as the result is
    return static_cast<T>(total == 0 ? 0.0 : 1.0 / total);
  }

  // Weights 0 of keys [begin, end), end that of the row or whole vectors before it.
  MH_INLINE void write_zeros(const outputs& to, int64_t begin, int64_t end) const {
    const vec<T> zero(T(0));
    const auto write = [=](T* row, int64_t stride) MH_INLINE_LAMBDA {
      for (int64_t k = begin; row != nullptr && k < end; k += w)
        write_some<Real>(row + k * stride, stride, min_of(w, end - k), zero);
    };
    write(to.weights, to.weights_stride);
    if (to.first_head) write(to.mean, to.mean_stride);
  }

  MH_INLINE void write_row(const T* s, const row_keys& keys, const outputs& to, T each) const {
    const vec<T> factor(each), share(T(1) / static_cast<T>(c.heads));
    // A name for each: what is stored may change *this and `to`, for all that a compiler knows.
    T *const weights = to.weights, *const mean = to.mean, *const columns = to.columns;
    const int64_t weights_stride = to.weights_stride, mean_stride = to.mean_stride, kv_len = c.kv_len;
    const bool first_head = to.first_head;
    write_zeros(to, 0, keys.begin);
    over_keys(keys, [=]<int N>(int64_t k) MH_INLINE_LAMBDA {
#pragma GCC unroll 8
      for (int i = 0; i < N; ++i) {
        const int64_t key = k + i * w, n = N > 1 ? w : min_of(w, kv_len - key);
        const vec<T> exponential = load(s + key);
        const vec<T> x = xsimd::select(exponential < vec<T>(T(0)), vec<T>(T(0)), exponential * factor);
        if (weights != nullptr) write_some<Real>(weights + key * weights_stride, weights_stride, n, x);
        if (columns != nullptr) add(columns + key, 1, n, x);
        if (mean == nullptr) continue;
        if (first_head) {
          write_some<Real>(mean + key * mean_stride, mean_stride, n, x * share);
        } else {
          add(mean + key * mean_stride, mean_stride, n, x * share);
        }
      }
    });
    write_zeros(to, keys.end, kv_len);
  }

  void write_head(int64_t kv_head) const {
    row_of r(c, task.row_begin);
    for (int64_t row = task.row_begin; row < task.row_end; ++row, r.step(c)) {
      const int64_t head = kv_head * c.group + r.member;
      T* const s = kept_row<T>(c, task, kv_head, row);
      const row_keys keys = keys_of(r.query);
      const outputs to = outputs_of(head, r.query);
      const T each =
          exponentials(s, keys, sink_of<T>(c, head, 0), c.prefetch && to.weights_stride == 1 ? to.weights : nullptr);
      write_row(s, keys, to, each);
    }
  }

  void run() const {
    for (int64_t kv_head = task.kv_head_begin; kv_head < task.kv_head_end; ++kv_head) write_head(kv_head);
    lap(task.clock, phase_weights);
  }
};

template <class Real>
void attention_weights(const kernel_call* c, const kernel_task* t) {
  weights_task<Real>(*c, *t).run();
}

}  // namespace
}  // namespace manyhead::MH_ISA
