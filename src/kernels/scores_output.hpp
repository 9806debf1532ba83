// Scores as an output of their own, at the stage asked for. They are computed for it alone: at other stages than the last they
// are not those that the softmax takes.
#pragma once

#include "panel.hpp"

namespace manyhead::MH_ISA {
namespace {

template <class D>
struct scores_task {
  using T = typename D::real;
  static constexpr int64_t w = lanes<T>;

  const kernel_call& c;
  const kernel_task& task;
  positions at;
  tile_scratch<T> scratch;
  panel<T> p;

  MH_INLINE scores_task(const kernel_call& call, const kernel_task& t)
      : c(call), task(t), at(positions_of(call, t.batch)) {
    carver from{static_cast<char*>(task.scratch)};
    scratch = carve_tile<T>(from, c);
    p = carve_panel<T>(from, c, false);
  }

  // Natural units: passes later than the stage are not run, earlier ones have no say in which keys are seen.
  void compute(const tile_at& t, by_rows<T> k, int64_t width) {
    T* s = scratch.scores;
    with_vectors(p.vectors, [&]<int NV>() {
      product<product_mode::set, NV>(k, whole_panel<const T, NV>{p.q}, t.keys(), c.head_dim, whole_panel<T, NV>{s},
                                     scratch.tile_max);
    });
    if (c.scores_stage == MH_SCORES_RAW) return;
    if (c.softcap > 0) softcap_pass<T>(c, s, t.keys() * width);
    if (c.scores_stage == MH_SCORES_CAPPED) return;
    row_terms<T> rows;
    rows.look_up(c, at, t, width, c.bias != nullptr, ~uint64_t(0));
    if (c.alibi_slopes != nullptr) alibi_pass_transposed<T>(c, rows, t, width, s);
    if (c.bias != nullptr) bias_pass_transposed<T>(c, rows, t, width, s);
    if (see_tile<T>(c, at, t, width, scratch.words) != visibility::all)
      visibility_pass_transposed<T>(scratch.words, t.keys(), width, s, scratch.tile_max);
  }

  void write(const tile_at& t, int64_t width) const {
    const int64_t stride = c.scores_strides[3];
    for (int64_t l0 = 0; l0 < t.count; l0 += w) {
      const row_of first(c, t.row + l0);
      for (int64_t k0 = 0; k0 < t.keys(); k0 += w) {
        const int64_t n = min_of(w, t.keys() - k0);
        vec<T> x[w];
        for (int64_t i = 0; i < w; ++i)
          x[i] = i < n ? vec<T>::load_aligned(scratch.scores + (k0 + i) * width + l0) : vec<T>(T(0));
        transpose<T>(x);
        row_of r = first;
        for (int64_t l = 0; l < w && l0 + l < t.count; ++l, r.step(c)) {
          write_some<plain<D>>(static_cast<T*>(c.scores) + t.batch * c.scores_strides[0] +
                                   t.head(c, r) * c.scores_strides[1] + r.query * c.scores_strides[2] +
                                   (t.begin + k0) * stride,
                               stride, n, x[l]);
        }
      }
    }
  }

  // A tile's, of the panel.
  void work_on(const tile_at& t, bool in_use) {
    if (in_use) {
      const T* k = kv_rows<D>(c.k, c.k_strides, task.batch, t.kv_head, t.begin, t.keys(), c.head_dim, c.copy_kv,
                              scratch.together, scratch.k_copy);
      compute(t, {k, c.copy_kv ? c.head_dim : c.k_strides[2]}, p.width());
    } else {
      const vec<T> closed(-infinity<T>);
      for (int64_t i = 0; i < t.keys() * p.width(); i += w) closed.store_aligned(scratch.scores + i);
    }
    write(t, p.width());
  }

  void run() {
    // Keys that are not in use are not looked at where masks close them; extra keys follow them.
    const bool all = c.scores_stage != MH_SCORES_BIASED;
    const int64_t borders[] = {all ? c.kv_len : at.used, all ? c.kv_len : c.kv_len - c.extra_keys, c.kv_len};
    for (int64_t row = task.row_begin; row < task.row_end; row += p.count) {
      place_panel(c, at, task.batch, row, task.row_end, panel_vectors<T>(task.row_end - row), p);
      pack_q<D>(c, task.batch, task.kv_head_begin, p);
      int64_t begin = 0;
      for (int i = 0; i < 3; ++i) {
        for (; begin < borders[i]; begin = min_of(begin + c.block_kv, borders[i]))
          work_on({task.batch, task.kv_head_begin, p.row, p.count, begin, min_of(begin + c.block_kv, borders[i])},
                  i != 1);
      }
    }
  }
};

template <class D>
void attention_scores(const kernel_call* c, const kernel_task* t) {
  scores_task<D>(*c, *t).run();
}

}  // namespace
}  // namespace manyhead::MH_ISA
