// The second pass: weights, their mean over heads, their sums over queries, or the scores themselves, written tile by
// tile. The row's state from the first pass makes each weight exp2(s - top) / total final at once, so nothing larger
// than a tile is kept.
#pragma once

#include "panel.hpp"

namespace manyhead::MH_ISA {
namespace {

template <class D>
struct weights_task {
  using T = typename D::real;
  static constexpr int64_t w = lanes<T>;

  const kernel_call& c;
  const kernel_task& task;
  positions at;
  tile_scratch<T> scratch;
  panel<T> p;

  static int64_t scratch_bytes(const kernel_call& c) {
    carver from{nullptr};
    carve_tile<T>(from, c);
    carve_panel<T>(from, c, false);
    return from.used;
  }

  MH_INLINE weights_task(const kernel_call& call, const kernel_task& t)
      : c(call), task(t), at(positions_of(call, t.batch)) {
    carver from{static_cast<char*>(task.scratch)};
    scratch = carve_tile<T>(from, c);
    p = carve_panel<T>(from, c, false);
  }

  // Scores at the stage asked for, natural units: passes later than it are not run, earlier ones have no say in which
  // keys are seen.
  void score_stage(const tile_at& t, by_rows<T> k, int64_t width) {
    T* s = scratch.scores;
    const auto scores = [&]<int NV>() {
      product<product_mode::set, NV>(k, whole_panel<const T, NV>{p.q}, t.keys(), c.head_dim, whole_panel<T, NV>{s},
                                     scratch.tile_max);
    };
    switch (p.vectors) {
      case 1:
        scores.template operator()<1>();
        break;
      case 2:
        scores.template operator()<2>();
        break;
      default:
        scores.template operator()<max_panel_vectors>();
        break;
    }
    if (c.scores_stage == MH_SCORES_RAW) return;
    if (c.softcap > 0) softcap_pass<T>(c, s, t.keys() * width);
    if (c.scores_stage == MH_SCORES_CAPPED) return;
    row_terms<T> rows;
    rows.look_up(c, at, t, width);
    if (c.alibi_slopes != nullptr) alibi_pass_transposed<T>(c, rows, t, width, s);
    if (c.bias != nullptr) bias_pass_transposed<T>(c, rows, t, width, s);
    if (see_tile<T>(c, at, t.batch, t.kv_head, t.row, t.count, width, t.begin, t.end, scratch.words) !=
        visibility::all) {
      visibility_pass_transposed<T>(scratch.words, t.keys(), width, s, scratch.tile_max);
    }
  }

  // Weights of a tile, in scratch.scores.
  template <int NV>
  MH_INLINE void weigh(const tile_at& t, by_rows<T> k) {
    constexpr int64_t width = NV * w;
    T* s = scratch.scores;
    if (scores_of<T, NV>(c, at, p, t, k, scratch) == visibility::none) {
      for (int64_t i = 0; i < t.keys() * width; i += w) vec<T>(T(0)).store_aligned(s + i);
      return;
    }
    const vec<T> scale(static_cast<T>(c.exp_scale));
    const vec<T> closed(-infinity<T>);
    for (int64_t key = 0; key < t.keys(); ++key) {
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) {
        T* at_key = s + key * width + v * w;
        const vec<T> score = vec<T>::load_aligned(at_key);
        const vec<T> above = score - vec<T>::load_aligned(p.row_max + v * w);
        const vec<T> weight =
            exp2_of<T>(above * scale) * vec<T>::load_aligned(p.row_sum + v * w);     // row_sum: 1 / total
        xsimd::select(score == closed, vec<T>(T(0)), weight).store_aligned(at_key);  // 0 in a NaN row too
      }
    }
  }

  // Hands on the tile row by row: n values of a row, from key `key` on.
  template <class Emit>
  MH_INLINE void for_each_row(const tile_at& t, int64_t width, Emit emit) {
    for (int64_t l0 = 0; l0 < t.count; l0 += w) {
      const row_of first(c, t.row + l0);
      for (int64_t k0 = 0; k0 < t.keys(); k0 += w) {
        const int64_t n = min_of(w, t.keys() - k0);
        vec<T> x[w];
        for (int64_t i = 0; i < w; ++i)
          x[i] = i < n ? vec<T>::load_aligned(scratch.scores + (k0 + i) * width + l0) : vec<T>(T(0));
        transpose<T>(x);
        row_of r = first;
        for (int64_t l = 0; l < w && l0 + l < t.count; ++l, r.step(c)) emit(r, t.begin + k0, n, x[l]);
      }
    }
  }

  static MH_INLINE void put(T* to, int64_t stride, int64_t n, vec<T> x) {
    if (n == w && stride == 1) return store<T>(to, x);
    alignas(64) T buffer[w];
    x.store_aligned(buffer);
    for (int64_t i = 0; i < n; ++i) to[i * stride] = buffer[i];
  }

