// One task of the tile route: the rows [row_begin, row_end) of one kv head against the keys of one chunk. Key tiles
// outside, panels inside, so that a tile of K and V is read from memory (or converted) once per task:
//
//   for each key tile { for each panel { pack Q^T the first time; S^T = K Q^T; passes; softmax; O^T += V^T P^T } }
//   divide, store
//
// Panels whose keys all lie in one tile are done with it where that pays: O = P V, the same bits (row_values.hpp).
#pragma once

#include "row_values.hpp"

namespace manyhead::MH_ISA {
namespace {

template <class D>
struct tile_task {
  using T = typename D::real;
  static constexpr int64_t w = lanes<T>;

  const kernel_call& c;
  const kernel_task& task;
  positions at;
  int64_t kv_head;
  int64_t panels = 0;
  panel<T> p[most_tile_panels];
  enum class written : uint8_t { not_yet, finite, not_finite };
  written results[most_tile_panels];  // of panels whose results did not wait for the end
  tile_scratch<T> scratch;
  lines_ahead ahead;
  bool bias_closes = false;  // it may somewhere

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
    scratch.clock = task.clock;
    for (int64_t row = task.row_begin; row < task.row_end; row += p[panels++].count) {
      p[panels] = carve_panel<T>(from, c, true);
      place_panel(c, at, task.batch, row, task.row_end, panel_vectors<T>(task.row_end - row), p[panels]);
    }
    bias_closes = bias_may_close<T>(c, {task.batch, kv_head, task.row_begin, task.row_end - task.row_begin,
                                        p[0].reach.begin, p[panels - 1].reach.end});
  }

  // What the bias says of a panel's rows and of keys [begin, end).
  MH_INLINE void ask_for_its_bias(const panel<T>& x, int64_t begin, int64_t end) {
    ask_for_bias<T>(ahead, c, bias_closes, task.batch, kv_head, x, begin, end);
  }

  // A tile of keys, and the panels that take it in turn.
  struct key_tile {
    int64_t begin, end, next_end;  // keys; [end, next_end) come next
    int64_t first, last;           // panels
    by_rows<T> k;                  // from `begin` on
    by_columns<T> v;
  };

  // What masks say of a panel's rows and keys, which is looked at before all else.
  MH_INLINE void ask_for_masks(const panel<T>& x, int64_t begin, int64_t end) {
    ask_for_mask<T>(ahead, c, task.batch, kv_head, x, begin, end);
    if (bias_closes) ask_for_its_bias(x, begin, end);
  }

  // What comes after panel i, in the order of need. Asked for during the product with V: its loop has registers to spare.
  MH_INLINE void ask_for_next(int64_t i, const key_tile& tile) {
    if (i + 1 < tile.last) {
      ask_for_masks(p[i + 1], tile.begin, tile.end);
      if (!p[i + 1].packed) ahead.add(panel_ahead<D>(c, c.q, c.q_strides, task.batch, kv_head, p[i + 1], c.head_dim));
    } else if (tile.next_end > tile.end) {
      ask_for_masks(p[tile.first], tile.end, tile.next_end);
      ahead.add(
          rows_ahead<D>(c, c.k, c.k_strides, task.batch, kv_head, tile.end, tile.next_end - tile.end, c.head_dim));
    }
    ahead.add(results_ahead<D>(c, task, kv_head, tile.end, p[i]));
  }

