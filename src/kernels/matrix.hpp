// The route for a matrix unit (matrix_unit.hpp): the same algorithm as the tile route, with panels of 32 rows and tiles of
// 128 keys. What it multiplies are 16-bit numbers, so all others come to it in parts (unit_number.hpp), enough of them
// that results are as good as the tile route's; weights of bf16 are rounded, which costs as much as rounding results does.
// Q is not scaled; scores are, in f32 (kernel_api.hpp: q_scale, exp_scale).
//
// AMX works beside the vectors, but a core looks only so far ahead. So while it multiplies two panels' scores
// and values, a turn of weighing a third panel stands between its instructions every 64 of its cycles: of so many keys
// that most of the panel is weighed in them, as what is left over finds the unit idle. With it go lines to be asked
// for: of masks and biases, the next rows of Q, the next tile's K and V, and the results.
//
// What the unit cannot do is left to the tile route: whatever comes out not finite, rows without a weight that see a key, whose
// scores may all have overflowed before they were scaled (or a bias closes all keys), tiny results, and Q and K of huge
// numbers. But 0 times NaN is NaN, so one value makes all of its panels come out so, even rows that do not attend it, and what a
// later token holds, or padding, must not change a bit of theirs. Such panels are attended again on the unit, with zeros for
// those keys and rows of Q, and to the tile route go the rows that attend such a key. So NaN costs its panels three times the
// time.
#pragma once

#include "attention_tile.hpp"
#include "matrix_operands.hpp"

namespace manyhead::MH_ISA {
namespace {

template <class D>
struct matrix_task {
  using T = float;
  using number = unit_number<D>;
  using values = typename number::values;
  static constexpr int64_t w = lanes<T>;
  static constexpr int NV = static_cast<int>(unit_rows / w);
  static constexpr int64_t width = unit_rows;
  static constexpr int weight_parts = values::weight_parts(false);
  static constexpr int unit_keys = 2 * weight_pairs;  // weights that the unit takes at a time, of each row
  static_assert(word_keys == unit_rows, "a block of keys is a word of bits");
  static_assert(!unit_asks_ahead || values::parts == 1, "it does more to scores of one part alone");
  static_assert(most_matrix_panels <= 32, "bits of `left`");
  static_assert(number::short_turn % unit_keys == 0 && unit_step % (2 * number::short_turn) == 0,
                "turns leave no keys over");

  // A panel against a tile or half of one, on its way from scores to values.
  struct job {
    panel<T>* x = nullptr;
    tile_at t = {};  // its rows and keys
    panel_view<T> view = {};
    int64_t first = 0, keys = 0;  // of the tile, in whole steps
    T* scores = nullptr;          // [keys][width]
    alignas(64) T sum[w] = {};    // of the weights so far, of the vector of rows that is under way: row_sum
    alignas(64) T total[w] = {};  // and row_total
    uint32_t* weights = nullptr;  // [weight_parts] of weight_part, in blocks: B of the values
    int64_t columns = width;      // of scores that are rows, or may be
    int64_t l = width, key = 0;   // what is weighed next: a vector of rows, from this key on; all is: l = columns
  };

  // Those of the unit's columns that are rows of a panel, or all.
  static MH_INLINE int64_t columns_of(const panel<T>& x) {
    return unit_takes_halves && x.count <= width / 2 ? width / 2 : width;
  }

  const kernel_call& c;
  const kernel_task& task;
  positions at;
  matrix_operands<D> operands;
  const int64_t job_keys;     // of a job, at most
  const int64_t weight_part;  // words of a part of a job's weights
  int64_t panels = 0;
  panel<T> p[most_matrix_panels];
  uint32_t active = ~0U;                        // panels that are attended, a bit each
  uint32_t left = 0;                            // those that are not for the unit as they are
  uint32_t left_rows[most_matrix_panels] = {};  // rows that attend what was left out, a bit each
  tile_scratch<T> scratch;                      // scores: [2][job_keys][width]
  uint32_t* weights;                            // [2][weight_parts] of weight_part
  job jobs[3];  // under way; one after the other, they share two buffers of scores and of weights
  row_terms<T> row_changes;
  lines_ahead soon, ahead;
  bool bias_closes = false;  // it may somewhere
  int64_t more_lines = 0;    // of `ahead` asked for in a turn, beside turn_lines
  matrix_unit unit;

