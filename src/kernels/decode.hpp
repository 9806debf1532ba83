// The route for few rows (a decode step: query heads of a group times a few new tokens; the last rows of a prompt). Bound
// by reading K and V: each tile is read once for all rows. Lanes over dims for both products, lanes over keys for everything between:
//
//   S[row][key] = reduce(sum over dim vectors of K[key] * q[row])     4 rows x 4 keys at a time (16 registers: 4 x 2)
//   O[row] += P[row][key] * V[key]                                    4 rows x 4 vectors at a time, 2 x 8 (4 x 2, 2 x 4), by pairs 8 x 2
//
// 16-bit elements are widened as they are loaded, two vectors at a time, in whatever order is cheapest: q is brought
// into the same order first, and the result out of it at the end. Where a row of K or V is not whole vectors, the last
// one ends where the row ends and begins among the dims before: of K these are made 0 (by pairs of Q, and all is in vectors of
// 16 bits), the result has them twice. Rows shorter than a vector come here through the copy (kernel_call.copy_kv), padded with
// zeros; so do those whose elements lie apart, and copies of K have the same order, so that sums have the same bits.
//
// Where a matrix unit takes few rows and the plan says so, products are the unit's: with tiles (decode_unit.hpp), or by pairs in
// the same loops (decode_pairs.hpp).
//
// Its parts, each on top of the one before: decode_rows.hpp, decode_scores.hpp, decode_values.hpp, decode_weights.hpp. Here are tiles
// and heads, and how they end.
#pragma once

#include "decode_weights.hpp"

namespace manyhead::MH_ISA {
namespace {

template <class D>
struct decode_task : step_weights<D> {
  using base = step_weights<D>;
  using base::base;
  using base::c, base::care, base::copy_rows, base::direct, base::factors, base::first_tile, base::has_pairs,
      base::has_tiles, base::has_unit, base::heads, base::in_order, base::in_place, base::is_usual, base::k_dim,
      base::keys_at_once, base::kv_head, base::leaves_out, base::many_registers, base::most_rows,
      base::most_rows_of_pairs, base::no_gaps, base::on_unit, base::out, base::padded_rows, base::place_of,
      base::place_of_pair, base::places, base::products, base::q_row, base::q_rows, base::row_max, base::row_sums,
      base::row_totals, base::rows, base::scores, base::shift, base::started, base::task, base::unit, base::v_back,
      base::v_dim, base::v_pairs, base::w, base::widens, base::width, base::zeros;
  using typename base::T;

  static constexpr bool may_ask_own = many_registers && !widens;
  static constexpr int64_t least_ahead = 16384;  // bytes

  positions at;
  tile_view last_view;                     // of the tile by the head looked at last
  bool bias_closes;                        // it may somewhere
  int64_t words_begin = 0;                 // of a tile's: behind those of keys that are left out
  bits<T>* words;                          // [heads][width / word_keys + 1][whole vectors of rows]
  bool is_finite[most_rows_at_once];       // of a head: its results are
  uint32_t left_rows[most_rows_at_once];   // of a head: those that attend what was left out, a bit each
  uint32_t least_rows[most_rows_at_once];  // of a head: those with keys of the lowest bias alone, a bit each
  uint32_t least = 0;                      // the same, of the head that is done with care
  T shifts_of_rows[most_rows_at_once];     // [heads][rows]: maxima of rows that lie far from 0 (far.hpp), of others 0
  uint32_t wanted = ~0U;                   // rows of a head whose results count, the same
  int64_t k_turn, v_turn;                  // keys of a turn, where heads take turns
  int64_t parts_more;                      // next_turn

  MH_INLINE void carve(carver& from, int64_t head_count, int64_t head_rows) {
    base::carve(from, head_count, head_rows);
    words = from.take<bits<T>>(head_count * words_of_head(head_rows));
  }

  static int64_t scratch_bytes(const kernel_call& c, int64_t row_count) {
    const kernel_task none{};
    decode_task sizes(c, none);
    carver from{nullptr};
    const int64_t head_count = max_of(1, row_count / max_of(1, c.rows));
    sizes.carve(from, head_count, round_up<most_rows>(head_count > 1 ? row_count / head_count : row_count));
    return from.used;
  }

  MH_INLINE int64_t words_of_head(int64_t head_rows) const { return (width / word_keys + 1) * round_up<w>(head_rows); }

