// The projections of linear.hpp on a matrix unit, for many rows, of bf16 for nearly all: x and W in the unit's parts
// (unit_number.hpp), W once, when the layer is made, x once a task, for all of the task's outputs. Six products of bf16 for
// one of f32 take AMX little more than half as long as FMAs take that one, and errors are half as large.
//
// A = x, by rows; B = W^T, in stretches of 32 outputs; C = y, where it is wanted. The sum of an output runs along `in` in
// order, in pieces of `depth`: its bits depend on its row of x, its row of W and b alone, whatever is computed beside it.
// Pieces of f32 are summed apart and added to b one after another, in y; 16-bit results are rounded once, from sums that the
// unit goes on with.
//
// A row of x lies in blocks of 32 rows and values, or, where the unit reads pairs anywhere (unit_takes_columns), in one piece.
//
// What the unit cannot do is left to linear.hpp, row by row of x, or all where a row of W is such: huge numbers, whose
// products might overflow, and tiny ones, of which the unit takes much for 0; of f16, whose parts are neither, infinities and
// NaN. Where any number of rows is for the unit, rows of x are done here, by multiply-adds, and linear.hpp's W is not kept.
#pragma once

#include "linear.hpp"
#include "matrix_operands.hpp"

namespace manyhead::MH_ISA {
namespace {

#if MH_MATRIX

template <class D>
struct linear_unit_task {
  using storage = typename D::storage;
  using operands = matrix_operands<D>;
  using number = unit_number<D>;
  using values = typename number::values;
  using format = typename values::format;
  using raw = typename operands::raw;
  static constexpr int parts = values::parts;
  static constexpr bool of_f32 = sizeof(storage) == sizeof(float);
  static constexpr int64_t no_limit = int64_t{1} << 48;
  static constexpr bool alone = linear_on_unit<parts>.least_rows == 1;
  static_assert(!alone || (parts == 1 && weight_pairs == 1), "multiply_left reads single words of one part");
  // So much of the sum of 128 rows of x (768 KB) stays in L2 while outputs pass by. 16-bit results have no room for sums so far.
  static constexpr int64_t unit_reach = of_f32 ? 1024 : no_limit;
  static constexpr int64_t w = lanes<float>;
  static constexpr unit_terms terms = number::scores(false);

  static MH_INLINE int64_t whole(int64_t n) { return round_up<unit_rows>(n); }

  // W as words: [outputs / 32][steps][parts] blocks of B.
  static int64_t weight_words(int64_t out, int64_t in) { return whole(out) * steps_of(in) * parts * unit_step / 2; }
  // Steps from row to row of x, as far as unit_reach. Rows in one piece have an odd number of lines, so that they are spread
  // over all sets of L1.
  static MH_INLINE int64_t steps_of_row(int64_t in) {
    const int64_t steps = steps_of(min_of(in, unit_reach));
    return unit_takes_columns ? steps | 1 : steps;
  }
  // x as bytes.
  static int64_t row_bytes(int64_t rows, int64_t in) {
    return whole(rows) * steps_of_row(in) * parts * unit_step * static_cast<int64_t>(sizeof(uint16_t));
  }

  // Numbers for the unit are zeros, or such that sums cannot overflow, and that denormal parts and products, which it takes
  // for 0, are nothing beside the product of the largest x and W of an output.
  class numbers_seen {
   public:
    MH_INLINE void take(const raw& pairs) {
      for (const word_vec& each : pairs) {
        if constexpr (of_f32) {
          seen_.take(each);
        } else {
          seen_.take(each & word_vec(0xffff0000U));
          seen_.take(each << 16);
        }
      }
    }
    // Whether there is none too large.
    MH_INLINE bool fit() const { return !seen_.any_not_below(too_large); }
    // Of one row in all lanes, and of a row in each.
    MH_INLINE bool row_fits() const { return fit() && (all_sizes || seen_.all_zero() || seen_.any_not_below(least)); }
    MH_INLINE bool rows_fit() const { return fit() && (all_sizes || !seen_.any_below_but_not_zero(least)); }

   private:
    static constexpr bool all_sizes = std::is_same_v<D, f16>;
    static constexpr int least = -50;
    static constexpr int too_large = all_sizes ? 121 : 51;  // the bits of an infinity of f16 are 2^121 as those of bf16

    magnitudes seen_;
  };

  // Places along the sum are in the order of load_pairs: slot i of a piece of 2 x lanes holds its values 2 i and 2 i + 1, or,
  // of f32, i and lanes + i.
  static constexpr int64_t piece = operands::piece;
  static MH_INLINE int64_t first_of_slot(int64_t slot) { return of_f32 ? slot / w * piece + slot % w : 2 * slot; }
  static constexpr int64_t second_after = of_f32 ? w : 1;

