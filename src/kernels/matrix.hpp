// The route for 16-bit types on a matrix unit (matrix_unit.hpp): the same algorithm as the tile route, with panels of 32
// rows and tiles of 128 keys. The unit multiplies bf16 and adds in f32, so nothing may be rounded to bf16 on the way in
// that the tile route would keep in f32:
//   - Q is not scaled; scores are, in f32 (kernel_api.hpp: q_scale, exp_scale);
//   - f16 is split into two bf16 whose sum it is, and all four products are taken;
//   - weights are split in two as well, which keeps 16 of their bits; the product of both small parts is left out.
// Where the caller allows a fast exponential, weights are rounded to one part, and the product of both small parts of f16
// scores is left out: 1 product of a score and 1 of a value for bf16, 3 and 2 for f16, instead of 1 and 2, 4 and 3.
// So results are as good as the tile route's. K and V of a tile are brought into the unit's order once a task, for all
// of its panels: V transposed, both padded with zeros, so that no size or stride is special.
//
// What the unit cannot do is left to the tile route, panel by panel: whatever comes out not finite, rows without a weight,
// whose scores may all have overflowed before they were scaled, and panels of tiny results.
#pragma once

#include "attention_tile.hpp"
#include "matrix_unit.hpp"

namespace manyhead::MH_ISA {
namespace {

template <class D>
struct matrix_task {
  using T = float;
  using words = xsimd::batch<uint32_t, MH_ARCH>;
  static constexpr int64_t w = lanes<T>;
  static constexpr int NV = static_cast<int>(unit_rows / w);
  static constexpr int64_t width = unit_rows;
  static constexpr int64_t most_panels = 16;
  static constexpr int parts = D::parts;
  static constexpr int64_t piece = 2 * w;  // values of a vector of words
  static_assert(unit_step % piece == 0, "a step is whole vectors of words");

  const kernel_call& c;
  const kernel_task& task;
  positions at;
  int64_t kv_head;
  int64_t dim_steps, v_rows, key_steps;  // head_dim in steps; v_dim rounded up; keys of a tile in steps
  int64_t panels = 0;
  panel<T> p[most_panels];
  tile_scratch<T> scratch;
  uint16_t* k;        // [parts][dim_steps], blocks of block_kv rows
  uint16_t* v;        // [parts][key_steps], blocks of v_rows rows
  uint32_t* weights;  // [2][key_steps] blocks
  matrix_unit unit;

  static int64_t steps_of(int64_t n) { return (n + unit_step - 1) / unit_step; }

  static int64_t scratch_bytes(const kernel_call& c, int64_t block_q) {
    carver from{nullptr};
    matrix_task::carve(from, c, nullptr);
    for (int64_t row = 0; row < block_q; row += width) carve_panel(from, c);
    return max_of(from.used, tile_task<D>::scratch_bytes(c, width));  // run() goes there at the end
  }

  static void carve(carver& from, const kernel_call& c, matrix_task* to) {
    const int64_t key_steps = c.block_kv / unit_step;
    tile_scratch<T> s{};
    s.scores = from.take<T>(c.block_kv * width);
    s.tile_max = from.take<T>(width);
    s.words = from.take<bits<T>>((c.block_kv / word_keys + 1) * width);
    auto* k = from.take<uint16_t>(parts * steps_of(c.head_dim) * c.block_kv * unit_step);
    auto* v = from.take<uint16_t>(parts * key_steps * round_up(c.v_dim, unit_rows) * unit_step);
    auto* weights = from.take<uint32_t>(2 * key_steps * unit_block);
    if (to == nullptr) return;
    to->scratch = s;
    to->k = k;
    to->v = v;
    to->weights = weights;
  }

  static panel<T> carve_panel(carver& from, const kernel_call& c) {
    panel<T> p{};
    p.q = from.take<T>(parts * steps_of(c.head_dim) * unit_block);
    p.out = from.take<T>(round_up(c.v_dim, unit_rows) * width);
    p.row_max = from.take<T>(width);
    p.row_sum = from.take<T>(width);
    return p;
  }

