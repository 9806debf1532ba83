// One task of the tile route: the rows [row_begin, row_end) of one kv head against the keys of one chunk. Key tiles
// outside, panels inside, so that a tile of K and V is read from memory (or converted) once per task:
//
//   for each key tile { for each panel { pack Q^T the first time; S^T = K Q^T; passes; softmax; O^T += V^T P^T } }
//   divide, store
#pragma once

#include "panel.hpp"

namespace manyhead::MH_ISA {
namespace {

template <class D>
struct tile_task {
  using T = typename D::real;
  static constexpr int64_t w = lanes<T>;
  static constexpr int64_t most_panels = 16;  // of a task: block_q <= 16 panels

  const kernel_call& c;
  const kernel_task& task;
  positions at;
  int64_t kv_head;
  int64_t panels = 0;
  panel<T> p[most_panels];
  tile_scratch<T> scratch;

  static int64_t scratch_bytes(const kernel_call& c, int64_t block_q) {
    carver from{nullptr};
    carve_tile<T>(from, c);
    for (int64_t row = 0; row < block_q; row += panel_width<T>) carve_panel<T>(from, c, true);
    carve_panel<T>(from, c, true);  // four vectors are cut into two panels
    return from.used;
  }

  MH_INLINE tile_task(const kernel_call& call, const kernel_task& t)
      : c(call), task(t), at(positions_of(call, t.batch)), kv_head(t.kv_head_begin) {
    carver from{static_cast<char*>(task.scratch)};
    scratch = carve_tile<T>(from, c);
    for (int64_t row = task.row_begin; row < task.row_end; row += p[panels++].count) {
      p[panels] = carve_panel<T>(from, c, true);
      place_panel(c, at, row, task.row_end, p[panels]);
    }
  }

  // A panel's rows of q or out, where they lie evenly: with one query head to a kv head.
  MH_INLINE upcoming panel_rows(const void* base, const int64_t* strides, const panel<T>& x, int64_t dim) const {
    return rows_ahead<D>(c, base, strides, task.batch, kv_head, x.row, c.group == 1 ? x.count : 0, dim);
  }

  template <int NV>
  MH_INLINE void attend(panel<T>& x, const tile_at& t, const T* k, int64_t k_stride, const T* v, int64_t v_stride,
                        bool careful, upcoming during_scores, upcoming during_values) {
    if (scores_of<T, NV>(c, at, x, t, by_rows<T>{k, k_stride}, scratch, during_scores) == visibility::none) return;
    const softmax_rows<T, NV> rows{x.row_max, x.row_sum, x.out, c.v_dim};
    const T exp_scale = static_cast<T>(c.exp_scale);
    rows.raise(scratch.tile_max, exp_scale, x.started);
    const T careful_factor = careful ? static_cast<T>(::exp2(-careful_shift(c.kv_len))) : T(1);
    rows.weigh_tile(scratch.scores, t.keys(), exp_scale, careful, careful_factor);
    const by_columns<T> values{v, v_stride};
    if (careful) {
      product<product_mode::add_signed, NV>(values, scratch.scores, c.v_dim, t.keys(), x.out, scratch.tile_max,
                                            during_values);
    } else if (x.started) {
      product<product_mode::add, NV>(values, scratch.scores, c.v_dim, t.keys(), x.out, scratch.tile_max, during_values);
    } else {
      product<product_mode::set, NV>(values, scratch.scores, c.v_dim, t.keys(), x.out, scratch.tile_max, during_values);
    }
    x.started = true;
  }