  // Panels as linear.hpp has them to blocks of B. False: not for the unit.
  static bool pack_weights(const void* panels, int64_t out, int64_t in, uint32_t* to) {
    constexpr int64_t panel = linear_width<float>;
    const auto* const from = static_cast<const storage*>(panels);
    const int64_t padded = round_up<w>(out), steps = steps_of(in);
    bool usual = true;
    memset(to, 0, static_cast<size_t>(weight_words(out, in)) * sizeof(*to));
    for (int64_t column = 0; column < padded; column += w) {
      const int64_t first = column / panel * panel, width = min_of(panel, padded - first);
      const storage* const at = from + first * in + (column - first);
      numbers_seen seen;  // of each output's own row of W
      const auto value = [&](int64_t k) { return k < in ? at + k * width : operands::no_key; };
      for (int64_t slot = 0; slot < steps * unit_step / 2; slot += weight_pairs) {
        word_vec pairs[parts][weight_pairs];
        for (int i = 0; i < weight_pairs; ++i) {
          const int64_t k = first_of_slot(slot + i);
          raw pair;
          word_vec part[parts];
          load_pairs<D>(value(k), value(k + second_after), pair);
          seen.take(pair);
          split_pairs<D, format>(pair, part);
          for (int n = 0; n < parts; ++n) pairs[n][i] = part[n];
        }
        uint32_t* const of_slot = to + (column / unit_rows * steps + 2 * slot / unit_step) * parts * unit_block;
        for (int n = 0; n < parts; ++n)
          put_weights(of_slot + n * unit_block, column % unit_rows, 2 * slot % unit_step, pairs[n]);
      }
      usual = usual && seen.rows_fit();
    }
    return usual;
  }

  // Rows of x from value `first` of the sum on to A. Nobody looks at sums of what lies behind the last row.
  __attribute__((noinline)) void pack_rows(int64_t first) const {
    const int64_t in = min_of(unit_reach, c.in - first);
    for (int64_t row = 0; row < c.rows; ++row) {
      const storage* const x = static_cast<const storage*>(c.x) + row * c.x_stride + first;
      numbers_seen seen;
      for (int64_t k = 0; k < steps_of(in) * unit_step; k += piece) {
        raw pairs;
        word_vec part[parts];
        operands::pairs_of_row(x, 1, k, in, pairs);
        seen.take(pairs);
        split_pairs<D, format>(pairs, part);
#pragma GCC unroll 3
        for (int n = 0; n < parts; ++n)
          put_row(x_from(row, k / unit_step) + n * x_part, x_row, row % unit_rows, k % unit_step, part[n]);
      }
      if (!seen.row_fits()) c.left[row] = 1;
    }
  }

  const linear_unit_args& c;
  matrix_unit unit;
  // A, in elements: parts of a step follow each other in blocks, and parts of 32 rows elsewhere.
  static constexpr int64_t block = unit_rows * unit_step;
  const int64_t x_steps = steps_of_row(c.in);
  const int64_t x_row = unit_takes_columns ? x_steps * unit_step : unit_step;
  const int64_t x_step = unit_takes_columns ? unit_step : parts * block;
  const int64_t x_part = unit_takes_columns ? x_steps * block : block;
  // Pieces of the sum, all alike, or nearly: in bf16 one of 512 is 1.06 times as fast as 384 and 128, and two of 512 as 384, 384
  // and 256. Of f32 unit_reach is to be a multiple.
  const int64_t depth = [&] {
    constexpr int64_t most = linear_on_unit<parts>.most_depth;
    static_assert(!of_f32 || unit_reach % most == 0, "a piece crosses the end of what is packed of x");
    if (of_f32) return most;
    const int64_t steps = steps_of(c.in), pieces = (steps * unit_step + most - 1) / most;
    return (steps + pieces - 1) / pieces * unit_step;
  }();
  // The 32 rows that `row` is one of.
  MH_INLINE uint16_t* x_from(int64_t row, int64_t step) const {
    return static_cast<uint16_t*>(c.scratch) + row / unit_rows * x_steps * parts * block + step * x_step;
  }

  int64_t row_blocks() const { return whole(c.rows) / unit_rows; }
  static constexpr bool short_turns = parts == 1 && !unit_takes_columns;