  static MH_INLINE void add(T* to, int64_t stride, int64_t n, vec<T> x) {
    if (n == w && stride == 1) return store<T>(to, load(to) + x);
    alignas(64) T buffer[w];
    x.store_aligned(buffer);
    for (int64_t i = 0; i < n; ++i) to[i * stride] += buffer[i];
  }

  MH_INLINE void emit_scores(const tile_at& t, int64_t width) {
    for_each_row(t, width, [&](const row_of& r, int64_t key, int64_t n, vec<T> x) {
      put(static_cast<T*>(c.scores) + t.batch * c.scores_strides[0] + t.head(c, r) * c.scores_strides[1] +
              r.query * c.scores_strides[2] + key * c.scores_strides[3],
          c.scores_strides[3], n, x);
    });
  }

  MH_INLINE void emit_weights(const tile_at& t, int64_t width) {
    const vec<T> share(T(1) / static_cast<T>(c.heads));
    for_each_row(t, width, [&](const row_of& r, int64_t key, int64_t n, vec<T> x) {
      const int64_t head = t.head(c, r);
      const int64_t query = r.query;
      if (c.weights != nullptr) {
        put(static_cast<T*>(c.weights) + t.batch * c.weights_strides[0] + head * c.weights_strides[1] +
                query * c.weights_strides[2] + key * c.weights_strides[3],
            c.weights_strides[3], n, x);
      }
      if (c.column_partials != nullptr) {
        T* sums = static_cast<T*>(c.column_partials) +
                  ((t.batch * c.heads + head) * c.row_blocks + task.row_block) * c.kv_len;
        add(sums + key, 1, n, x);
      }
      if (c.mean_weights != nullptr) {
        T* mean = static_cast<T*>(c.mean_weights) + t.batch * c.mean_weights_strides[0] +
                  query * c.mean_weights_strides[1] + key * c.mean_weights_strides[2];
        if (head == 0) {
          put(mean, c.mean_weights_strides[2], n, x * share);
        } else {
          add(mean, c.mean_weights_strides[2], n, x * share);
        }
      }
    });
  }

  void attend_head(int64_t kv_head) {
    for (int64_t row = task.row_begin; row < task.row_end; row += p.count) {
      place_panel(c, at, row, task.row_end, panel_vectors<T>(task.row_end - row), p);
      pack_q<D>(c, task.batch, kv_head, p);
      for (int64_t l = 0; l < p.width(); ++l) {
        const int64_t r = p.row + min_of(l, p.count - 1);
        const double* state = c.row_states + 2 * row_index(c, task.batch, kv_head * c.group + r % c.group, r / c.group);
        p.row_max[l] = static_cast<T>(state[0]);
        p.row_sum[l] = static_cast<T>(state[1] == 0 ? 0.0 : 1.0 / state[1]);
      }
      for (int64_t b = 0; b < c.kv_len; b += c.block_kv) {
        const tile_at t{task.batch, kv_head, p.row, p.count, b, min_of(b + c.block_kv, c.kv_len)};
        const T* k =
            kv_rows<D>(c.k, c.k_strides, task.batch, kv_head, t.begin, t.keys(), c.head_dim, c.copy_kv, scratch.k_copy);
        const by_rows<T> keys{k, c.copy_kv ? c.head_dim : c.k_strides[2]};
        if (c.scores != nullptr) {
          score_stage(t, keys, p.width());
          emit_scores(t, p.width());
        }
        if (c.weights == nullptr && c.mean_weights == nullptr && c.column_partials == nullptr) continue;
        switch (p.vectors) {
          case 1:
            weigh<1>(t, keys);
            break;
          case 2:
            weigh<2>(t, keys);
            break;
          default:
            weigh<max_panel_vectors>(t, keys);
            break;
        }
        emit_weights(t, p.width());
      }
    }
  }

  void run() {
    if (c.column_partials != nullptr) {
      for (int64_t head = task.kv_head_begin * c.group; head < task.kv_head_end * c.group; ++head) {
        T* sums = static_cast<T*>(c.column_partials) +
                  ((task.batch * c.heads + head) * c.row_blocks + task.row_block) * c.kv_len;
        memset(sums, 0, static_cast<size_t>(c.kv_len) * sizeof(T));
      }
    }
    for (int64_t kv_head = task.kv_head_begin; kv_head < task.kv_head_end; ++kv_head) attend_head(kv_head);
  }
};

template <class D>
void attention_weights(const kernel_call* c, const kernel_task* t) {
  weights_task<D>(*c, *t).run();
}

}  // namespace
}  // namespace manyhead::MH_ISA
