// A panel: up to three vectors of neighbouring rows, Q^T packed and scaled, their state, and the ways in and out of it.
#pragma once

#include "closing.hpp"
#include "far.hpp"
#include "kept.hpp"
#include "matrix_unit.hpp"
#include "phases.hpp"
#include "product.hpp"
#include "results.hpp"
#include "softmax.hpp"
#include "together.hpp"

namespace manyhead::MH_ISA {
namespace {

template <class T>
inline constexpr int64_t panel_width = max_panel_vectors * lanes<T>;

// How many vectors wide the next panel is when `rows` are left: the widest, but four vectors are halved (2 + 2 runs
// faster than 3 + 1).
template <class T>
MH_INLINE int panel_vectors(int64_t rows) {
  const int64_t vectors = (rows + lanes<T> - 1) / lanes<T>;
  if (vectors >= max_panel_vectors) return vectors == 4 && max_panel_vectors == 3 ? 2 : max_panel_vectors;
  return static_cast<int>(vectors);
}

// Of any route: those of the matrix unit have its rows, whatever the vectors.
template <class T>
inline constexpr int64_t most_panel_vectors = max_of(max_panel_vectors, unit_rows / lanes<T>);

template <class T>
struct panel {
  int64_t row, count;  // rows [row, row + count)
  int vectors;
  bool packed;         // q is there
  bool started;        // out holds something
  bool awaited;        // where its results go has been asked for
  key_range reach;     // keys that any row may attend, as far as positions go
  key_range whole;     // those that every row may attend, as far as positions and openings of masks go
  key_range clip;      // those of `reach` that openings leave to any row
  key_range unbiased;  // keys of which openings say that the bias leaves them as they are
  bool closes;         // openings say that the bias closes keys
  T* q;                // [head_dim][width]
  T* out;              // [v_dim][width]
  T* row_max;          // [width]
  T* row_sum;          // [width]: of the weights as values are multiplied with them
  T* row_total;        // [width]: before they were rounded for that; the same where they are not
  MH_INLINE int64_t width() const { return vectors * lanes<T>; }
};

// What panels share while a tile is worked on.
template <class T>
struct tile_scratch {
  T* scores;           // [block_kv][panel_width]
  T* tile_max;         // [panel_width]
  bits<T>* words;      // [block_kv / word_keys + 1][panel_width]
  T* k_copy;           // [block_kv][head_dim], with copy_kv
  T* v_copy;           // [block_kv][v_dim]
  void* together;      // rows of K or V as they are, where elements lie apart
  T* care;             // [panel_width]: what weights of a row are multiplied with where a panel is done with care
  T* shift = nullptr;  // [panel_width], behind care: by so much scores of a row are less then (far.hpp), if any are
  T* products;         // [block_kv][panel_width], for these
  uint64_t least = 0;  // rows of the panel that attend keys of the lowest bias (closing.hpp), a bit each
  phase_clock* clock = nullptr;
};

// Hands out 64-byte aligned pieces of a task's scratch; with base = nullptr it only adds up.
struct carver {
  char* base;
  int64_t used = 0;
  template <class X>
  MH_INLINE X* take(int64_t n) {
    char* at = base == nullptr ? nullptr : base + used;
    used += round_up<64>(n * static_cast<int64_t>(sizeof(X)));
    return reinterpret_cast<X*>(at);
  }
};

template <class T>
MH_INLINE tile_scratch<T> carve_tile(carver& from, const kernel_call& c) {
  tile_scratch<T> s;
  s.scores = from.take<T>(c.block_kv * panel_width<T>);
  s.tile_max = from.take<T>(panel_width<T>);
  s.words = from.take<bits<T>>((c.block_kv / word_keys + 1) * panel_width<T>);
  s.k_copy = from.take<T>(c.copy_kv ? c.block_kv * c.head_dim : 0);
  s.v_copy = from.take<T>(c.copy_kv ? c.block_kv * c.v_dim : 0);
  s.together = from.take<T>(elements_apart(c));
  s.care = from.take<T>(2 * panel_width<T>);
  s.products = from.take<T>(may_lie_far<T>(c) ? c.block_kv * panel_width<T> : 0);
  return s;
}

template <class T>
MH_INLINE panel<T> carve_panel(carver& from, const kernel_call& c, bool with_out) {
  panel<T> p{};
  p.q = from.take<T>(round_up<lanes<T>>(c.head_dim) * panel_width<T>);
  p.out = from.take<T>(with_out ? round_up<lanes<T>>(c.v_dim) * panel_width<T> : 0);
  p.row_max = from.take<T>(panel_width<T>);
  p.row_total = p.row_sum = from.take<T>(panel_width<T>);
  return p;
}

template <class D>
MH_INLINE row_walk<const typename D::storage> rows_of_q(const kernel_call& c, int64_t batch, int64_t kv_head,
                                                        int64_t row) {
  const auto* q = static_cast<const typename D::storage*>(c.q) + batch * c.q_strides[0];
  return {c, row, q + kv_head * c.group * c.q_strides[1], c.q_strides[1], c.q_strides[2]};
}

// Where `n` of a row's `size` elements that begin at i are taken: those that end the row where fewer are left, some of them
// for the second time, so that all are whole vectors.
MH_INLINE int64_t last_whole(int64_t i, int64_t size, int64_t n) { return size < n ? i : min_of(i, size - n); }

// Q^T, times q_scale; lanes behind the last row are 0.
template <class D>
__attribute__((noinline)) void pack_q(const kernel_call& c, int64_t batch, int64_t kv_head,
                                      const panel<typename D::real>& p) {
  using T = typename D::real;
  constexpr int64_t w = lanes<T>;
  const vec<T> scale(static_cast<T>(c.q_scale));
  const bool dense = c.q_strides[3] == 1;
  row_walk<const typename D::storage> r = rows_of_q<D>(c, batch, kv_head, p.row);
  for (int64_t l0 = 0; l0 < p.width(); l0 += w) {
    const typename D::storage* from[w];
    const int64_t count = min_of(w, p.count - l0);
    for (int64_t l = 0; l < count; ++l, r.step(c)) from[l] = r.at;
    for (int64_t begin = 0; begin < c.head_dim; begin += w) {
      const int64_t d0 = dense ? last_whole(begin, c.head_dim, w) : begin;
      const int64_t n = min_of(w, c.head_dim - d0);
      vec<T> rows[w];
      if (n == w && dense) {
#pragma GCC unroll 16
        for (int64_t l = 0; l < w; ++l) rows[l] = l < count ? D::widen(from[l] + d0) * scale : vec<T>(T(0));
      } else {
        for (int64_t l = 0; l < w; ++l) {
          alignas(64) T buffer[w] = {};
          if (l < count) widen_row<D>(from[l] + d0 * c.q_strides[3], c.q_strides[3], n, buffer);
          rows[l] = load(buffer) * scale;
        }
      }
      transpose<T>(rows);
#pragma GCC unroll 16
      for (int64_t i = 0; i < w; ++i) rows[i].store_aligned(p.q + (d0 + i) * p.width() + l0);
    }
  }
}

// What openings leave to a panel that has been placed. Scores that are kept are of all keys.
template <class T>
__attribute__((noinline)) void open_panel(const kernel_call& c, int64_t batch, panel<T>& p) {
  const auto clip_to = [&](const opening& of) {
    if (keeps_scores(c)) return;
    p.clip.begin = max_of(p.clip.begin, min_of(of.any_begin, c.kv_len - c.extra_keys));  // not behind extra keys
    if (c.extra_keys == 0) p.clip.end = min_of(p.clip.end, of.any_end);
  };
  for (const openings* const open : {&c.mask_open, &c.key_mask_open}) {
    if (open->words == nullptr) continue;
    const opening of = opening_of_rows(c, *open, batch, p.row, p.count);
    p.whole = {max_of(p.whole.begin, of.all_begin), min_of(p.whole.end, of.all_end)};
    clip_to(of);
  }
  if (c.bias_open.words != nullptr) {
    const opening of = opening_of_rows(c, c.bias_open, batch, p.row, p.count);
    p.closes = of.closes;
    if (!of.closes) return;
    if (!of.adds) p.unbiased = {of.all_begin, of.all_end};
    clip_to(of);
  }
}

// Sets what the panel at `row` covers.
template <class T>
MH_INLINE void place_panel(const kernel_call& c, const positions& at, int64_t batch, int64_t row, int64_t end,
                           int vectors, panel<T>& p) {
  p.row = row;
  p.vectors = vectors;
  p.count = min_of(p.width(), end - row);
  p.packed = false;
  p.started = false;
  p.awaited = false;
  const key_range first = range_of(c, at, row / c.group);
  const key_range last = range_of(c, at, (row + p.count - 1) / c.group);
  p.clip = p.reach = {first.begin, c.extra_keys > 0 ? c.kv_len : last.end};
  p.whole = {last.begin, first.end};
  p.unbiased = {0, 0};
  p.closes = false;
  if (c.mask_open.words != nullptr || c.key_mask_open.words != nullptr || c.bias_open.words != nullptr)
    open_panel(c, batch, p);
}

// Nothing attended yet.
template <class T>
MH_INLINE void clear_panel(panel<T>& p) {
  p.started = false;
  for (int64_t l = 0; l < p.width(); l += lanes<T>) {
    vec<T>(lowest<T>).store_aligned(p.row_max + l);
    vec<T>(T(0)).store_aligned(p.row_sum + l);
    vec<T>(T(0)).store_aligned(p.row_total + l);
  }
}

// Rows of K or V for a tile: in place, or copied to `copy` as contiguous T.
template <class D>
MH_INLINE const typename D::real* kv_rows(const void* base, const int64_t* strides, int64_t batch, int64_t kv_head,
                                          int64_t begin, int64_t keys, int64_t dim, bool copied, void* together,
                                          typename D::real* copy) {
  using S = typename D::storage;
  constexpr bool is_real = sizeof(S) == sizeof(typename D::real);  // brought together they are what the copy would be
  const S* from = static_cast<const S*>(base) + batch * strides[0] + kv_head * strides[1] + begin * strides[2];
  if (!copied) return reinterpret_cast<const typename D::real*>(from);
  S* const to = is_real ? reinterpret_cast<S*>(copy) : static_cast<S*>(together);
  const rows_at<D> rows = neighbours(rows_at<D>{from, strides[2]}, keys, strides, dim, to);
  if (is_real && rows.base == to) return copy;
  for (int64_t k = 0; k < keys; ++k) widen_row<D>(rows.from(k).base, 1, dim, copy + k * dim);
  return copy;
}

// Rows [begin, begin + rows) of q, k, v or out, to be asked for ahead where the plan says so.
template <class D>
MH_INLINE upcoming rows_ahead(const kernel_call& c, const void* base, const int64_t* strides, int64_t batch,
                              int64_t head, int64_t begin, int64_t rows, int64_t dim) {
  if (!c.prefetch || strides[3] != 1 || rows <= 0) return {};
  constexpr int64_t size = sizeof(typename D::storage);
  const char* from =
      static_cast<const char*>(base) + (batch * strides[0] + head * strides[1] + begin * strides[2]) * size;
  return {from, strides[2] * size, dim * size, rows};
}

// Those of q or out that a panel has, where they lie evenly: with one query head to a kv head.
template <class D>
MH_INLINE upcoming panel_ahead(const kernel_call& c, const void* base, const int64_t* strides, int64_t batch,
                               int64_t kv_head, const panel<typename D::real>& x, int64_t dim) {
  return rows_ahead<D>(c, base, strides, batch, kv_head, x.row, c.group == 1 ? x.count : 0, dim);
}

// Where a panel's results go, once: with the tile that ends at key `end`, when few of the panel's keys follow it. The last
// few would be over before all is asked for. Parts of a split lie in memory of their own.
template <class D>
MH_INLINE upcoming results_ahead(const kernel_call& c, const kernel_task& task, int64_t kv_head, int64_t end,
                                 panel<typename D::real>& x) {
  constexpr int64_t few = 32;
  if (x.awaited || c.chunks > 1 || x.clip.end - end >= few) return {};
  x.awaited = true;
  return panel_ahead<D>(c, c.out, c.out_strides, task.batch, kv_head, x, c.v_dim);
}

// Asks for what a mask or bias, of elements of `size` bytes, says of a panel's rows and of keys [begin, end).
template <class T>
MH_INLINE void ask_for_terms(lines_ahead& ahead, const kernel_call& c, const void* base, const int64_t* strides,
                             int64_t size, int64_t batch, int64_t kv_head, const panel<T>& x, int64_t begin,
                             int64_t end) {
  const int64_t keys = min_of(end, c.kv_len - c.extra_keys) - begin;
  if (base == nullptr || !c.prefetch || strides[3] != 1 || keys <= 0) return;
  const int64_t first = x.row / c.group;
  const int64_t queries = strides[2] == 0 ? 1 : (x.row + x.count - 1) / c.group - first + 1;
  const int64_t members = strides[1] == 0 ? 1 : c.group;
  for (int64_t member = 0; member < members; ++member) {
    const int64_t at_row = batch * strides[0] + (kv_head * c.group + member) * strides[1] + first * strides[2];
    const char* const from = static_cast<const char*>(base) + (at_row + begin) * size;
    // From a whole line on, but rows that are not whole lines apart may begin anywhere in one.
    const int64_t to_row = strides[2] * size;
    const bool alike = queries == 1 || to_row % 64 == 0;
    const int64_t before = alike ? static_cast<int64_t>(reinterpret_cast<uintptr_t>(from) % 64) : 0;
    const int64_t bytes = keys * size + (alike ? before : 63);
    ahead.add({from - before, queries == 1 ? bytes : to_row, bytes, queries});
  }
}

// The same of the mask, and of the bias; closes: whether it may. Not where openings are looked up instead.
template <class T>
MH_INLINE void ask_for_mask(lines_ahead& ahead, const kernel_call& c, int64_t batch, int64_t kv_head, const panel<T>& x,
                            int64_t begin, int64_t end) {
  const void* const base = c.mask_open.words != nullptr ? nullptr : c.mask;
  ask_for_terms<T>(ahead, c, base, c.mask_strides, 1, batch, kv_head, x, begin, end);
}
template <class T>
MH_INLINE void ask_for_bias(lines_ahead& ahead, const kernel_call& c, bool closes, int64_t batch, int64_t kv_head,
                            const panel<T>& x, int64_t begin, int64_t end) {
  const void* const base = closes && c.bias_open.words != nullptr ? nullptr : c.bias;
  ask_for_terms<T>(ahead, c, base, c.bias_strides, bias_bytes(c), batch, kv_head, x, begin, end);
}

// What a panel sees of a tile.
template <class T>
struct panel_view {
  visibility see;
  bool adds_bias;        // to what its rows see
  const bits<T>* words;  // where some: of the rows and the keys
  // Of each vector of rows: keys from the first that a row sees to behind the last, counted from the tile's first.
  key_range seen[most_panel_vectors<T>];
};

// Leaves out of t the keys at its ends that no row sees, at its begin in whole words. Not where scores are kept.
template <class T>
__attribute__((noinline)) void narrow_panel(const kernel_call& c, const panel<T>& p, tile_at& t, panel_view<T>& view) {
  key_range seen{t.keys(), 0};
  for (int v = 0; v < p.vectors; ++v) {
    view.seen[v] = seen_keys<T>(view.words + v * lanes<T>, p.width(), t.keys());
    seen = joined(seen, view.seen[v]);
  }
  if (keeps_scores(c) || (seen.begin < word_keys && seen.end == t.keys())) return;
  const int64_t left_out = round_down<word_keys>(seen.begin);
  t.end = t.begin + seen.end;
  t.begin += left_out;
  view.words += left_out / word_keys * p.width();
  for (int v = 0; v < p.vectors; ++v) {  // there may be some that see nothing
    view.seen[v] = {min_of(view.seen[v].begin - left_out, t.keys()), max_of(0, view.seen[v].end - left_out)};
  }
  if (see_all<T>(view.words, p.width(), t.keys())) view.see = visibility::all;
}

// Where nothing hides a key nothing is looked up. looks: whether the bias may close keys somewhere.
template <class T>
MH_INLINE panel_view<T> see_panel(const kernel_call& c, const positions& at, const panel<T>& p, bool looks, tile_at& t,
                                  const tile_scratch<T>& scratch) {
  panel_view<T> view{visibility::all, c.bias != nullptr, scratch.words, {}};
  for (int v = 0; v < p.vectors; ++v) view.seen[v] = {0, t.keys()};
  const auto lies_in = [&](const key_range& keys) { return t.begin >= keys.begin && t.end <= keys.end; };
  const bool mask_hides = (c.mask != nullptr && c.mask_open.words == nullptr) ||
                          (c.key_mask != nullptr && c.key_mask_open.words == nullptr);
  const bool bias_alone = !mask_hides && lies_in(p.whole);
  const bool looks_here = looks && (c.bias_open.words != nullptr ? p.closes : bias_may_close<T>(c, t));
  if (bias_alone && looks_here && lies_in(p.unbiased)) view.adds_bias = false;
  if (bias_alone && !(looks_here && view.adds_bias)) return view;
  const tile_view of = view_tile<T>(c, at, t, p.width(), looks_here, scratch.words);
  view.see = of.see;
  view.adds_bias = of.adds_bias;
  if (view.see == visibility::some) {
    narrow_panel(c, p, t, view);
    if (bias_alone && view.adds_bias) view.see = visibility::all;  // adding it closes keys, too
  }
  lap(scratch.clock, phase_mask);
  return view;
}

// Everything that changes scores `s` of the keys of t, and their column maxima, which raise tile_max. The scores are still
// to be multiplied with `scale`, which the first pass does. Closes: bias_pass_transposed. Rough: softcap_pass.
template <class T, int NV, bool Closes, bool Rough = false>
MH_INLINE void change_scores(const kernel_call& c, const row_terms<T>& rows, const tile_at& t,
                             const panel_view<T>& view, T* s, T* tile_max, double scale = 1) {
  constexpr int64_t w = lanes<T>;
  constexpr int64_t width = NV * w;
  const auto once = [&] {
    const double first = scale;
    scale = 1;
    return first;
  };
  // Scores that no row sees do not count.
  T* const column_max = view.see == visibility::some ? nullptr : tile_max;
  if (c.softcap > 0) softcap_pass<T, Rough>(c, s, t.keys() * width, once());
  if (c.alibi_slopes != nullptr)
    alibi_pass_transposed<T>(c, rows, t, width, s, once(), !view.adds_bias ? column_max : nullptr);
  if (view.adds_bias) bias_pass_transposed<T, Closes>(c, rows, t, width, s, once(), column_max);
  if (scale != 1) {
    const vec<T> factor(static_cast<T>(scale));
    for (int64_t i = 0; i < t.keys() * width; i += w) (vec<T>::load_aligned(s + i) * factor).store_aligned(s + i);
  }
  if (view.see == visibility::some) return visibility_pass_transposed<T>(view.words, t.keys(), width, s, tile_max);
  if (c.alibi_slopes != nullptr || view.adds_bias) return;
#pragma GCC unroll 8
  for (int64_t l = 0; l < width; l += w) {
    store<T>(tile_max + l, top_of<T>(load(tile_max + l), t.keys(),
                                     [&](int64_t key) MH_INLINE_LAMBDA { return load(s + key * width + l); }));
  }
}

// The same for a whole tile. A function of its own: within the task's, g++ with sanitizers was not done in 17 minutes.
template <class T, int NV>
__attribute__((noinline)) void change_tile(const kernel_call& c, const positions& at, const tile_at& t,
                                           const panel_view<T>& view, const tile_scratch<T>& scratch) {
  row_terms<T> rows;
  rows.look_up(c, at, t, NV * lanes<T>, view.adds_bias, scratch.least);
  constexpr int64_t width = NV * lanes<T>;
  if (scratch.shift != nullptr)
    memcpy(scratch.products, scratch.scores, static_cast<size_t>(t.keys() * width) * sizeof(T));
  change_scores<T, NV, true>(c, rows, t, view, scratch.scores, scratch.tile_max);
  row_of r(c, t.row);
  for (int64_t l = 0; scratch.shift != nullptr && l < t.count; ++l, r.step(c)) {
    if (scratch.shift[l] == 0) continue;
    scratch.tile_max[l] = bring_near<T>(c, at, t, r, static_cast<double>(scratch.shift[l]), scratch.products + l,
                                        scratch.scores + l, width);
  }
}

// What each vector of a panel reaches of a tile, in steps of 16 keys, whole tiles of the product; no less than a vector before it
// reaches at the end, or one behind it at the begin. False: all reach all.
template <class T, int NV>
MH_INLINE bool stairs_of(const panel_view<T>& view, int64_t keys, stairs<NV>& reached) {
  for (int v = 0; v < NV; ++v) {
    reached.end[v] = min_of(round_up<16>(view.seen[v].end), keys);
    if (v > 0) reached.end[v] = max_of(reached.end[v], reached.end[v - 1]);
  }
  for (int v = NV - 1; v >= 0; --v) {
    reached.begin[v] = round_down<16>(view.seen[v].begin);
    if (v + 1 < NV) reached.begin[v] = min_of(reached.begin[v], reached.begin[v + 1]);
  }
  if (reached.begin[NV - 1] > reached.end[0]) {
    for (int v = 0; v < NV; ++v) reached.begin[v] = 0;
  }
  return reached.begin[NV - 1] > 0 || reached.end[0] < keys;
}

// S^T of a tile for those vectors that reach it. What others hold is whatever was there: no row sees it.
template <class T, int NV>
MH_INLINE void scores_on_stairs(by_rows<T> k, const panel<T>& p, int64_t head_dim, const tile_scratch<T>& scratch,
                                lines_ahead* ahead, const stairs<NV>& reached) {
  const auto some = [&]<int V0, int V1>(int64_t first, int64_t last) MH_INLINE_LAMBDA {
    if (first >= last) return;
    constexpr int64_t width = NV * lanes<T>;
    const in_panel<const T> q{p.q + V0 * lanes<T>, width};
    const in_panel<T> s{scratch.scores + first * width + V0 * lanes<T>, width};
    product<product_mode::set, V1 - V0>(k.from(first), q, last - first, head_dim, s, scratch.tile_max, ahead);
  };
  if constexpr (NV > 1) some.template operator()<0, 1>(reached.begin[0], reached.begin[1]);
  if constexpr (NV > 2) some.template operator()<0, 2>(reached.begin[1], reached.begin[2]);
  some.template operator()<0, NV>(reached.begin[NV - 1], reached.end[0]);
  if constexpr (NV > 1) some.template operator()<1, NV>(reached.end[0], reached.end[1]);
  if constexpr (NV > 2) some.template operator()<2, NV>(reached.end[1], reached.end[2]);
}

// S^T of a tile with everything that changes scores, and its column maxima.
template <class T, int NV>
MH_INLINE void scores_of(const kernel_call& c, const positions& at, const panel<T>& p, const tile_at& t,
                         const panel_view<T>& view, by_rows<T> k, const tile_scratch<T>& scratch, lines_ahead* ahead,
                         const stairs<NV>* reached) {
  const whole_panel<const T, NV> q{p.q};
  const whole_panel<T, NV> s{scratch.scores};
  for (int v = 0; v < NV; ++v) vec<T>(-infinity<T>).store_aligned(scratch.tile_max + v * lanes<T>);
  if (view.see == visibility::all && !has_score_passes(c, view.adds_bias)) {
    product<product_mode::set_max, NV>(k, q, t.keys(), c.head_dim, s, scratch.tile_max, ahead);
    lap(scratch.clock, phase_scores);
    return;
  }
  if (reached != nullptr) {
    scores_on_stairs<T, NV>(k, p, c.head_dim, scratch, ahead, *reached);
  } else {
    product<product_mode::set, NV>(k, q, t.keys(), c.head_dim, s, scratch.tile_max, ahead);
  }
  lap(scratch.clock, phase_scores);
  change_tile<T, NV>(c, at, t, view, scratch);
  lap(scratch.clock, phase_mask);
}

// The row's place in arrays [batch][heads][q_len].
MH_INLINE int64_t row_index(const kernel_call& c, int64_t batch, int64_t head, int64_t query) {
  return (batch * c.heads + head) * c.q_len + query;
}

template <class T>
MH_INLINE double sink_of(const kernel_call& c, int64_t head, int64_t chunk) {
  return c.sinks != nullptr && chunk == 0 ? static_cast<double>(static_cast<const T*>(c.sinks)[head])
                                          : -__builtin_inf();
}

// Whether more is to be made of a row's maximum and sum than the factor of its result.
MH_INLINE bool ends_count(const kernel_call& c) { return c.sinks != nullptr || c.lse != nullptr || c.chunks > 1; }

// Where rows' lse go, or of a split their states; of neither nowhere.
template <class T>
MH_INLINE row_walk<char> rows_of_states(const kernel_call& c, const kernel_task& task, int64_t kv_head, int64_t row) {
  const int64_t head = kv_head * c.group;
  if (c.chunks > 1) {
    double* const states =
        c.partial_states + 2 * (task.chunk * c.batch * c.heads * c.q_len + row_index(c, task.batch, head, 0));
    constexpr int64_t size = 2 * sizeof(double);
    return {c, row, reinterpret_cast<char*>(states), c.q_len * size, size};
  }
  if (c.lse == nullptr) return {c, row, nullptr, 0, 0};
  auto* lse = static_cast<T*>(c.lse) + task.batch * c.lse_strides[0] + head * c.lse_strides[1];
  constexpr int64_t size = sizeof(T);
  return {c, row, reinterpret_cast<char*>(lse), c.lse_strides[1] * size, c.lse_strides[2] * size};
}

// Up to N rows that end together.
template <class T, int64_t N>
struct ended_rows {
  alignas(64) double top[N], total[N];  // states; totals are of weights before they were rounded,
  alignas(64) double sum[N], sink[N];   // sums of those that values were multiplied with, -inf for no sink
  alignas(64) double factor[N];         // what values are multiplied with, where there are sinks
  void* place[N];                       // rows_of_states; NULL where nothing is to be written