  static int64_t scratch_bytes(const kernel_call& c, int64_t block_q) {
    const kernel_task none{};
    carver from{nullptr};
    matrix_operands<D>(c, none).carve(from);
    tile_scratch<T> scratch;
    uint32_t* weights;
    carve(from, c, scratch, weights);
    panel<T> x;
    for (int64_t row = 0; row < block_q; row += width) carve_panel(from, c, x);
    return max_of(from.used, tile_task<D>::scratch_bytes(c, width));  // run() goes there at the end
  }

  // With one part half a tile's scores and weights stay in the first-level cache, and panels find others to work beside
  // sooner. AMX: 512 and 1024 tokens, heads of 64, 1.07 to 1.1 times as fast, 128 tokens 1.06, heads of 32 1.18. With large
  // heads and more parts the values' sums, which go to memory and back with each job, take more: heads of 128 0.87 to
  // 1.0, f32 with heads of 64 0.96 to 1.04, f16 in two bf16 0.91 to 1.0. VDPBF16PS on Zen 4: heads of 64 0.98.
  static int64_t keys_of_job(const kernel_call& c) {
    return values::parts == 1 && c.v_dim <= 96 && !unit_takes_columns ? c.block_kv / 2 : c.block_kv;
  }

  static void carve(carver& from, const kernel_call& c, tile_scratch<T>& scratch, uint32_t*& weights) {
    scratch.tile_max = from.take<T>(width);
    scratch.words = from.take<bits<T>>((c.block_kv / word_keys + 1) * width);
    const int64_t keys = keys_of_job(c);
    scratch.scores = from.take<T>(2 * keys * width);
    weights = from.take<uint32_t>(2 * weight_parts * keys / unit_step * unit_block);
  }

  static void carve_panel(carver& from, const kernel_call& c, panel<T>& p) {
    p.q = from.take<T>(values::parts * round_up<unit_step>(c.head_dim) / unit_step * unit_block);
    p.out = from.take<T>(round_up<unit_rows>(c.v_dim) * width);
    p.row_max = from.take<T>(width);
    p.row_sum = from.take<T>(width);
    p.row_total = rounds(c.fast_exp != 0) ? from.take<T>(width) : p.row_sum;
  }

  matrix_task(const kernel_call& call, const kernel_task& t)
      : c(call),
        task(t),
        at(positions_of(call, t.batch)),
        operands(call, t),
        job_keys(keys_of_job(call)),
        weight_part(job_keys / unit_step * unit_block) {
    carver from{static_cast<char*>(task.scratch)};
    operands.carve(from);
    carve(from, c, scratch, weights);
    scratch.clock = task.clock;
    for (int64_t row = task.row_begin; row < task.row_end; row += width) {
      carve_panel(from, c, p[panels]);
      place_panel(c, at, task.batch, row, task.row_end, NV, p[panels++]);
    }
    bias_closes = bias_may_close<T>(c, {task.batch, operands.kv_head, task.row_begin, task.row_end - task.row_begin,
                                        p[0].reach.begin, p[panels - 1].reach.end});
  }

  // Weights of one part are rounded to it. Rows are divided by the sum of the rounded ones, so that what rounding did to a
  // weight beside which others are nothing does not show; the lse is of the exact ones, and these tell of NaN, which may
  // become 0 when it is rounded.
  static constexpr bool rounds(bool fast) { return values::weight_parts(fast) == 1; }