  // The words of W that are asked for while a piece is multiplied: the next one. From L3 they came too late: 192 rows of f32
  // 1.1 times as fast. With few rows of bf16, which take no longer than reading W does, those of the piece itself, 8 KB on: 1
  // and 8 rows of 2048 and 4096 numbers 1.1 to 1.3.
  MH_INLINE line_walk words_ahead(int64_t stretch, int64_t k) const {
    constexpr int64_t of_step = parts * unit_block;
    const int64_t steps = steps_of(c.in), ahead = short_turns && row_blocks() <= 2 ? 4 : depth / unit_step;
    const int64_t step = min_of(k / unit_step + ahead, steps);
    const int64_t all = weight_words(c.columns, c.in), from = (stretch * steps + step) * of_step;
    const int64_t bytes = min_of(min_of(depth / unit_step, steps) * of_step, all - from) * 4;
    return line_walk({reinterpret_cast<const char*>(static_cast<const uint32_t*>(c.weights) + from), bytes, bytes, 1});
  }
  // In a turn: as many as bring it, or nearly, where turns are a step of one part.
  int64_t lines_of_turn() const { return short_turns ? unit_block * 4 / 64 / row_blocks() : 4; }
  // VDPBF16PS reads W in one piece, line after line; its product asks for what it is at, 8 KB on (matrix_unit.hpp).
  static constexpr bool asks_for_words = asks_ahead && !unit_takes_columns;

  // 32 x 32 sums on their way to y, a vector at a time: y = added + sums, for as many rows and columns as there are.
  class adder {
   public:
    adder() = default;
    MH_INLINE adder(const float* sums, storage* y, int64_t y_stride, const float* added, int64_t added_stride,
                    int64_t rows, int64_t columns)
        : from_(sums),
          end_(sums + rows * unit_rows),
          to_(y),
          stride_(y_stride),
          added_(added),
          added_stride_(added_stride),
          columns_(columns) {}
    MH_INLINE bool done() const { return from_ == end_; }
    MH_INLINE void finish() {
      while (!done()) step();
    }
    MH_INLINE void step() {
      if (done()) return;
      if (l_ + w <= columns_) {
        D::narrow(load(added_ + l_) + vec<float>::load_aligned(from_), to_ + l_);
      } else {
        for (int64_t l = l_; l < columns_; ++l) to_[l] = D::narrow(added_[l] + from_[l - l_]);
      }
      from_ += w;
      l_ += w;
      if (l_ < unit_rows) return;
      l_ = 0;
      to_ += stride_;
      added_ += added_stride_;
    }

   private:
    const float *from_ = nullptr, *end_ = nullptr;
    storage* to_ = nullptr;
    int64_t stride_ = 0;
    const float* added_ = nullptr;
    int64_t added_stride_ = 0, columns_ = 0, l_ = 0;
  };

  // A piece of a stretch for all rows. What a product leaves is added to y while the unit works on the next one; `sums`: of
  // f32 for two products, else for all rows, to which those of the next piece are added.
  void multiply(int64_t stretch, int64_t k, const float* bias, float* sums) const {
    const int64_t step = k / unit_step, steps = steps_of(c.in), column = stretch * unit_rows;
    const unit_b w_at{static_cast<const uint32_t*>(c.weights) + (stretch * steps + step) * parts * unit_block,
                      unit_block, parts * unit_block};
    line_walk next = words_ahead(stretch, k);
    const int64_t lines = lines_of_turn();
    const bool is_last = k + depth >= c.in;
    adder adding;
    for (int64_t row = 0; row < c.rows; row += unit_rows) {
      float* const to = sums + (of_f32 ? row % (2 * unit_rows) : row) * unit_rows;
      const unit_a x_at{x_from(row, step % (unit_reach / unit_step)), x_part, x_step, x_row};
      const auto* next_x = reinterpret_cast<const char*>(x_at.base + x_steps * parts * block);
      const auto meanwhile = [&]() MH_INLINE_LAMBDA {
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
          adding.step();
          if constexpr (asks_for_words) next.step();
          // The next rows of x, into L1, an eighth of them; the hardware goes on: 1.03 to 1.12, of f16 0.99 to 1.0, of f32 0.95.
          if constexpr (asks_ahead && short_turns) __builtin_prefetch(next_x + 64 * i, 0, 3);
        }
        next_x += 256;
        if constexpr (asks_for_words && parts == 1) {
          for (int64_t i = 4; i < lines && !next.done(); ++i) next.step();
        }
      };
      unit.template product<format, true>(x_at, w_at, terms,
                                          {min_of(unit_rows, c.rows - row), min_of(depth, steps * unit_step - k)}, to,
                                          unit_rows, !of_f32 && k > 0, meanwhile);
      adding.finish();
      storage* const y = static_cast<storage*>(c.y) + row * c.y_stride + column;
      const int64_t rows = min_of(unit_rows, c.rows - row), columns = min_of(unit_rows, c.columns - column);
      if constexpr (of_f32) {
        adding = k == 0 ? adder(to, y, c.y_stride, bias, 0, rows, columns)
                        : adder(to, y, c.y_stride, y, c.y_stride, rows, columns);
      } else if (is_last) {
        adding = adder(to, y, c.y_stride, bias, 0, rows, columns);
      }
    }
    adding.finish();
  }