  MH_INLINE void finish(const kernel_call& c, int64_t count) {
    constexpr int64_t w = lanes<double>;
    static_assert(N % w == 0);
    for (int64_t i = count; i < round_up<w>(count); ++i) top[i] = 0, total[i] = sum[i] = 1, sink[i] = 0;
    for (int64_t i = 0; c.sinks != nullptr && i < count; i += w) {
      const vec<double> of_keys = load(total + i), of_values = load(sum + i);
      row_states rows{load(top + i), of_keys};
      const vec<double> share = add_sinks(rows, load(sink + i), c.exp_scale);
      rows.top.store_aligned(top + i);
      rows.total.store_aligned(total + i);
      const vec<double> none(0.0), one(1.0);
      const vec<double> rounding = xsimd::select(of_keys == of_values, one, of_keys / of_values);
      xsimd::select(of_keys == none, none, share / rows.total * rounding).store_aligned(factor + i);
    }
  }

  MH_INLINE void write(const kernel_call& c, int64_t count) {
    for (int64_t i = 0; c.chunks > 1 && i < count; ++i) {
      if (place[i] == nullptr) continue;
      double* const state = static_cast<double*>(place[i]);
      state[0] = top[i];
      state[1] = total[i];
    }
    if (c.chunks > 1 || c.lse == nullptr) return;
    const auto set = [&](int64_t i, double lse) MH_INLINE_LAMBDA {
      if (place[i] != nullptr) *static_cast<T*>(place[i]) = as_real<T>(lse);
    };
    if (count == 1) return set(0, lse_of(top[0], total[0], c.exp_scale, c.lse_base));  // waits for no memory
    for (int64_t i = 0; i < count; i += lanes<double>)
      lse_of({load(top + i), load(total + i)}, c.exp_scale, c.lse_base).store_aligned(top + i);
    for (int64_t i = 0; i < count; ++i) set(i, top[i]);
  }
};

// Where finished rows go: T of the partial results of a split, or the storage type of out.
template <class D>
MH_INLINE row_walk<char> rows_of_results(const kernel_call& c, const kernel_task& task, int64_t kv_head, int64_t row) {
  const int64_t head = kv_head * c.group;
  if (c.chunks > 1) {
    auto* out = static_cast<typename D::real*>(c.partial_out);
    out += (task.chunk * c.batch * c.heads * c.q_len + row_index(c, task.batch, head, 0)) * c.v_dim;
    const int64_t size = c.v_dim * static_cast<int64_t>(sizeof(*out));
    return {c, row, reinterpret_cast<char*>(out), c.q_len * size, size};
  }
  auto* out = static_cast<typename D::storage*>(c.out) + task.batch * c.out_strides[0] + head * c.out_strides[1];
  constexpr int64_t size = sizeof(*out);
  return {c, row, reinterpret_cast<char*>(out), c.out_strides[1] * size, c.out_strides[2] * size};
}

// The first n values of a vector, `stride` apart.
template <class D>
MH_INLINE void write_some(typename D::storage* to, int64_t stride, int64_t n, vec<typename D::real> x) {
  constexpr int64_t w = lanes<typename D::real>;
  if (n == w && stride == 1) return D::narrow(x, to);
  alignas(64) typename D::storage buffer[w];
  D::narrow(x, buffer);
  if (stride == 1) return store_some(to, n, buffer);
  for (int64_t i = 0; i < n; ++i) to[i * stride] = buffer[i];
}

// n values of it, from dim d on.
template <class D>
MH_INLINE void write_values(const kernel_call& c, void* row, int64_t d, int64_t n, vec<typename D::real> x) {
  using T = typename D::real;
  if (c.chunks > 1) return write_some<plain<D>>(static_cast<T*>(row) + d, 1, n, x);
  const int64_t stride = c.out_strides[3];
  write_some<D>(static_cast<typename D::storage*>(row) + d * stride, stride, n, x);
}

// So small that weights times it, added up over so many keys, are below 1: sums of values near the largest number stay finite.
template <class T>
MH_INLINE T factor_of_care(int64_t keys) {
  double bits_needed = lazy_rescale + 1;
  while (keys > 0) {
    bits_needed += 1;
    keys /= 2;
  }
  return static_cast<T>(::exp2(-bits_needed));
}

// Sets what care multiplies a row's weights with from now on: factor_of_care where values are not finite. False: nowhere.
template <class T>
__attribute__((noinline)) bool lower_weights(const panel<T>& x, int64_t v_dim, int64_t keys, T* care) {
  bool all_finite = true;
  for (int64_t l0 = 0; l0 < x.width(); l0 += lanes<T>) {
    finite_check<T> finite;
    for (int64_t d = 0; d < v_dim; ++d) finite.see(vec<T>::load_aligned(x.out + d * x.width() + l0));
    all_finite = all_finite && finite.passed();
    xsimd::select(finite.sum() == vec<T>(T(0)), vec<T>(T(1)), vec<T>(factor_of_care<T>(keys))).store_aligned(care + l0);
  }
  return !all_finite;
}

// Rows of a panel whose scores lie far from 0, a bit each.
template <class T>
MH_INLINE uint64_t far_rows_of(const kernel_call& c, const panel<T>& x) {
  uint64_t rows = 0;
  for (int64_t l = 0; may_lie_far<T>(c) && l < x.count; ++l) rows |= static_cast<uint64_t>(lies_far(x.row_max[l])) << l;
  return rows;
}

// A panel's rows, and of its keys those of the task's part of a split.
template <class T>
MH_INLINE tile_at all_of(const kernel_call& c, const positions& at, const kernel_task& task, int64_t kv_head,
                         const panel<T>& x) {
  tile_at t{task.batch, kv_head, x.row, x.count, x.reach.begin, x.reach.end};
  if (c.chunks > 1) {
    t.begin = max_of(t.begin, chunk_begin(c, at, task.chunk));
    t.end = min_of(t.end, chunk_begin(c, at, task.chunk + 1));
  }
  return t;
}

// Rows of a panel that have no weight, a bit each.
template <class T>
MH_INLINE uint64_t empty_rows_of(const panel<T>& x) {
  uint64_t rows = 0;
  for (int64_t l = 0; l < x.count; l += lanes<T>)
    rows |= static_cast<uint64_t>((load(x.row_total + l) == vec<T>(T(0))).mask()) << l;
  return x.count < 64 ? rows & ((uint64_t(1) << x.count) - 1) : rows;
}

// Of the rows of a panel's vector at l0, from r on: what each is multiplied with, and in `place` where it goes. Their states
// and lse are written. care: what the weights were multiplied with, if anything, and behind it by what scores were less.
template <class D>
MH_INLINE vec<typename D::real> end_rows(const kernel_call& c, const kernel_task& task, int64_t kv_head,
                                         const panel<typename D::real>& x, int64_t l0, const typename D::real* care,
                                         row_walk<char>& r, void** place) {
  using T = typename D::real;
  constexpr int64_t w = lanes<T>;
  const vec<T> sum = vec<T>::load_aligned(x.row_sum + l0);
  vec<T> undo(T(1));
  if (care != nullptr) undo = undo / vec<T>::load_aligned(care + l0);
  const vec<T> factors = xsimd::select(sum == vec<T>(T(0)), vec<T>(T(0)), undo / sum);
  const int64_t count = min_of(w, x.count - l0);
  for (int64_t l = 0; l < count; ++l, r.step(c)) place[l] = r.at;
  if (!ends_count(c)) return factors;

  ended_rows<T, w> ended;
  for (int64_t l = 0; l < w; ++l) {
    ended.top[l] = static_cast<double>(x.row_max[l0 + l]);
    ended.total[l] = static_cast<double>(x.row_total[l0 + l]);
    ended.sum[l] = static_cast<double>(x.row_sum[l0 + l]);
  }
  row_walk<char> to = rows_of_states<T>(c, task, kv_head, x.row + l0);
  for (int64_t l = 0; l < count; ++l, to.step(c)) {
    ended.place[l] = to.at;
    ended.sink[l] = sink_of<T>(c, kv_head * c.group + to.of.member, task.chunk);
  }
  ended.finish(c, count);
  for (int64_t l = 0; care != nullptr && l < w; ++l) ended.top[l] += static_cast<double>(care[panel_width<T> + l0 + l]);
  ended.write(c, count);
  if (c.sinks == nullptr) return factors;
  alignas(64) T factor[w] = {};
  for (int64_t l = 0; l < count; ++l)
    factor[l] = static_cast<T>(ended.factor[l] / (care == nullptr ? 1 : static_cast<double>(care[l0 + l])));
  return load(factor);
}

// Divides, transposes and stores a panel. False: something is not finite. care: see end_rows.
template <class D>
__attribute__((noinline)) bool finish_panel(const kernel_call& c, const kernel_task& task, int64_t kv_head,
                                            const panel<typename D::real>& x, const typename D::real* care = nullptr) {
  using T = typename D::real;
  constexpr int64_t w = lanes<T>;
  finite_check<T> finite;
  constexpr bool pairs = sizeof(typename D::storage) == 2;
  const bool in_vectors = c.chunks > 1 || (!pairs && c.out_strides[3] == 1);  // rows take whole vectors,
  const bool in_pairs = pairs && c.chunks == 1 && c.out_strides[3] == 1;      // or two of them made narrow
  if (!x.started) memset(x.out, 0, static_cast<size_t>(c.v_dim * x.width()) * sizeof(T));
  row_walk<char> r = rows_of_results<D>(c, task, kv_head, x.row);
  for (int64_t l0 = 0; l0 < x.count; l0 += w) {
    void* place[w];
    const int64_t count = min_of(w, x.count - l0);
    const vec<T> factors = end_rows<D>(c, task, kv_head, x, l0, care, r, place);
    if (care != nullptr) limit_sums<T>(x.out + l0, x.width(), c.v_dim, factors);
    int64_t d0 = 0;
    if constexpr (pairs) {
      // Made narrow before they are transposed, two values are one word: half as much to transpose.
      for (; in_pairs && d0 < c.v_dim && 2 * w <= c.v_dim; d0 += 2 * w) {
        const int64_t d = last_whole(d0, c.v_dim, 2 * w);
        const T* from = x.out + d * x.width() + l0;
        word_vec block[w];
#pragma GCC unroll 16
        for (int64_t i = 0; i < w; ++i) {
          const vec<T> even = result_of<T>(vec<T>::load_aligned(from + 2 * i * x.width()), factors);
          const vec<T> odd = result_of<T>(vec<T>::load_aligned(from + (2 * i + 1) * x.width()), factors);
          finite.see(even);
          finite.see(odd);
          block[i] = D::narrow(even) | (D::narrow(odd) << 16);
        }
        transpose_words(block);
#pragma GCC unroll 16
        for (int64_t l = 0; l < w; ++l) {
          if (l < count) memcpy(static_cast<uint16_t*>(place[l]) + d, &block[l], sizeof(block[l]));
        }
      }
    }
    for (; d0 < c.v_dim; d0 += w) {
      const int64_t d = in_vectors ? last_whole(d0, c.v_dim, w) : d0;
      const int64_t n = min_of(w, c.v_dim - d);
      const T* from = x.out + d * x.width() + l0;
      vec<T> block[w];
      if (n == w) {
#pragma GCC unroll 16
        for (int64_t i = 0; i < w; ++i) block[i] = result_of<T>(vec<T>::load_aligned(from + i * x.width()), factors);
      } else {
        for (int64_t i = 0; i < w; ++i)
          block[i] = i < n ? result_of<T>(vec<T>::load_aligned(from + i * x.width()), factors) : vec<T>(T(0));
      }
#pragma GCC unroll 16
      for (int64_t i = 0; i < w; ++i) finite.see(block[i]);
      transpose<T>(block);
      if (n == w && in_vectors) {
#pragma GCC unroll 16
        for (int64_t l = 0; l < w; ++l) {
          if (l < count) store<T>(static_cast<T*>(place[l]) + d, block[l]);
        }
      } else {
        for (int64_t l = 0; l < count; ++l) write_values<D>(c, place[l], d, n, block[l]);
      }
    }
  }
  return finite.passed();
}

}  // namespace
}  // namespace manyhead::MH_ISA