  // Exponentials beside that: of 9e-8, or 3e-6 for weights of bf16, which are rounded by 2e-3. Softcaps likewise (change).
  template <bool Fast>
  static constexpr int degree = Fast            ? fast_exp2_degree<T>
                                : rounds(false) ? 4
                                                : 5;
  // And what is taken from scores is the product of the maximum and the scale, rounded: an instruction less. All weights of
  // a row are wrong by the same factor, up to 2^-24 of the maximum, until the maximum changes.
  template <bool Fast>
  static constexpr bool takes_product = Fast || rounds(false);

  // Scores of a job become weights, split or rounded, a vector of rows after the other. What is under way stays in
  // registers for as long as a product takes, but where that is a call.
  template <bool Fast>
  class weigher {
   public:
    MH_INLINE weigher(const matrix_task& m, job& j)
        : of(j),
          part(m.weight_part),
          end(j.columns),
          l(j.l),
          key(j.key),
          scale(static_cast<T>(m.c.exp_scale)),
          sum(vec<T>::load_aligned(j.sum)),
          total(vec<T>::load_aligned(j.total)) {
      if (!is_done()) look_up_top();
    }
    MH_INLINE bool is_done() const { return l == end; }
    MH_INLINE bool is_at_multiple_of(int64_t keys) const { return key % keys == 0; }

    // The next keys. Sums are added one by one, or pair by pair, so that they are the same however keys are cut.
    template <int Keys>
    MH_INLINE void weigh() {
      vec<T> x[Keys];
#pragma GCC unroll 8
      for (int i = 0; i < Keys; ++i) {
        const vec<T> score = vec<T>::load_aligned(of.scores + (key + i) * width + l);
        x[i] = takes_product<Fast> ? xsimd::fms(score, scale, top) : (score - top) * scale;
      }
      exp2_of<T, Keys, degree<Fast>, true>(x);
      if constexpr (rounds(Fast)) {
#pragma GCC unroll 8
        for (int i = 0; i < Keys; ++i) total = total + x[i];
      }
#pragma GCC unroll 4
      for (int i = 0; i < Keys; i += unit_keys) put(key + i, x + i);
      key += Keys;
      if (key < of.keys) return;
      add_to(of.x->row_sum, sum);
      if constexpr (rounds(Fast)) add_to(of.x->row_total, total);
      key = 0;
      l += w;
      if (!is_done()) look_up_top();
    }

    MH_INLINE void put_back() {
      of.l = l;
      of.key = key;
      sum.store_aligned(of.sum);
      total.store_aligned(of.total);
    }

   private:
    MH_INLINE void look_up_top() {
      top = vec<T>::load_aligned(of.x->row_max + l);
      // Above -inf, so that a row that has seen no key yet has weights of 0.
      if constexpr (takes_product<Fast>) top = at_least<T>(vec<T>(lowest<T>), top * scale);
    }
    MH_INLINE void add_to(T* row, vec<T>& x) const {
      (vec<T>::load_aligned(row + l) + x).store_aligned(row + l);
      x = vec<T>(T(0));
    }
    MH_INLINE void put(int64_t slot, const vec<T>* x) {
      constexpr int parts = values::weight_parts(Fast);
      word_vec split[parts][weight_pairs];
#pragma GCC unroll 2
      for (int pair = 0; pair < weight_pairs; ++pair) {
        word_vec of_pair[parts];
        vec<T> even = x[2 * pair], odd = x[2 * pair + 1];
        split_floats<typename values::format>(even, odd, of_pair);
        if constexpr (rounds(Fast)) {
          sum = values::format::plus_pair(sum, of_pair[0], even, odd);
        } else {
          sum = sum + x[2 * pair] + x[2 * pair + 1];
        }
#pragma GCC unroll 3
        for (int n = 0; n < parts; ++n) split[n][pair] = of_pair[n];
      }
#pragma GCC unroll 3
      for (int n = 0; n < parts; ++n) put_weights(of.weights + n * part, l, slot, split[n]);
    }

    job& of;
    const int64_t part, end;
    int64_t l, key;
    const vec<T> scale;
    vec<T> sum, total, top;
  };