  template <int NV>
  MH_INLINE void attend(int64_t i, const key_tile& tile, bool careful) {
    panel<T>& x = p[i];
    tile_at t{task.batch, kv_head, x.row, x.count, max_of(tile.begin, x.reach.begin), min_of(tile.end, x.clip.end)};
    const bool has_all_keys = t.begin <= x.clip.begin && t.end == x.clip.end;
    const panel_view<T> view = see_panel<T>(c, at, x, bias_closes && !careful, t, scratch);
    if (view.see == visibility::none) {
      if (keeps_scores(c)) keep_none<T>(c, task, t);
      return;
    }
    stairs<NV> steps;
    const bool uneven = NV > 1 && view.see == visibility::some && stairs_of<T, NV>(view, t.keys(), steps);
    const by_rows<T> k = tile.k.from(t.begin - tile.begin);
    if (!bias_closes) ask_for_its_bias(x, t.begin, t.end);
    scores_of<T, NV>(c, at, x, t, view, k, scratch, &ahead, uneven ? &steps : nullptr);
    if (keeps_scores(c)) keep_panel<T>(c, task, t, scratch.scores, x.width(), scratch.shift);
    const softmax_rows<T, NV> rows{x.row_max, x.row_sum, x.out, c.v_dim};
    const T exp_scale = static_cast<T>(c.exp_scale);
    rows.raise(scratch.tile_max, exp_scale, x.started);
    if (careful) {
      rows.weigh_tile_with_care(scratch.scores, t.keys(), exp_scale, c.fast_exp != 0, scratch.care);
    } else {
      rows.weigh_tile(scratch.scores, t.keys(), exp_scale, c.fast_exp != 0);
    }
    lap(task.clock, phase_softmax);
    if constexpr (has_row_values) {
      if (!careful && has_all_keys && pays_by_rows<T>(c)) {
        const bool finite =
            write_row_values<D>(c, task, kv_head, x, view, scratch.scores, tile.v.after(t.begin - tile.begin));
        results[i] = finite ? written::finite : written::not_finite;
        lap(task.clock, phase_values);
        return;
      }
    }
    ask_for_next(i, tile);
    const auto add_values = [&]<product_mode Mode>(const auto& reached) MH_INLINE_LAMBDA {
      product<Mode, NV>(tile.v.after(t.begin - tile.begin), whole_panel<const T, NV>{scratch.scores}, c.v_dim, t.keys(),
                        whole_panel<T, NV>{x.out}, scratch.tile_max, &ahead, reached);
    };
    if (careful) {  // has been started
      add_values.template operator()<product_mode::add_signed>(no_stairs{});
    } else if (uneven) {
      x.started ? add_values.template operator()<product_mode::add>(steps)
                : add_values.template operator()<product_mode::set>(steps);
    } else {
      x.started ? add_values.template operator()<product_mode::add>(no_stairs{})
                : add_values.template operator()<product_mode::set>(no_stairs{});
    }
    lap(task.clock, phase_values);
    x.started = true;
  }

  // Panels [first, last) against all their keys.
  void attend_all(int64_t first, int64_t last, bool careful) {
    int64_t begin = c.kv_len, clipped = c.kv_len, end = 0;
    for (int64_t i = first; i < last; ++i) {
      panel<T>& x = p[i];
      clear_panel(x);
      results[i] = written::not_yet;
      x.started = careful;  // its products always add
      if (careful) memset(x.out, 0, static_cast<size_t>(c.v_dim * x.width()) * sizeof(T));
      begin = min_of(begin, x.reach.begin);
      clipped = min_of(clipped, x.clip.begin);
      end = max_of(end, x.clip.end);
    }
    begin = max_of(begin, chunk_begin(c, at, task.chunk));
    if (c.chunks > 1) end = min_of(end, chunk_begin(c, at, task.chunk + 1));
    for (int64_t b = max_of(begin, clipped) / c.block_kv * c.block_kv; b < end; b += c.block_kv) {
      const int64_t tile_begin = max_of(b, begin);
      const int64_t tile_end = min_of(b + c.block_kv, end);
      const T* k = kv_rows<D>(c.k, c.k_strides, task.batch, kv_head, tile_begin, tile_end - tile_begin, c.head_dim,
                              c.copy_kv, scratch.together, scratch.k_copy);
      const T* v = kv_rows<D>(c.v, c.v_strides, task.batch, kv_head, tile_begin, tile_end - tile_begin, c.v_dim,
                              c.copy_kv, scratch.together, scratch.v_copy);
      const key_tile tile{tile_begin,
                          tile_end,
                          min_of(b + 2 * c.block_kv, end),
                          first,
                          last,
                          {k, c.copy_kv ? c.head_dim : c.k_strides[2]},
                          {v, c.copy_kv ? c.v_dim : c.v_strides[2]}};
      // V of this tile is asked for during the first product; where copies are made before it, of the next tile.
      ahead.add(rows_ahead<D>(c, c.v, c.v_strides, task.batch, kv_head, c.copy_kv ? tile_end : tile_begin,
                              c.copy_kv ? tile.next_end - tile_end : tile_end - tile_begin, c.v_dim));
      lap(task.clock, phase_pack);
      for (int64_t i = first; i < last; ++i) {
        panel<T>& x = p[i];
        if (min_of(tile_end, x.clip.end) <= max_of(tile_begin, x.clip.begin)) continue;
        if (!x.packed) {
          pack_q<D>(c, task.batch, kv_head, x);
          x.packed = true;
          lap(task.clock, phase_pack);
        }
        with_vectors(x.vectors, [&]<int NV>() MH_INLINE_LAMBDA { attend<NV>(i, tile, careful); });
      }
    }
  }