  // Panels [first, last) against all their keys.
  void attend_all(int64_t first, int64_t last, bool careful) {
    int64_t begin = c.kv_len;
    int64_t end = 0;
    for (int64_t i = first; i < last; ++i) {
      panel<T>& x = p[i];
      x.started = careful;  // its products always add
      for (int64_t l = 0; l < x.width(); ++l) {
        x.row_max[l] = lowest<T>;
        x.row_sum[l] = T(0);
      }
      if (careful) memset(x.out, 0, static_cast<size_t>(c.v_dim * x.width()) * sizeof(T));
      begin = min_of(begin, x.clip.begin);
      end = max_of(end, x.clip.end);
    }
    begin = max_of(begin, task.chunk * c.chunk_keys);
    if (c.chunks > 1) end = min_of(end, (task.chunk + 1) * c.chunk_keys);
    for (int64_t b = begin / c.block_kv * c.block_kv; b < end; b += c.block_kv) {
      const int64_t tile_begin = max_of(b, begin);
      const int64_t tile_end = min_of(b + c.block_kv, end);
      const T* k = kv_rows<D>(c.k, c.k_strides, task.batch, kv_head, tile_begin, tile_end - tile_begin, c.head_dim,
                              c.copy_kv, scratch.k_copy);
      const T* v = kv_rows<D>(c.v, c.v_strides, task.batch, kv_head, tile_begin, tile_end - tile_begin, c.v_dim,
                              c.copy_kv, scratch.v_copy);
      const int64_t k_stride = c.copy_kv ? c.head_dim : c.k_strides[2];
      const int64_t v_stride = c.copy_kv ? c.v_dim : c.v_strides[2];
      // What is asked for during the products, in the order of need: V of this tile (where copies are made before the
      // products, of the next one), Q of the next panel, K of the next tile or, after the last one, the panel's
      // results.
      const int64_t next_keys = min_of(b + 2 * c.block_kv, end) - tile_end;
      upcoming next_v = rows_ahead<D>(c, c.v, c.v_strides, task.batch, kv_head, c.copy_kv ? tile_end : tile_begin,
                                      c.copy_kv ? next_keys : tile_end - tile_begin, c.v_dim);
      upcoming next_k = rows_ahead<D>(c, c.k, c.k_strides, task.batch, kv_head, tile_end, next_keys, c.head_dim);
      for (int64_t i = first; i < last; ++i) {
        panel<T>& x = p[i];
        const tile_at t{
            task.batch, kv_head, x.row, x.count, max_of(tile_begin, x.clip.begin), min_of(tile_end, x.clip.end)};
        if (t.keys() <= 0) continue;
        if (!x.packed) pack_q<D>(c, task.batch, kv_head, x);
        x.packed = true;
        const T* kt = k + (t.begin - tile_begin) * k_stride;
        const T* vt = v + (t.begin - tile_begin) * v_stride;
        upcoming next;
        if (i + 1 < last && !p[i + 1].packed) {
          next = panel_rows(c.q, c.q_strides, p[i + 1], c.head_dim);
        } else if (next_keys <= 0) {
          next = panel_rows(c.out, c.out_strides, x, c.chunks > 1 ? 0 : c.v_dim);
        } else {
          next = next_k;
          next_k = {};
        }
        switch (x.vectors) {
          case 1:
            attend<1>(x, t, kt, k_stride, vt, v_stride, careful, next_v, next);
            break;
          case 2:
            attend<2>(x, t, kt, k_stride, vt, v_stride, careful, next_v, next);
            break;
          default:
            attend<max_panel_vectors>(x, t, kt, k_stride, vt, v_stride, careful, next_v, next);
            break;
        }
        next_v = {};
      }
    }
  }

  // Divides, transposes and stores a panel. False: something is not finite.
  __attribute__((noinline)) bool finish(const panel<T>& x, bool careful) {
    vec<T> not_finite(T(0));  // 0 times every value: 0, or NaN from the first that is not finite
    const bool in_vectors =
        c.chunks > 1 || (sizeof(typename D::storage) == sizeof(T) && c.out_strides[3] == 1);  // rows take whole vectors
    const double undo = careful ? ::exp2(careful_shift(c.kv_len)) : 1.0;
    if (!x.started) memset(x.out, 0, static_cast<size_t>(c.v_dim * x.width()) * sizeof(T));
    for (int64_t l0 = 0; l0 < x.count; l0 += w) {
      alignas(64) T factor[w] = {};
      void* place[w];
      const int64_t count = min_of(w, x.count - l0);
      row_of r(c, x.row + l0);
      for (int64_t l = 0; l < count; ++l, r.step(c)) {
        const int64_t head = kv_head * c.group + r.member;
        const row_end e =
            finish_row<T>(x.row_max[l0 + l], x.row_sum[l0 + l], c.exp_scale, sink_of<T>(c, head, task.chunk));
        factor[l] = static_cast<T>(e.factor * undo);
        write_state<T>(c, task.batch, head, r.query, task.chunk, e);
        place[l] = place_of_row<D>(c, task.batch, head, r.query, task.chunk);
      }
      const vec<T> factors = load(factor);
      for (int64_t d0 = 0; d0 < c.v_dim; d0 += w) {
        const int64_t n = min_of(w, c.v_dim - d0);
        const T* from = x.out + d0 * x.width() + l0;
        vec<T> block[w];
        if (n == w) {
#pragma GCC unroll 16
          for (int64_t i = 0; i < w; ++i) block[i] = vec<T>::load_aligned(from + i * x.width()) * factors;
        } else {
          for (int64_t i = 0; i < w; ++i)
            block[i] = i < n ? vec<T>::load_aligned(from + i * x.width()) * factors : vec<T>(T(0));
        }
#pragma GCC unroll 16
        for (int64_t i = 0; i < w; ++i) not_finite = xsimd::fma(block[i], vec<T>(T(0)), not_finite);
        transpose<T>(block);
        if (n == w && in_vectors) {
#pragma GCC unroll 16
          for (int64_t l = 0; l < w; ++l) {
            if (l < count) store<T>(static_cast<T*>(place[l]) + d0, block[l]);
          }
        } else {
          for (int64_t l = 0; l < count; ++l) write_values<D>(c, place[l], d0, n, block[l]);
        }
      }
    }
    return xsimd::all(not_finite == vec<T>(T(0)));
  }

  void run() {
    attend_all(0, panels, false);
    // NaN or inf in a value that some row of the tile may not attend, or sums that ran over the largest float, show
    // here, and only then is the panel done again with care. A result that really is not finite comes out the same.
    for (int64_t i = 0; i < panels; ++i) {
      if (finish(p[i], false)) continue;
      attend_all(i, i + 1, true);
      finish(p[i], true);
    }
  }
};

template <class D>
void attention_tile(const kernel_call* c, const kernel_task* t) {
  tile_task<D>(*c, *t).run();
}

}  // namespace
}  // namespace manyhead::MH_ISA