  // Steps of the unit to a panel and a tile.
  int64_t steps_of_panel() const {
    const bool fast = c.fast_exp != 0;
    return c.block_kv / unit_rows * number::scores(fast).products() * operands.dim_steps +
           operands.v_rows / unit_rows * values::terms(fast).products() * operands.key_steps;
  }

  // Whether these are so many that short turns are enough.
  bool takes_short_turns() const { return steps_of_panel() >= number::short_turn_steps; }

  // How many more lines of the next tile than turn_lines are asked for in a turn: as many as bring all of it, where few panels
  // take few turns. Those ask for a line with each line of V that is packed, too. bf16 on AMX, 1000 to 4096 keys, heads of 64 and
  // 128, one panel to four: up to 37 MB mostly 1.02 to 1.08 times as fast as with turn_lines alone, 134 MB 1.1 to 1.32; without
  // those of packing 1.01 to 1.09 and 1.09 to 1.15, more than 24 a turn 0.98 to 1.04 up to 17 MB. Parts take more turns: f16 of two
  // 0.97 to 1.05.
  static constexpr int64_t most_lines = 24;
  static constexpr bool asks_for_more = values::parts == 1 && !unit_asks_ahead;
  int64_t more_lines_of_turn() const {
    constexpr int64_t size = sizeof(typename D::storage);
    const int64_t lines = c.block_kv * ((c.head_dim * size + 63) / 64 + (c.v_dim * size + 63) / 64);
    return max_of(0, min_of(lines / (panels * steps_of_panel()), most_lines) - matrix_unit::turn_lines);
  }

  // A block of results, `to` = or += A B. Meanwhile, turn by turn, a panel is weighed and lines are asked for, or by the product
  // itself: first of what masks and biases say of the next panel.
  template <int Turn, class Weigher>
  MH_INLINE void multiply(const unit_a& a, const unit_b& b, const unit_terms& terms, const unit_extent& size, T* to,
                          bool add, Weigher& panel, const unit_scores& scores = {}) {
    lines_ahead& from = soon.empty() ? ahead : soon;
    const auto weigh = [&]() MH_INLINE_LAMBDA {
      if (!panel.is_done()) panel.template weigh<Turn>();
    };
    if constexpr (unit_asks_ahead) {
      unit.product<typename values::format>(a, b, terms, size, to, width, add, weigh, scores, &from);
    } else {
      line_walk next = from.walk;
      next.turn();
      const int64_t more = asks_for_more && &from == &ahead ? more_lines : 0;
      const auto meanwhile = [&]() MH_INLINE_LAMBDA {
        weigh();
        if constexpr (asks_ahead) {
#pragma GCC unroll 4
          for (int i = 0; i < matrix_unit::turn_lines; ++i) next.step();
          for (int64_t i = 0; i < more && !next.done(); ++i) next.step();
        }
      };
      unit.product<typename values::format>(a, b, terms, size, to, width, add, meanwhile, scores);
      from.walk = next;
    }
  }

  template <bool Fast>
  MH_INLINE void weigh_rest(job& j) const {
    constexpr int most = rounds(Fast) ? 8 : max_of(unit_keys, 4);  // parts take registers
    weigher<Fast> panel(*this, j);
    while (!panel.is_done())
      panel.is_at_multiple_of(most) ? panel.template weigh<most>() : panel.template weigh<unit_keys>();
    panel.put_back();
    lap(task.clock, phase_softmax);
  }

  // Whether scores are weighed as the unit leaves them, which has multiplied them with the scale, closed those that rows do not see
  // and found the largest.
  MH_INLINE bool done_by_unit(const job& j) const {
    return unit_finds_tops && !operands.leaves_out && !has_score_passes(c, j.view.adds_bias);
  }