  matrix_task(const kernel_call& call, const kernel_task& t)
      : c(call),
        task(t),
        at(positions_of(call, t.batch)),
        kv_head(t.kv_head_begin),
        dim_steps(steps_of(call.head_dim)),
        v_rows(round_up(call.v_dim, unit_rows)),
        key_steps(call.block_kv / unit_step) {
    carver from{static_cast<char*>(task.scratch)};
    carve(from, c, this);
    scratch.clock = task.clock;
    for (int64_t row = task.row_begin; row < task.row_end; row += width) {
      p[panels] = carve_panel(from, c);
      place_panel(c, at, row, task.row_end, NV, p[panels++]);
    }
  }

  // The values of a row from dim d on that make a vector of pairs; those behind the last are 0.
  static MH_INLINE words pairs(const uint16_t* row, int64_t stride, int64_t d, int64_t dim) {
    if (stride == 1 && d + piece <= dim) {
      words x;
      memcpy(&x, row + d, sizeof(x));
      return x;
    }
    alignas(64) uint16_t buffer[piece] = {};
    for (int64_t i = 0; i < min_of(piece, dim - d); ++i) buffer[i] = row[(d + i) * stride];
    return words::load_aligned(reinterpret_cast<const uint32_t*>(buffer));
  }

  // As many as a vector has lanes, as 32-bit integers.
  static MH_INLINE words singles(const uint16_t* row, int64_t stride, int64_t d, int64_t dim) {
    if (stride == 1 && d + w <= dim) return load_16(row + d);
    alignas(64) uint16_t buffer[w] = {};
    for (int64_t i = 0; i < min_of(w, dim - d); ++i) buffer[i] = row[(d + i) * stride];
    return load_16(buffer);
  }

  // Q^T of a panel: B of the scores.
  __attribute__((noinline)) void pack_rows(const panel<T>& x) const {
    const auto* q = static_cast<const uint16_t*>(c.q) + task.batch * c.q_strides[0];
    auto* to = reinterpret_cast<uint32_t*>(x.q);
    for (int64_t l0 = 0; l0 < width; l0 += w) {
      const uint16_t* from[w];
      const int64_t count = max_of(0, min_of(w, x.count - l0));
      row_of r(c, x.row + l0);
      for (int64_t l = 0; l < count; ++l, r.step(c))
        from[l] = q + (kv_head * c.group + r.member) * c.q_strides[1] + r.query * c.q_strides[2];
      for (int64_t d = 0; d < dim_steps * unit_step; d += piece) {
        words rows[parts][w];
        for (int64_t l = 0; l < w; ++l) {
          words split[parts];
          D::split(l < count ? pairs(from[l], c.q_strides[3], d, c.head_dim) : words(0U), split);
          for (int i = 0; i < parts; ++i) rows[i][l] = split[i];
        }
        for (int i = 0; i < parts; ++i) put_columns(to + i * dim_steps * unit_block, l0, d, rows[i]);
      }
    }
  }

  // Keys [begin, end) of K: A of the scores. Up to a whole step of keys, zeros follow.
  __attribute__((noinline)) void pack_keys(int64_t begin, int64_t end) const {
    const auto* from = static_cast<const uint16_t*>(c.k) + task.batch * c.k_strides[0] + kv_head * c.k_strides[1];
    const int64_t step_size = c.block_kv * unit_step;
    for (int64_t key = 0; key < round_up(end - begin, unit_step); ++key) {
      const uint16_t* row = from + (begin + key) * c.k_strides[2];
      for (int64_t step = 0; step < dim_steps; ++step) {
        for (int64_t d = 0; d < unit_step; d += piece) {
          words split[parts];
          D::split(begin + key < end ? pairs(row, c.k_strides[3], step * unit_step + d, c.head_dim) : words(0U), split);
          for (int i = 0; i < parts; ++i) put_row(k + (i * dim_steps + step) * step_size, key, d, split[i]);
        }
      }
    }
  }