  MH_INLINE void start() {
    at = positions_of(c, task.batch);
    on_unit = has_unit && c.unit_steps && at.used <= c.unit_keys;
    work_on(task.kv_head_begin, task.kv_head_end - task.kv_head_begin);
    rows = task.row_end - task.row_begin;
    padded_rows = !on_unit    ? rows + (adds_row() ? 1 : 0)
                  : has_tiles ? unit_blocks(rows).rows()
                              : rows + (rows % most_rows_of_pairs == most_rows_of_pairs - 1 ? 1 : 0);
    carver from{static_cast<char*>(task.scratch)};
    carve(from, heads, padded_rows);
    q_row = q_rows;
    bias_closes = bias_may_close_somewhere();
    if (!on_unit) return copy_rows();
    if constexpr (has_tiles) {
      for (int64_t h = 0; h < heads; ++h) is_usual[h] = unit.pack_rows(task, h);
    }
    if constexpr (has_pairs) this->copy_pairs();
  }

  // So many heads together, and what follows from that.
  MH_INLINE void work_on(int64_t first_head, int64_t count) {
    kv_head = first_head;
    heads = count;
    const int64_t side_by_side = take_turns() ? heads : 1;
    no_gaps = c.k_strides[2] == side_by_side * c.head_dim && c.v_strides[2] == side_by_side * c.v_dim;
    // With gaps where a head's part of what they have of a turn lies in one row (next_turn), which turns may be cut for:
    // by pairs to a block of scores, else to 8 keys, as shorter ones are slower than no order.
    const int64_t fitting = no_gaps ? c.v_turn : heads & -heads, shortest = has_pairs && c.unit_steps ? 16 : 8;
    in_order = c.asks_in_order && (no_gaps || (take_turns() && fitting >= min_of(c.k_turn, shortest)));
    // Turns are short for the order of memory, or, where nothing is asked for, for L1.
    const bool usual = !in_order && c.prefetch;
    k_turn = usual ? usual_k_turn : in_order ? min_of(c.k_turn, fitting) : c.k_turn;
    v_turn = usual ? usual_v_turn : in_order ? min_of(c.v_turn, fitting) : c.v_turn;
    const int64_t part_bytes = max_of(1, c.head_dim * k_turn * static_cast<int64_t>(sizeof(typename D::storage)));
    parts_more = heads * part_bytes > least_ahead ? 0 : max_of(1, least_ahead / part_bytes - heads);
  }

  // The key that a task begins with.
  MH_INLINE int64_t first_key(const positions& p, const kernel_task& of) const {
    return max_of(range_of(c, p, of.row_begin / c.group).begin, chunk_begin(c, p, of.chunk));
  }
  // And where its keys end.
  MH_INLINE int64_t end_of_keys() const {
    const int64_t end = c.extra_keys > 0 ? c.kv_len : range_of(c, at, (task.row_end - 1) / c.group).end;
    return c.chunks > 1 ? min_of(end, chunk_begin(c, at, task.chunk + 1)) : end;
  }

  // Where heads lie side by side: so that a line, and a page, is read for all of them at about the same time.
  MH_INLINE bool take_turns() const { return c.k_turn > 0 && heads > 1; }
  // What head h asks for where its rows of this turn, of so many keys, begin at x: its own usual_k_turn further on; or, in the
  // order of memory, the h-th part of what the task's heads have of the next turn, or `parts_more` of them further on: the first
  // head's last row is in a part that is asked for just before. On Zen 5 without more parts 0.89 to 0.98 of the speed, up to 16 KB.
  MH_INLINE rows_at<D> next_turn(rows_at<D> x, int64_t h, int64_t keys, int64_t dim) const {
    if (!in_order) return x.from(usual_k_turn);
    const int64_t before = (h + parts_more) * keys, row = before / heads;  // in rows of a head, and of all heads
    return {x.from(keys + row).base + (before - row * heads - h) * dim, dim};
  }