  // A block of keys is changed while the unit works on the next one: what it left is in L1, and it does not pause for
  // long. Beside changing all keys at once: plain 1.0 to 1.02, passes f32 1.04 to 1.1, bf16 1.06 to 1.2.
  template <bool Fast, int Turn>
  MH_INLINE void multiply_scores(const job& j, job& meanwhile) {
    weigher<Fast> panel(*this, meanwhile);
    unit_scores scores;
    if (done_by_unit(j)) {
      scores = {static_cast<float>(c.q_scale), j.view.see == visibility::some ? j.view.words : nullptr,
                scratch.tile_max};
    }
    const unit_b q_at{reinterpret_cast<const uint32_t*>(j.x->q), operands.dim_steps * unit_block, unit_block};
    for (int64_t key = 0; key < j.keys; key += unit_rows) {
      unit_a k_at = operands.keys;
      k_at.base += (j.first + key) * k_at.row;
      const unit_extent size{min_of(j.t.keys() - key, unit_rows), operands.score_sums(), j.columns};
      multiply<Turn>(k_at, q_at, number::scores(Fast), size, j.scores + key * width, false, panel, scores);
      if (scores.open != nullptr) scores.open += width;
      lap(task.clock, phase_scores);
      if (key > 0) change(j, key - unit_rows);
    }
    panel.put_back();
  }

  template <bool Fast, int Turn>
  MH_INLINE void multiply_values(const job& j, job& meanwhile) {
    if (j.x == nullptr) return;
    const unit_b weights_at{j.weights, weight_part, unit_block};
    weigher<Fast> panel(*this, meanwhile);
    for (int64_t d = 0; d < operands.v_rows; d += unit_rows) {
      const unit_extent size{min_of(c.v_dim - d, unit_rows), j.t.keys(), j.columns};
      multiply<Turn>(operands.values_from(j.first, d), weights_at, values::terms(Fast), size, j.x->out + d * width,
                     j.x->started, panel);
    }
    panel.put_back();
    j.x->started = true;
    lap(task.clock, phase_values);
  }

  // Before a job's scores are worked on.
  MH_INLINE void begin_changes(const job& j) {
    for (int64_t l = 0; l < width; l += w) vec<T>(-infinity<T>).store_aligned(scratch.tile_max + l);
    if (has_score_passes(c, j.view.adds_bias)) row_changes.look_up(c, at, j.t, width, j.view.adds_bias);
  }

  // What is done to the scores of a block of keys before they are weighed.
  MH_INLINE void change(const job& j, int64_t first) {
    tile_at t = j.t;
    t.begin = min_of(j.t.begin + first, j.t.end);
    t.end = min_of(t.begin + unit_rows, j.t.end);
    T* const s = j.scores + first * width;
    panel_view<T> view = j.view;
    view.words += first / word_keys * width;
    if (__builtin_expect(operands.leaves_out, 0)) {
      change_closing(t, view, s);
    } else if (!done_by_unit(j)) {
      change_scores<T, NV, false, rounds(false)>(c, row_changes, t, view, s, scratch.tile_max, c.q_scale);
    }
    if (keeps_scores(c)) keep_panel<T>(c, task, t, s, width);
    if (operands.leaves_out) find_left_rows(j, first, t.keys(), s);
    for (int64_t i = t.keys() * width; i < unit_rows * width; i += w) vec<T>(-infinity<T>).store_aligned(s + i);
    const bool has_passes = has_score_passes(c, j.view.adds_bias) || j.view.see == visibility::some;
    lap(task.clock, has_passes && !done_by_unit(j) ? phase_mask : phase_softmax);
  }

  // With biases that close scores that are NaN, too.
  __attribute__((noinline)) void change_closing(const tile_at& t, const panel_view<T>& view, T* s) {
    change_scores<T, NV, true, rounds(false)>(c, row_changes, t, view, s, scratch.tile_max, c.q_scale);
  }