  // The same keys of V, transposed: A of the values.
  __attribute__((noinline)) void pack_values(int64_t begin, int64_t end) const {
    const auto* from = static_cast<const uint16_t*>(c.v) + task.batch * c.v_strides[0] + kv_head * c.v_strides[1];
    for (int64_t first = 0; first < round_up(end - begin, unit_step); first += piece) {
      const int64_t step = first / unit_step;
      for (int64_t d = 0; d < v_rows; d += w) {
        words rows[parts][w];
        for (int64_t l = 0; l < w; ++l) {
          const int64_t key = begin + first + 2 * l;
          const uint16_t* row = from + key * c.v_strides[2];
          words pair(0U);
          if (key < end) pair = singles(row, c.v_strides[3], d, c.v_dim);
          if (key + 1 < end) pair = pair | (singles(row + c.v_strides[2], c.v_strides[3], d, c.v_dim) << 16);
          words split[parts];
          D::split(pair, split);
          for (int i = 0; i < parts; ++i) rows[i][l] = split[i];
        }
        for (int i = 0; i < parts; ++i) {
          transpose_words(rows[i]);
          uint16_t* block = v + (i * key_steps + step) * v_rows * unit_step;
          for (int64_t l = 0; l < w; ++l) put_row(block, d + l, first % unit_step, rows[i][l]);
        }
      }
    }
  }

  // Scores become weights, in two parts, or rounded to one: B of the values. `keys` is a multiple of the step. Four vectors
  // at once, of as many keys as the unit takes at a time.
  template <bool Fast>
  MH_INLINE void weigh(const panel<T>& x, int64_t keys, T exp_scale) const {
    constexpr int at_once = 2 * weight_pairs;
    constexpr int vectors = 4 / at_once;
    const int64_t part = key_steps * unit_block;
    for (int64_t l = 0; l < width; l += vectors * w) {
      uint32_t* const to = weights;
      const auto keep = [=](int64_t key, auto& values) MH_INLINE_LAMBDA {
        if constexpr (sizeof(values) == at_once * vectors * sizeof(vec<T>)) {  // keys are never left over
#pragma GCC unroll 2
          for (int j = 0; j < vectors; ++j) {
            words high[weight_pairs], low[weight_pairs];
#pragma GCC unroll 2
            for (int i = 0; i < weight_pairs; ++i) {
              vec<T>& even = values[2 * i * vectors + j];
              vec<T>& odd = values[(2 * i + 1) * vectors + j];
              if constexpr (Fast) {
                high[i] = bf16::round(even, odd);
              } else {
                bf16::halves(even, odd, high[i], low[i]);
              }
            }
            put_weights(to, l + j * w, key, high);
            if constexpr (!Fast) put_weights(to + part, l + j * w, key, low);
          }
        }
      };
      const softmax_rows<T, vectors, NV> rows{x.row_max + l, x.row_sum + l, nullptr, 0};
      constexpr int degree = Fast ? fast_exp2_degree<T> : 5;  // 9e-8, where the two parts keep 2^-17
      rows.template weigh<true, at_once, degree>(scratch.scores + l, keys, exp_scale, keep);
    }
  }

  // A panel against keys [t.begin, t.end) of the tile that begins at `begin`, t.begin a whole number of steps behind it.
  template <bool Fast>
  void attend(panel<T>& x, const tile_at& t, int64_t begin) const {
    const visibility see = see_panel<T>(c, at, x, t, scratch);
    if (see == visibility::none) return;
    const int64_t keys = round_up(t.keys(), unit_step);
    const int64_t first = t.begin - begin;
    const unit_a k_at{k + first * unit_step, dim_steps * c.block_kv * unit_step, c.block_kv * unit_step};
    const unit_b q_at{reinterpret_cast<const uint32_t*>(x.q), dim_steps * unit_block, unit_block};
    constexpr unit_terms terms = {parts, {parts, Fast ? 1 : parts}};
    T* s = scratch.scores;
    for (int64_t key = 0; key < keys; key += unit_rows) {
      unit.product({k_at.base + key * unit_step, k_at.part, k_at.step}, q_at, terms, dim_steps, s + key * width, width,
                   false);
    }
    if (c.q_scale != 1) {
      const vec<T> scale(static_cast<T>(c.q_scale));
      for (int64_t i = 0; i < t.keys() * width; i += w) (vec<T>::load_aligned(s + i) * scale).store_aligned(s + i);
    }
    lap(task.clock, phase_scores);
    change_scores<T, NV>(c, at, t, see, scratch);
    if (see == visibility::some || has_score_passes(c)) lap(task.clock, phase_mask);  // else only maxima
    for (int64_t i = t.keys() * width; i < keys * width; i += w) vec<T>(-infinity<T>).store_aligned(s + i);

    const softmax_rows<T, NV> rows{x.row_max, x.row_sum, x.out, c.v_dim};
    const T exp_scale = static_cast<T>(c.exp_scale);
    rows.raise(scratch.tile_max, exp_scale, x.started);
    weigh<Fast>(x, keys, exp_scale);
    lap(task.clock, phase_softmax);

    const unit_b weights_at{weights, key_steps * unit_block, unit_block};
    constexpr unit_terms of_weights = {parts, {Fast ? 1 : 2, 1}};
    for (int64_t d = 0; d < v_rows; d += unit_rows) {
      const unit_a v_at{v + (first / unit_step * v_rows + d) * unit_step, key_steps * v_rows * unit_step,
                        v_rows * unit_step};
      unit.product(v_at, weights_at, of_weights, keys / unit_step, x.out + d * width, width, x.started);
    }
    lap(task.clock, phase_values);
    x.started = true;
  }