  // The rows that are left, by multiply-adds with the unit's words of W, four at once. Pieces of a sum apart, as linear.hpp
  // has them.
  static constexpr int left_at_once = 4;
  void multiply_left() const {
    int64_t rows[left_at_once];
    int count = 0;
    for (int64_t row = 0; row < c.rows; ++row) {
      if (c.left[row] == 0) continue;
      rows[count++] = row;
      if (count < left_at_once) continue;
      multiply_left(rows);
      count = 0;
    }
    if (count == 0) return;
    for (int i = count; i < left_at_once; ++i) rows[i] = rows[0];
    multiply_left(rows);
  }
  __attribute__((noinline)) void multiply_left(const int64_t (&rows)[left_at_once]) const {
    constexpr int vectors = static_cast<int>(unit_rows / w);
    constexpr int64_t most = 256;
    alignas(64) float all[left_at_once][unit_rows], bias[unit_rows];
    for (int64_t column = 0; column < c.columns; column += unit_rows) {
      const int64_t columns = min_of(unit_rows, c.columns - column);
      const auto* const words =
          static_cast<const uint32_t*>(c.weights) + column / unit_rows * steps_of(c.in) * unit_block;
      widen_row<D>(static_cast<const storage*>(c.bias) + column, 1, columns, bias);
      for (auto& of_row : all) memcpy(of_row, bias, sizeof(bias));
      for (int64_t first = 0; first < c.in; first += most) {
        vec<float> sum[left_at_once][vectors] = {};
        for (int64_t k = first; k < min_of(first + most, c.in); ++k) {
          vec<float> of_w[vectors];
#pragma GCC unroll 8
          for (int v = 0; v < vectors; ++v) {
            const auto pair = word_vec::load_aligned(words + k / 2 * unit_rows + v * w);
            of_w[v] = D::widen(k % 2 == 0 ? pair & word_vec(0xffffU) : pair >> 16);
          }
#pragma GCC unroll 4
          for (int i = 0; i < left_at_once; ++i) {
            const vec<float> x(D::widen(static_cast<const storage*>(c.x)[rows[i] * c.x_stride + k]));
#pragma GCC unroll 8
            for (int v = 0; v < vectors; ++v) sum[i][v] = xsimd::fma(x, of_w[v], sum[i][v]);
          }
        }
        for (int i = 0; i < left_at_once; ++i) {
          for (int v = 0; v < vectors; ++v) {
            float* const to = all[i] + v * w;
            (vec<float>::load_aligned(to) + sum[i][v]).store_aligned(to);
          }
        }
      }
      for (int i = 0; i < left_at_once; ++i)
        narrow_row<D>(all[i], columns, static_cast<storage*>(c.y) + rows[i] * c.y_stride + column, 1);
    }
  }

  void run() const {
    memset(c.left, 0, static_cast<size_t>(c.rows));
    alignas(64) float sums[(of_f32 ? 2 * unit_rows : most_unit_rows) * unit_rows], bias[unit_rows];
    for (int64_t first = 0; first < c.in; first += unit_reach) {
      pack_rows(first);
      for (int64_t column = 0; column < c.columns; column += unit_rows) {
        widen_row<D>(static_cast<const storage*>(c.bias) + column, 1, min_of(unit_rows, c.columns - column), bias);
        const int64_t end = min_of(unit_reach, c.in - first) + first;
        for (int64_t k = first; k < end; k += depth) multiply(column / unit_rows, k, bias, sums);
      }
    }
    if constexpr (alone) {
      multiply_left();
      memset(c.left, 0, static_cast<size_t>(c.rows));
    }
  }
};

template <class D>
void run_linear_unit(const linear_unit_args* c) {
  linear_unit_task<D>{*c, {}}.run();
}

template <class D>
inline constexpr linear_unit_kernels linear_unit = {run_linear_unit<D>,
                                                    linear_unit_task<D>::row_bytes,
                                                    linear_unit_task<D>::weight_words,
                                                    linear_unit_task<D>::pack_weights,
                                                    linear_on_unit<linear_unit_task<D>::parts>.least_rows,
                                                    128,
                                                    linear_on_unit<linear_unit_task<D>::parts>.speed,
                                                    linear_unit_task<D>::alone};

#endif

}  // namespace
}  // namespace manyhead::MH_ISA