  // Rows that attend a key of the block from `first` on that was left out: that mask and bias have not closed.
  __attribute__((noinline)) void find_left_rows(const job& j, int64_t first, int64_t keys, const T* s) {
    for (int64_t key = 0; key < keys; ++key) {
      if ((operands.left_out_keys[(j.first + first) / word_keys] >> key & 1U) == 0) continue;
      for (int64_t l = 0; l < j.x->count; ++l)
        left_rows[j.x - p] |= static_cast<uint32_t>(s[key * width + l] != -infinity<T>) << l;
    }
  }

  // After all of its scores are there.
  MH_INLINE void end_changes(job& j) {
    change(j, j.keys - unit_rows);
    const softmax_rows<T, NV> of{j.x->row_max, j.x->row_sum, j.x->out, c.v_dim};
    T* const totals = j.x->row_total == j.x->row_sum ? nullptr : j.x->row_total;
    of.raise(scratch.tile_max, static_cast<T>(c.exp_scale), j.x->started, totals,
             static_cast<T>(unit_headroom<D>() / c.exp_scale));
    vec<T>(T(0)).store_aligned(j.sum);
    vec<T>(T(0)).store_aligned(j.total);
    j.l = 0;
    lap(task.clock, phase_softmax);
  }

  // While a tile is worked on: with the first one the rows of the task's other panels, and keys [begin, end) that come next.
  // What few panels left of the tile before is too late now.
  MH_INLINE void ask_for_next(bool first, int64_t begin, int64_t end) {
    const auto rows_of = [&](const void* base, const int64_t* strides, int64_t from, int64_t rows, int64_t dim) {
      ahead.add(rows_ahead<D>(c, base, strides, task.batch, operands.kv_head, from, rows, dim));
    };
    ahead.clear();
    if (first && c.group == 1)  // else they do not lie evenly
      rows_of(c.q, c.q_strides, task.row_begin + width, task.row_end - task.row_begin - width, c.head_dim);
    rows_of(c.k, c.k_strides, begin, end - begin, c.head_dim);
    rows_of(c.v, c.v_strides, begin, end - begin, c.v_dim);
  }

  // All panels against the keys [begin, end) of a tile. Turn: keys weighed at a time beside the unit. usual: whether the
  // unit can take them.
  template <bool Fast, int Turn>
  void attend_tile(int64_t begin, int64_t end, bool usual) {
    job none;
    job* weighed = &none;
    job* scored = &none;
    int64_t count = 0;
    const auto ask_soon = [&](int64_t i, int64_t b) MH_INLINE_LAMBDA {  // what masks say of panel i, keys from b on
      const int64_t from = max_of(b, p[i].clip.begin), to = min_of(b + job_keys, p[i].clip.end);
      ask_for_mask<T>(soon, c, task.batch, operands.kv_head, p[i], from, to);
      ask_for_bias<T>(soon, c, bias_closes, task.batch, operands.kv_head, p[i], from, to);
    };
    const auto attend = [&](int64_t i, int64_t b, int64_t e) MH_INLINE_LAMBDA {
      panel<T>& x = p[i];
      if ((active >> i & 1U) == 0) return;
      if (min_of(e, x.clip.end) <= max_of(b, x.clip.begin)) return;
      const int64_t from = max_of(b, x.reach.begin);
      tile_at t{task.batch,           operands.kv_head, x.row, x.count, begin + round_down<unit_step>(from - begin),
                min_of(e, x.clip.end)};  // from a whole step on
      const panel_view<T> view = see_panel<T>(c, at, x, bias_closes, t, scratch);
      if (view.see == visibility::none) {
        if (keeps_scores(c)) keep_none<T>(c, task, t);
        return;
      }
      left |= static_cast<uint32_t>(!usual) << i;
      if (!x.packed) {
        left |= static_cast<uint32_t>(!operands.pack_rows(x, columns_of(x))) << i;
        left_rows[i] |= operands.left_out_rows;
        x.packed = true;
        lap(task.clock, phase_pack);
      }
      job* const next = &jobs[count % 3];
      next->x = &x;
      next->t = t;
      next->view = view;
      next->columns = columns_of(x);
      next->first = t.begin - begin;
      next->keys = round_up<unit_step>(t.keys());
      next->scores = scratch.scores + count % 2 * job_keys * width;
      next->weights = weights + count % 2 * weight_parts * weight_part;
      ++count;
      soon.clear();  // what has not been asked for yet is here now, or late
      const bool is_last = i + 1 == panels;
      ask_soon(is_last ? 0 : i + 1, is_last ? e : b);
      ahead.add(results_ahead<D>(c, task, operands.kv_head, e, x));
      begin_changes(*next);
      multiply_scores<Fast, Turn>(*next, *scored);
      multiply_values<Fast, Turn>(*weighed, *scored);
      weigh_rest<Fast>(*scored);
      if (scored->x == &x) {  // its weights go with the maxima so far
        multiply_values<Fast, Turn>(*scored, none);
        scored = &none;
      }
      end_changes(*next);
      weighed = scored;
      scored = next;
    };
    for (int64_t b = begin; b < end; b += job_keys) {
      for (int64_t i = 0; i < panels; ++i) attend(i, b, min_of(b + job_keys, end));
    }
    multiply_values<Fast, Turn>(*weighed, *scored);
    weigh_rest<Fast>(*scored);
    multiply_values<Fast, Turn>(*scored, none);
  }