  // More rows take those of K and V in several passes, and 5 to 12 were 1.06 to 1.5 times as slow.
  MH_INLINE asks way_of_asking() const {
    if (c.copy_kv || !c.prefetch) return asks::nothing;
    if (may_ask_own && c.asks_own && rows <= most_rows && (no_gaps || in_order)) return asks::own;
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

  // Three rows take two passes over K and V, four take one. Of heads in short turns 0.77 to 0.9.
  MH_INLINE bool adds_row() const {
    const bool in_long_turns = in_order && k_turn >= usual_k_turn && heads * (rows + 1) <= most_rows_at_once;
    return c.adds_rows && (heads == 1 || in_long_turns) && rows % most_rows == most_rows - 1;
  }

  // 16 rows and 8 KB: half and twice as much are slower.
  static MH_INLINE rows_at<D> further_on(rows_at<D> rows, int64_t dim) {
    return rows.from(max_of(16, 8192 / (dim * static_cast<int64_t>(sizeof(T)))));
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
    int64_t next;      // where the next one begins
    bool all_visible;  // as far as positions go, and there are no masks
    MH_INLINE int64_t keys() const { return end - begin; }
  };

  MH_INLINE bool bias_may_close_somewhere() const {
    bool some = false;
    const int64_t differ = c.bias == nullptr ? 0 : c.bias_strides[1] == 0 ? 1 : heads;
    for (int64_t h = 0; h < differ && !some; ++h) some = bias_may_close<T>(c, all_of_head(h));
    return some;
  }
  // Whether masks, and a bias that may be one, say the same of all heads.
  MH_INLINE bool heads_see_alike() const {
    return (c.mask == nullptr || c.mask_strides[1] == 0) && (!bias_closes || c.bias_strides[1] == 0);
  }
  MH_INLINE bits<T>* words_of(int64_t h) const {
    return words + words_begin + (heads_see_alike() ? 0 : h * words_of_head(padded_rows));
  }

  // What head h sees of a tile; head 0 is asked first, as others may see the same. Where nothing, its scores say so.
  MH_INLINE tile_view see_head(int64_t h, const key_tile& tile) {
    words_begin = 0;
    if (tile.all_visible && !bias_closes) return {visibility::all, c.bias != nullptr};
    if (h == 0 || !heads_see_alike()) {
      const tile_at t{task.batch, kv_head + h, task.row_begin, rows, tile.begin, tile.end};
      last_view = view_tile<T>(c, at, t, round_up<w>(rows), bias_closes && bias_may_close<T>(c, t), words_of(h));
    }
    if (last_view.see != visibility::none) return last_view;
    const int64_t padded = round_up<w>(tile.keys());
    T* const s = scores + h * padded_rows * width;
    for (int64_t r = 0; r < padded_rows; ++r) {
      for (int64_t k = 0; k < padded; k += w) vec<T>(-infinity<T>).store_aligned(s + r * width + k);
    }
    return last_view;
  }

  // Head h's products with `keys` of a tile's keys, from its key `first` on.
  template <class E>
  MH_INLINE void score_head(int64_t h, const key_tile& tile, int64_t first, int64_t keys) {
    const int64_t begin = tile.begin + first;
    const rows_at<D> k = in_place(c.k, c.k_strides, task.batch, kv_head + h, begin);
    if (c.copy_kv) {
      this->template score<asks::nothing>(h, first, this->template copied_k<E>(k, keys), keys, soon{});
      return;
    }
    asking(way_of_asking(), [&](auto way) MH_INLINE_LAMBDA {
      constexpr asks For = decltype(way)::value;
      const rows_at<D> next = take_turns()       ? next_turn(k, h, k_turn, c.head_dim)
                              : For == asks::own ? further_on(k, k_dim)
                                                 : in_place(c.v, c.v_strides, task.batch, kv_head + h, begin);
      this->template score<For>(h, first, rows_at<E>{k.base, k.stride}, keys, as_soon(next));
    });
  }

  // A tile without the keys at its ends that no row sees, at its begin in whole words. Only what is the same for all heads: which
  // of them are worked on together must not change a bit. Not where scores are kept.
  MH_INLINE key_tile narrowed(const key_tile& tile) {
    words_begin = 0;
    if (last_view.see != visibility::some || !heads_see_alike() || keeps_scores(c)) return tile;
    key_range seen{tile.keys(), 0};
    const int64_t rows_width = round_up<w>(rows);
    for (int64_t l = 0; l < rows_width; l += w) seen = joined(seen, seen_keys<T>(words + l, rows_width, tile.keys()));
    const int64_t left_out = round_down<word_keys>(seen.begin);
    words_begin = left_out / word_keys * rows_width;
    return {tile.begin + left_out, tile.begin + seen.end, tile.next, false};
  }

  // What else is done to scores s of head h before the softmax takes them.
  MH_INLINE void change_scores(int64_t h, const key_tile& tile, const tile_view& view, T* s) {
    const int64_t padded = round_up<w>(tile.keys());
    if (shift != nullptr) memcpy(products, s, static_cast<size_t>(rows * width) * sizeof(T));
    if (has_score_passes(c, view.adds_bias)) change_scores_of(kv_head + h, tile, view.adds_bias, s, padded);
    if (view.see == visibility::some) visibility_pass_rows<T>(words_of(h), round_up<w>(rows), rows, padded, width, s);
    if (shift != nullptr) bring_rows_near({task.batch, kv_head + h, task.row_begin, rows, tile.begin, tile.end}, s);
  }
  __attribute__((noinline)) void bring_rows_near(const tile_at& t, T* s) const {
    row_of of(c, t.row);
    for (int64_t r = 0; r < t.count; ++r, of.step(c)) {
      if (shift[r] != 0) {
        bring_near<T>(c, at, t, of, static_cast<double>(shift[r]), products + r * width, s + r * width, 1);
      }
    }
  }
  // Rows of head h that lie far from 0, a bit each.
  MH_INLINE uint32_t find_far_rows(int64_t h) {
    uint32_t which = 0;
    if (!may_lie_far<T>(c)) return which;
    for (int64_t i = 0; i < rows; ++i) {
      const T top = started[h] ? row_max[h * padded_rows + i] : T(0);
      which |= static_cast<uint32_t>(lies_far(top)) << i;
      shifts_of_rows[h * rows + i] = lies_far(top) ? top : T(0);
    }
    return which;
  }

  // What change_scores left of head h, and of all heads.
  MH_INLINE void keep_head(int64_t h, const key_tile& tile, const T* s) const {
    if (!keeps_scores(c)) return;
    for (int64_t r = 0; r < rows;) {
      const bool all = wanted == ~0U && shift == nullptr;
      const int64_t count = all ? rows : 1;
      if (all || ((wanted >> r & 1U) != 0 && !keeps_earlier(c, shift, r))) {
        keep_rows<T>(c, task, {task.batch, kv_head + h, task.row_begin + r, count, tile.begin, tile.end}, s + r * width,
                     width);
      }
      r += count;
    }
  }
  MH_INLINE void keep_heads(const key_tile& tile) const {
    if (!keeps_scores(c)) return;
    for (int64_t h = 0; h < heads; ++h) keep_head(h, tile, scores + h * padded_rows * width);
  }

  // Keys of a tile whose V is left out, up to word_keys of them from key `first` on, a bit each.
  uint32_t left_out_keys(int64_t h, const key_tile& tile, int64_t first) const {
    uint32_t which = 0;
    const rows_at<D> v = in_place(c.v, c.v_strides, task.batch, kv_head + h, tile.begin + first);
    for (int64_t k = 0; k < min_of(word_keys, tile.keys() - first); ++k)
      which |= static_cast<uint32_t>(!all_finite<D>(v.from(k).base, c.v_strides[3], c.v_dim)) << k;
    return which;
  }
  // Rows of head h that attend such a key: that mask and bias have not closed.
  __attribute__((noinline)) void find_left_rows(int64_t h, const key_tile& tile, const T* s) {
    for (int64_t first = 0; first < tile.keys(); first += word_keys) {
      const uint32_t keys = left_out_keys(h, tile, first);
      for (int64_t k = 0; keys != 0 && k < word_keys; ++k) {
        for (int64_t r = 0; (keys >> k & 1U) != 0 && r < rows; ++r)
          left_rows[h] |= static_cast<uint32_t>(s[r * width + first + k] != -infinity<T>) << r;
      }
    }
  }

  __attribute__((noinline)) void change_scores_of(int64_t head, const key_tile& tile, bool adds_bias, T* s,
                                                  int64_t padded) {
    if (c.softcap > 0) {
      for (int64_t r = 0; r < rows; ++r) softcap_pass<T>(c, s + r * width, padded);
    }
    const tile_at t{task.batch, head, task.row_begin, rows, tile.begin, tile.end};
    if (c.alibi_slopes != nullptr) alibi_pass_rows<T>(c, at, t, width, s);
    if (adds_bias) bias_pass_rows<T>(c, t, width, least, s);
  }

  // The rows of K that head h reads after a tile: of the next tile, or of the head in its place of the next task.
  MH_INLINE rows_at<D> following_k(int64_t h, const key_tile& tile, int64_t end) const {
    if (tile.next < end) return in_place(c.k, c.k_strides, task.batch, kv_head + h, tile.next);
    const kernel_task& next = *task.next;
    return in_place(c.k, c.k_strides, next.batch, min_of(next.kv_head_begin + h, next.kv_head_end - 1),
                    first_key(positions_of(c, next.batch), next));
  }

  // O of head h += P V for `keys` of a tile's keys, from its key `first` on, with more tiles to come up to `end`.
  template <bool Careful, class E>
  MH_INLINE void add_head(int64_t h, const key_tile& tile, int64_t first, int64_t keys, int64_t end) {
    const rows_at<D> v = in_place(c.v, c.v_strides, task.batch, kv_head + h, tile.begin + first);
    const bool last = first + keys == tile.keys();
    if constexpr (paired<E>) {
      if (leaves_out) {
        return this->template add_all<Careful, asks::nothing>(h, first, this->finite_pairs_of_v(v, keys), keys, last,
                                                              soon{});
      }
    }
    asks way = Careful ? asks::nothing : way_of_asking();
    if (way != asks::own && tile.next >= end && task.next == nullptr) way = asks::nothing;
    if (c.copy_kv) {
      this->template add_all<Careful, asks::nothing>(h, first, this->template copied_v<E>(v, keys), keys, last, soon{});
    } else if constexpr (Careful) {
      this->template add_all<Careful, asks::nothing>(h, first, v, keys, last, soon{});
    } else {
      asking(way, [&](auto as) MH_INLINE_LAMBDA {
        constexpr asks For = decltype(as)::value;
        const rows_at<E> rows_of_v{v.base, v.stride};
        if constexpr (For == asks::nothing)
          return this->template add_all<Careful, For>(h, first, rows_of_v, keys, last, soon{});
        const rows_at<D> next = take_turns()       ? next_turn(v, h, v_turn, c.v_dim)
                                : For == asks::own ? further_on(v, v_dim)
                                                   : following_k(h, tile, end);
        this->template add_all<Careful, For>(h, first, rows_of_v, keys, last, as_soon(next));
      });
    }
  }

  // Whether results go to their place at once: all keys are here, and all rows have some.
  MH_INLINE bool ends_here(int64_t keys, const tile_view* views) const {
    if (widens || c.copy_kv || c.chunks > 1 || c.out_strides[3] != 1 || padded_rows != rows || take_turns())
      return false;
    if (rows > most_rows && keys > keys_at_once) return false;
    for (int64_t h = 0; h < heads; ++h) {
      if (views[h].see == visibility::none) return false;
    }
    return true;
  }

  // Sets `factor` to what the rows of n heads from h on are multiplied with. Their states or lse are written.
  MH_INLINE void end_rows(int64_t h, int64_t n, const T* with_care, T* factor) const {
    ended_rows<T, most_rows_at_once> ended;
    int64_t count = 0;
    for (; n > 0; --n, ++h) {
      row_walk<char> to = rows_of_states<T>(c, task, kv_head + h, task.row_begin);
      for (int64_t i = 0; i < rows; ++i, ++count) {
        const int64_t r = h * padded_rows + i;
        const T sum = xsimd::reduce_add(load(row_sums + r * w));
        factor[count] = sum == T(0) ? T(0) : (with_care == nullptr ? T(1) : T(1) / with_care[i]) / sum;
        if (!ends_count(c)) continue;
        const T total = on_unit ? xsimd::reduce_add(load(row_totals + r * w)) : sum;
        ended.top[count] = static_cast<double>(row_max[r]);
        ended.total[count] = static_cast<double>(total);
        ended.sum[count] = static_cast<double>(sum);
        ended.sink[count] = sink_of<T>(c, (kv_head + h) * c.group + to.of.member, task.chunk);
        ended.place[count] = (wanted >> i & 1U) != 0 ? to.at : nullptr;
        to.step(c);
      }
    }
    if (!ends_count(c)) return;
    ended.finish(c, count);
    for (int64_t i = 0; shift != nullptr && i < count; ++i) ended.top[i] += static_cast<double>(shift[i]);
    ended.write(c, count);
    for (int64_t i = 0; c.sinks != nullptr && i < count; ++i)
      factor[i] = static_cast<T>(ended.factor[i] / (with_care == nullptr ? 1 : static_cast<double>(with_care[i])));
  }

  __attribute__((noinline)) void end_rows_here() {
    end_rows(0, heads, nullptr, factors);
    for (int64_t h = 0; h < heads; ++h) {
      row_walk<char> to = rows_of_results<D>(c, task, kv_head + h, task.row_begin);
      for (int64_t r = h * rows; r < (h + 1) * rows; ++r, to.step(c)) places[r] = reinterpret_cast<T*>(to.at);
    }
  }

  // Head after head in each step of a tile, so that one need not wait for what the step before made of the last. Where they
  // take turns, products of a few keys are a step.
  template <bool Careful, class E>
  __attribute__((noinline)) void attend_all() {
    over_tiles([&](const key_tile& whole, int64_t begin, int64_t end, phase_clock* clock) MH_INLINE_LAMBDA {
      tile_view views[most_rows_at_once];
      bool any = false, changes = false;
      for (int64_t h = 0; h < heads; ++h) {
        views[h] = see_head(h, whole);
        any = any || views[h].see != visibility::none;
        changes = changes || views[h].see != visibility::all || has_score_passes(c, views[h].adds_bias);
      }
      const auto sees = [&](int64_t h) MH_INLINE_LAMBDA { return views[h].see != visibility::none; };
      if (!whole.all_visible || bias_closes) lap(clock, phase_mask);
      if (!any) return keep_heads(whole);
      const key_tile t = whole.all_visible && !bias_closes ? whole : narrowed(whole);
      const int64_t keys = t.keys(), padded = round_up<paired<E> ? 2 * w : w>(keys);
      const int64_t of_k = take_turns() ? k_turn : keys, of_v = paired<E> && leaves_out ? keys_at_once
                                                                : take_turns()          ? v_turn
                                                                                        : keys;
      for (int64_t first = 0; first < keys; first += of_k) {
        for (int64_t h = 0; h < heads; ++h) {
          if (sees(h)) score_head<E>(h, t, first, min_of(of_k, keys - first));
        }
      }
      lap(clock, phase_scores);
      if (changes) {
        for (int64_t h = 0; h < heads; ++h) {
          if (sees(h)) change_scores(h, t, views[h], scores + h * padded_rows * width);
        }
        lap(clock, phase_mask);
      }
      if constexpr (paired<E>) {
        for (int64_t h = 0; h < heads && leaves_out; ++h) {
          if (sees(h)) find_left_rows(h, t, scores + h * padded_rows * width);
        }
      }
      keep_heads(t);
      if (keys < padded) this->close_slots(heads * padded_rows, keys, padded);
      if constexpr (paired<E>) {
        this->template weigh_for_unit<most_rows>(0, heads * padded_rows, scores, padded,
                                                 reinterpret_cast<uint32_t*>(scores), width);
      } else {
        this->template weigh_all<Careful, min_of(most_rows, exp2_vectors)>(0, padded);
      }
      lap(clock, phase_softmax);
      if constexpr (!Careful) direct = whole.begin == begin && whole.end == end && ends_here(keys, views);
      if (direct) end_rows_here();
      for (int64_t first = 0; first < keys; first += of_v) {
        for (int64_t h = 0; h < heads; ++h) {
          zeros = vec<T>(T(0));
          if (sees(h)) add_head<Careful, E>(h, t, first, min_of(of_v, keys - first), end);
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
        const tile_view view = see_head(h, t);
        if (!t.all_visible || bias_closes) lap(clock, phase_mask);
        if (view.see == visibility::none) {
          keep_head(h, t, scores + h * padded_rows * width);
          continue;
        }
        const rows_at<D> k = in_place(c.k, c.k_strides, task.batch, kv_head + h, t.begin);
        const rows_at<D> v = in_place(c.v, c.v_strides, task.batch, kv_head + h, t.begin);
        asking(way_of_asking(), [&](auto way) MH_INLINE_LAMBDA {
          constexpr asks For = decltype(way)::value;
          const asker<For> ask_k{as_soon(k.from(unit_rows_ahead)), c.head_dim / lines_elements};
          const asker<For> ask_v{as_soon(v.from(unit_rows_ahead)), c.v_dim / lines_elements};
          unit.multiply_k(h, k.base, keys, ask_k);
          unit.pack_v(v.base, keys, leaves_out ? left_out_keys(h, t, 0) : 0, ask_v);
          lap(clock, phase_scores);
          unit.put_scores(keys, scores, width);
          if (view.see == visibility::some || has_score_passes(c, view.adds_bias)) {
            change_scores(h, t, view, scores);
            lap(clock, phase_mask);
          }
          if (leaves_out) find_left_rows(h, t, scores);
          keep_head(h, t, scores);
          if (keys < width) this->close_slots(padded_rows, keys, width);
          this->template weigh_for_unit<most_rows>(h * padded_rows, padded_rows, scores, width, unit.weights, w);
          lap(clock, phase_softmax);
          unit.multiply_v(out + h * padded_rows * v_dim, started[h], ask_v);
          lap(clock, phase_values);
        });
        started[h] = true;
      }
    });
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
      const int64_t next = min_of(b + c.block_kv, end);
      key_tile t{max_of(b, begin), next, next, false};
      if (t.keys() <= 0) continue;  // a window that begins behind the last key
      first_tile = t.begin == begin;
      t.all_visible = c.mask == nullptr && c.key_mask == nullptr && t.begin >= of_last.begin && t.end <= of_first.end;
      f(t, begin, end, clock);
    }
    for (int64_t h = 0; h < heads; ++h) {
      if (!started[h]) memset(out + h * padded_rows * v_dim, 0, static_cast<size_t>(rows * v_dim) * sizeof(T));
    }
    if (task.clock != nullptr) resume_clock(*task.clock, 1);
  }

  // Divides and stores the rows of head h. False: something is not finite.
  bool finish(int64_t h, bool careful = false) {
    finite_check<T> finite;
    // Stores of vectors may change members, for all that a compiler knows.
    const int64_t dims = v_dim, back = v_back, pairs = on_unit ? v_dim : D::pairs_apart && !c.copy_kv ? v_pairs : 0;
    const bool partial = c.chunks > 1, in_vectors = back == dims - c.v_dim && (partial || c.out_strides[3] == 1);
    T factor[most_rows_at_once];
    end_rows(h, 1, careful ? care : nullptr, factor);
    row_walk<char> to = rows_of_results<D>(c, task, kv_head + h, task.row_begin);
    for (int64_t i = 0; i < rows; ++i, to.step(c)) {
      if ((wanted >> i & 1U) == 0) continue;
      const int64_t r = h * padded_rows + i;
      const vec<T> times(factor[i]);
      T* const values = out + r * dims;
      if (careful) limit_sums<T>(values, w, dims / w, times);
      void* const row = to.at;
      const auto value = [&](int64_t d) MH_INLINE_LAMBDA {
        const vec<T> x = result_of<T>(vec<T>::load_aligned(values + d), times);
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

  // Of the weights of row i of head h, before they were rounded.
  MH_INLINE T total_of(int64_t h, int64_t i) const {
    return xsimd::reduce_add(load((on_unit ? row_totals : row_sums) + (h * padded_rows + i) * w));
  }
  // Its rows and the task's keys.
  MH_INLINE tile_at all_of_head(int64_t h) const {
    return {task.batch, kv_head + h, task.row_begin, rows, first_key(at, task), end_of_keys()};
  }
  // Rows of head h that are left with keys of the lowest bias alone, a bit each.
  MH_INLINE uint32_t find_least_rows(int64_t h) {
    bool some = false;
    for (int64_t i = 0; i < rows && c.bias != nullptr; ++i) some = some || row_max[h * padded_rows + i] == lowest<T>;
    return least_rows[h] = some ? least_rows_of(h) : 0;
  }
  __attribute__((noinline)) uint32_t least_rows_of(int64_t h) const {
    uint32_t empty = 0;
    for (int64_t i = 0; i < rows; ++i) empty |= static_cast<uint32_t>(total_of(h, i) == T(0)) << i;
    return static_cast<uint32_t>(rows_of_least<T>(c, at, all_of_head(h), {0, c.kv_len}, empty));
  }

  // Rows of head h that the unit could not do, a bit each: as on the matrix route (matrix.hpp), those without a weight that see a
  // key, those whose results are all tiny, and those that attend what was left out.
  uint32_t rows_beyond_unit(int64_t h) const {
    if (!is_usual[h] && !leaves_out) return ~0U;
    uint32_t which = left_rows[h], empty = 0;
    for (int64_t i = 0; i < rows && started[h]; ++i) {
      const T sum = total_of(h, i);
      bool some = sum == T(0);
      empty |= static_cast<uint32_t>(sum == T(0)) << i;
      which |= static_cast<uint32_t>(!(sum >= T(0))) << i;  // NaN, of which rounding may have made 0
      for (int64_t d = 0; d < v_dim && !some; d += w) {
        some = xsimd::any(xsimd::abs(load(out + (h * padded_rows + i) * v_dim + d)) > vec<T>(T(0x1p-100)));
      }
      which |= static_cast<uint32_t>(!some) << i;
    }
    return empty == 0 ? which
                      : which | static_cast<uint32_t>(rows_that_see<T>(c, at, all_of_head(h), empty, least_bias<T>));
  }

  uint32_t rows_not_finite(int64_t h) const {
    uint32_t which = 0;
    for (int64_t i = 0; i < rows && started[h]; ++i) {
      finite_check<T> finite;
      for (int64_t d = 0; d < v_dim; d += w) finite.see(load(out + (h * padded_rows + i) * v_dim + d));
      which |= static_cast<uint32_t>(!finite.passed()) << i;
    }
    return which;
  }

  MH_INLINE void attend_with_unit() {
    if constexpr (has_tiles) attend_on_unit();
    if constexpr (has_pairs) attend_all<false, in_pairs>();
  }

  // All heads again on the unit, without the rows of Q that are not for it and those of V that are not finite: 0 times NaN is NaN,
  // and what a key holds must not change a bit of rows that do not attend it (matrix.hpp).
  __attribute__((noinline)) void attend_without_left_out() {
    leaves_out = true;
    for (int64_t h = 0; h < heads; ++h) left_rows[h] = 0;
    if constexpr (has_tiles) {
      for (int64_t h = 0; h < heads; ++h) unit.pack_rows(task, h, &left_rows[h]);
    } else {
      this->copy_pairs(left_rows);
    }
    attend_with_unit();
    for (int64_t h = 0; h < heads; ++h) {
      finish(h);
      left_rows[h] = rows_beyond_unit(h) | rows_not_finite(h) | find_far_rows(h) | find_least_rows(h);
      is_finite[h] = left_rows[h] == 0;
    }
    leaves_out = false;
  }

  // The one head that there is now, as tile_task does a panel.
  __attribute__((noinline)) void attend_with_care(const T* shift_of_row) {
    bias_closes = false;
    for (int64_t r = 0; r < padded_rows; ++r) care[r] = T(1);
    for (int64_t r = 0; r < rows && may_lie_far<T>(c); ++r) {
      if (shift_of_row[r] != 0) shift = shift_of_row;
    }
    attend_all<true, D>();
    const uint32_t beyond = rows_not_finite(0) & wanted;
    for (int64_t r = 0; r < rows; ++r) care[r] = (beyond >> r & 1U) != 0 ? factor_of_care<T>(c.kv_len) : T(1);
    if (beyond != 0) attend_all<true, D>();
    finish(0, true);
    shift = nullptr;
  }

  void run() {
    start();
    lap(task.clock, phase_pack);
    if constexpr (has_unit) {
      if (on_unit) attend_with_unit();
    }
    if (!on_unit) attend_all<false, D>();
    bool all_finite = true, all_for_unit = true;
    for (int64_t h = 0; h < heads; ++h) {
      left_rows[h] = 0;
      if (!direct) is_finite[h] = finish(h);
      if constexpr (has_unit) {
        if (on_unit) {
          all_for_unit = all_for_unit && is_finite[h] && is_usual[h];
          left_rows[h] = rows_beyond_unit(h);
        }
      }
      left_rows[h] |= find_far_rows(h) | find_least_rows(h);
      is_finite[h] = is_finite[h] && left_rows[h] == 0;
      all_finite = all_finite && is_finite[h];
    }
    lap(task.clock, phase_store);
    if (all_finite) return;
    const bool was_on_unit = on_unit;
    if constexpr (has_unit) {
      if (on_unit) {
        if (!all_for_unit) attend_without_left_out();
        on_unit = false;
        padded_rows = rows;
        copy_rows();
        lap(task.clock, phase_pack);
      }
    }
    // Alone: what its neighbours get must not depend on it.
    const int64_t count = heads;
    for (int64_t h = 0; h < count; ++h) {
      if (is_finite[h]) continue;
      if (was_on_unit) wanted = left_rows[h];
      work_on(task.kv_head_begin + h, 1);
      q_row = q_rows + h * padded_rows;
      least = least_rows[h];
      attend_with_care(shifts_of_rows + h * rows);
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