  // Without what a row may not attend, rows far from 0 brought near it (far.hpp), where rows are left with keys of the lowest bias
  // alone with those, and once more with smaller weights for rows whose sums ran over the largest number even so. The other rows'
  // bits stay, and so does a result that really is not finite.
  __attribute__((noinline)) void attend_with_care(int64_t i, uint64_t least) {
    panel<T>& x = p[i];
    x.clip = x.reach;
    scratch.least = least;
    const uint64_t far = far_rows_of(c, x);
    T* const shift = scratch.care + panel_width<T>;
    for (int64_t l = 0; l < x.width(); ++l) {
      scratch.care[l] = T(1);
      shift[l] = (far >> l & 1U) != 0 ? x.row_max[l] : T(0);
    }
    if (far != 0) scratch.shift = shift;
    attend_all(i, i + 1, true);
    if (lower_weights<T>(x, c.v_dim, c.kv_len, scratch.care)) attend_all(i, i + 1, true);
    finish_panel<D>(c, task, kv_head, x, scratch.care);
    scratch.shift = nullptr;
    scratch.least = 0;
  }

  // Rows of a panel that are left with keys of the lowest bias alone, a bit each.
  MH_INLINE uint64_t least_rows_of(const panel<T>& x) const {
    const uint64_t empty = c.bias != nullptr ? empty_rows_of(x) : 0;
    return empty == 0 ? 0 : rows_of_least<T>(c, at, all_of(c, at, task, kv_head, x), x.reach, empty);
  }

  // False: something is not finite.
  bool finish(int64_t i) {
    const bool finite =
        results[i] == written::not_yet ? finish_panel<D>(c, task, kv_head, p[i]) : results[i] == written::finite;
    lap(task.clock, phase_store);
    return finite;
  }

  // A panel once more, in which rows attend keys of the lowest bias. False: something is not finite.
  __attribute__((noinline)) bool attend_least(int64_t i, uint64_t least) {
    const bool closes = bias_closes;
    bias_closes = false;
    p[i].clip = p[i].reach;
    scratch.least = least;
    attend_all(i, i + 1, false);
    scratch.least = 0;
    bias_closes = closes;
    return finish(i);
  }

  void run() {
    attend_all(0, panels, false);
    // NaN or inf in a value that some row of the panel may not attend, or sums over the largest number, show here.
    for (int64_t i = 0; i < panels; ++i) {
      bool finite = finish(i);
      const uint64_t least = least_rows_of(p[i]);
      if (least != 0 && finite) finite = attend_least(i, least);
      if (finite && far_rows_of(c, p[i]) == 0) continue;
      attend_with_care(i, least);
      lap(task.clock, phase_store);
    }
  }
};

template <class D>
void attention_tile(const kernel_call* c, const kernel_task* t) {
  tile_task<D>(*c, *t).run();
}

}  // namespace
}  // namespace manyhead::MH_ISA