  template <int Turn>
  void attend_tile_in(int64_t begin, int64_t end, bool usual) {
    c.fast_exp ? attend_tile<true, Turn>(begin, end, usual) : attend_tile<false, Turn>(begin, end, usual);
  }

  void attend_all() {
    if constexpr (asks_for_more) more_lines = more_lines_of_turn();
    int64_t begin = c.kv_len;
    int64_t end = 0;
    for (int64_t i = 0; i < panels; ++i) {
      if ((active >> i & 1U) == 0) continue;
      clear_panel(p[i]);
      begin = min_of(begin, p[i].clip.begin);
      end = max_of(end, p[i].clip.end);
    }
    begin = max_of(begin, chunk_begin(c, at, task.chunk));
    // Tiles hold the same keys whatever the panels of the task, so that results do not depend on task sizes.
    int64_t last = c.extra_keys > 0 ? c.kv_len : at.used;
    if (c.chunks > 1) last = min_of(last, chunk_begin(c, at, task.chunk + 1));
    end = min_of(end, last);
    for (int64_t b = begin / c.block_kv * c.block_kv; b < end; b += c.block_kv) {
      const int64_t tile_end = min_of(b + c.block_kv, last);
      const bool usual = operands.pack_keys(b, tile_end, panels);
      ask_for_next(b <= begin, tile_end, min_of(tile_end + c.block_kv, end));
      operands.pack_values(b, tile_end, more_lines > 0 ? &ahead : nullptr);
      lap(task.clock, phase_pack);
      if (takes_short_turns()) {
        attend_tile_in<number::short_turn>(b, tile_end, usual);
      } else {
        attend_tile_in<2 * number::short_turn>(b, tile_end, usual);
      }
    }
  }

  // The unit takes denormal numbers for 0, so a row's results that are all tiny may owe that to it.
  uint32_t tiny_rows(const panel<T>& x) const {
    uint32_t rows = 0;
    for (int64_t l0 = 0; l0 < width && x.started; l0 += w) {
      alignas(64) T largest[w];
      vec<T> top(T(0));
      const vec<T> tiny(T(0x1p-100));
      for (int64_t d = 0; d < c.v_dim && !xsimd::all(top > tiny); ++d)
        top = xsimd::max(top, xsimd::abs(vec<T>::load_aligned(x.out + d * width + l0)));
      top.store_aligned(largest);
      for (int64_t l = 0; l < w && !xsimd::all(top > tiny); ++l)
        rows |= static_cast<uint32_t>(largest[l] <= T(0x1p-100) && x.row_total[l0 + l] != 0) << (l0 + l);
    }
    return rows;
  }