  void attend_all() {
    int64_t begin = c.kv_len;
    int64_t end = 0;
    for (int64_t i = 0; i < panels; ++i) {
      clear_panel(p[i]);
      begin = min_of(begin, p[i].clip().begin);
      end = max_of(end, p[i].clip().end);
    }
    begin = max_of(begin, task.chunk * c.chunk_keys);
    // Tiles hold the same keys whatever the panels of the task, so that results do not depend on task sizes.
    int64_t last = c.extra_keys > 0 ? c.kv_len : at.used;
    if (c.chunks > 1) last = min_of(last, (task.chunk + 1) * c.chunk_keys);
    end = min_of(end, last);
    for (int64_t b = begin / c.block_kv * c.block_kv; b < end; b += c.block_kv) {
      const int64_t tile_end = min_of(b + c.block_kv, last);
      pack_keys(b, tile_end);
      pack_values(b, tile_end);
      lap(task.clock, phase_pack);
      for (int64_t i = 0; i < panels; ++i) {
        panel<T>& x = p[i];
        const int64_t from = max_of(b, x.clip().begin);
        const tile_at t{task.batch,
                        kv_head,
                        x.row,
                        x.count,
                        b + (from - b) / unit_step * unit_step,
                        min_of(tile_end, x.clip().end)};
        if (t.end <= from) continue;
        if (!x.packed) {
          pack_rows(x);
          x.packed = true;
          lap(task.clock, phase_pack);
        }
        c.fast_exp ? attend<true>(x, t, b) : attend<false>(x, t, b);
      }
    }
  }

  // The unit takes denormal numbers for 0, so results that are all tiny may owe that to it.
  bool is_normal(const panel<T>& x) const {
    vec<T> top(T(0));
    for (int64_t i = 0; i < c.v_dim * width && x.started; i += w)
      top = larger<T>(top, xsimd::abs(vec<T>::load_aligned(x.out + i)));
    return !x.started || xsimd::any(top > vec<T>(T(0x1p-100)));
  }

  void run() {
    attend_all();
    uint32_t again = 0;
    for (int64_t i = 0; i < panels; ++i) {
      bool good = finish_panel<D>(c, task, kv_head, p[i], false) && is_normal(p[i]);
      for (int64_t l = 0; l < p[i].count && p[i].started; ++l) good = good && p[i].row_sum[l] > 0;
      again |= static_cast<uint32_t>(!good) << i;
    }
    lap(task.clock, phase_store);
    for (int64_t i = 0; i < panels; ++i) {
      if ((again >> i & 1U) == 0) continue;
      kernel_task rows = task;
      rows.row_begin = task.row_begin + i * width;
      rows.row_end = min_of(rows.row_begin + width, task.row_end);
      tile_task<D>(c, rows).run();
    }
  }
};

template <class D>
void attention_matrix(const kernel_call* c, const kernel_task* t) {
  matrix_task<D>(*c, *t).run();
}

}  // namespace
}  // namespace manyhead::MH_ISA