  // Rows of a panel that are left to the tile route, a bit each. Those without a weight that see a key among them, as it may owe that
  // to the unit: scores that ran over, and NaN, of which rounding may have made 0. And those that are left with keys of the lowest
  // bias alone: which of these have been closed, and which added, is a matter of the tile's corners.
  uint32_t rows_beyond_unit(const panel<T>& x) const {
    uint32_t rows = left_rows[&x - p] | tiny_rows(x) | static_cast<uint32_t>(far_rows_of(c, x));
    if (!x.started && c.bias == nullptr) return rows;
    for (int64_t l = 0; l < x.count; ++l) {
      const bool is_least = c.bias != nullptr && x.row_total[l] != 0 && x.row_max[l] <= least_bias<T> / 2;
      rows |= static_cast<uint32_t>(is_least || !(x.row_total[l] >= 0)) << l;
    }
    const uint64_t empty = empty_rows_of(x) & ~rows;
    if (empty == 0) return rows;
    const tile_at all = all_of(c, at, task, operands.kv_head, x);
    rows |= static_cast<uint32_t>(rows_that_see<T>(c, at, all, empty, least_bias<T>));
    if (c.bias != nullptr) rows |= static_cast<uint32_t>(rows_of_least<T>(c, at, all, x.reach, empty));
    return rows;
  }
  uint32_t rows_not_finite(const panel<T>& x) const {
    uint32_t rows = 0;
    for (int64_t l = 0; l < x.count && x.started; ++l) {
      T zeros = 0;
      for (int64_t d = 0; d < c.v_dim; ++d) zeros += T(0) * x.out[d * width + l];
      rows |= static_cast<uint32_t>(zeros != T(0)) << l;
    }
    return rows;
  }

  void attend_as_the_unit_does() {
    [[maybe_unused]] const flush_denormals as_the_unit_does;
    attend_all();
  }

  // Panels, a bit each, without what the unit cannot take. rows[panel]: those of them that are left to the tile route.
  __attribute__((noinline)) void attend_again(uint32_t which, uint32_t* rows) {
    active = which;
    operands.leaves_out = true;
    for (int64_t i = 0; i < panels; ++i) p[i].packed = false;
    attend_as_the_unit_does();
    for (int64_t i = 0; i < panels; ++i) {
      if ((which >> i & 1U) == 0) continue;
      finish_panel<D>(c, task, operands.kv_head, p[i]);
      rows[i] = rows_beyond_unit(p[i]) | rows_not_finite(p[i]);
    }
    lap(task.clock, phase_store);
  }

  // Whose scratch is this one's.
  __attribute__((noinline)) void leave_to_tile_route(const uint32_t* rows) const {
    for (int64_t i = 0; i < panels; ++i) {
      for (int64_t l = 0; l < width; ++l) {
        if ((rows[i] >> l & 1U) == 0) continue;
        kernel_task some = task;
        some.row_begin = task.row_begin + i * width + l;
        while (l < width && (rows[i] >> l & 1U) != 0) ++l;
        some.row_end = min_of(task.row_begin + i * width + l, task.row_end);
        if (some.row_begin < some.row_end) c.tile(&c, &some);
      }
    }
  }

  void run() {
    attend_as_the_unit_does();
    uint32_t again = left, any_row = 0, rows[most_matrix_panels];
    for (int64_t i = 0; i < panels; ++i) {
      const bool finite = finish_panel<D>(c, task, operands.kv_head, p[i]);
      again |= static_cast<uint32_t>(!finite) << i;
      any_row |= rows[i] = rows_beyond_unit(p[i]);
    }
    lap(task.clock, phase_store);
    if ((again | any_row) == 0) return;
    if (again != 0) attend_again(again, rows);
    leave_to_tile_route(rows);
  }
};

template <class D>
void attention_matrix(const kernel_call* c, const kernel_task* t) {
  matrix_task<D>(*c, *t).run();
}

}  // namespace
}  // namespace manyhead::MH_ISA
