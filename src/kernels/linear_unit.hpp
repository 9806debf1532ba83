// The projections of linear.hpp on a matrix unit, for many rows of f32: x and W in the unit's parts (unit_number.hpp), W
// once, when the layer is made, x once a task, for all of the task's outputs. Six products of bf16 for one of f32 take AMX
// little more than half as long as FMAs take that one, and errors are half as large.
//
// A = x, by rows; B = W^T, in stretches of 32 outputs; C = y, where it is wanted. The sum of an output runs along `in` in
// order, in pieces of unit_depth that are added to b one after another: its bits depend on its row of x, its row of W and b
// alone, whatever is computed beside it.
//
// What the unit cannot do is left to linear.hpp, row by row of x, or all where a row of W is such: huge numbers, whose
// products might overflow, and tiny ones, of which the unit takes much for 0.
#pragma once

#include "linear.hpp"
#include "matrix_operands.hpp"

// Some units are left numbers of one part (matrix_unit.hpp: unit_parts).
#if MH_MATRIX && !defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC) && !defined(__AVX512BF16__)
#define MH_LINEAR_UNIT 1
#endif

namespace manyhead::MH_ISA {
namespace {

#if MH_LINEAR_UNIT

// Of the sum: 32 outputs of it (24 KB) stay in L1 while rows pass by.
inline constexpr int64_t unit_depth = 128;
// And so much of it 128 rows of x (768 KB) in L2 while outputs pass by.
inline constexpr int64_t unit_reach = 1024;

struct linear_unit_task {
  using operands = matrix_operands<f32>;
  using number = unit_number<f32>;
  using values = number::values;
  static constexpr int parts = values::parts;
  static constexpr int64_t w = lanes<float>;
  static constexpr unit_terms terms = number::scores(false);

  static MH_INLINE int64_t whole(int64_t n) { return round_up<unit_rows>(n); }

  // W as words: [outputs / 32][steps][parts] blocks of B.
  static int64_t weight_words(int64_t out, int64_t in) { return whole(out) * steps_of(in) * parts * unit_step / 2; }
  // x as bytes, as far as unit_reach: [rows / 32][steps][parts] blocks of A.
  static int64_t row_bytes(int64_t rows, int64_t in) {
    const int64_t steps = steps_of(min_of(in, unit_reach));
    return whole(rows) * steps * parts * unit_step * static_cast<int64_t>(sizeof(uint16_t));
  }

  // Numbers for the unit are zeros, or such that sums cannot overflow, and that denormal parts and products, which it takes
  // for 0, are nothing beside the product of the largest x and W of an output.
  static constexpr int least_power = -50, most_power = 50;

  // Places along the sum are in the order of load_pairs: slot i of a piece of 2 x lanes holds its values i and lanes + i.
  static constexpr int64_t piece = operands::piece;

  // Panels as linear.hpp has them to blocks of B. False: not for the unit.
  static bool pack_weights(const float* from, int64_t out, int64_t in, uint32_t* to) {
    constexpr int64_t panel = linear_width<float>;
    const int64_t padded = round_up<w>(out), steps = steps_of(in);
    bool usual = true;
    memset(to, 0, static_cast<size_t>(weight_words(out, in)) * sizeof(*to));
    for (int64_t column = 0; column < padded; column += w) {
      const int64_t first = column / panel * panel, width = min_of(panel, padded - first);
      const float* const at = from + first * in + (column - first);
      magnitudes seen;  // of each output's own row of W
      const auto value = [&](int64_t k) { return k < in ? load(at + k * width) : vec<float>(0.0F); };
      for (int64_t slot = 0; slot < steps * unit_step / 2; ++slot) {
        const int64_t k = slot / w * piece + slot % w;
        vec<float> first_of_pair = value(k), second = value(k + w);
        seen.take(xsimd::bitwise_cast<uint32_t>(first_of_pair));
        seen.take(xsimd::bitwise_cast<uint32_t>(second));
        word_vec part[parts];
        split_floats<values::format>(first_of_pair, second, part);
        uint32_t* const block = to + (column / unit_rows * steps + 2 * slot / unit_step) * parts * unit_block;
        for (int n = 0; n < parts; ++n)
          put_pair(block + n * unit_block, column % unit_rows, 2 * slot % unit_step, part[n]);
      }
      usual = usual && !seen.any_above(most_power) && !seen.any_below_but_not_zero(least_power);
    }
    return usual;
  }

  // Rows of x from value `first` of the sum on to blocks of A; those behind the last are zeros.
  __attribute__((noinline)) void pack_rows(int64_t first) const {
    const int64_t in = min_of(unit_reach, c.in - first);
    auto* const to = static_cast<uint16_t*>(c.scratch);
    for (int64_t row = 0; row < whole(c.rows); ++row) {
      const float* const x = row < c.rows ? static_cast<const float*>(c.x) + row * c.x_stride + first : nullptr;
      magnitudes seen;
      for (int64_t k = 0; k < steps_of(in) * unit_step; k += piece) {
        operands::raw pairs;
        word_vec part[parts];
        operands::pairs_of_row(x, 1, k, in, pairs);
        operands::take(seen, pairs);
        split_pairs<f32, values::format>(pairs, part);
#pragma GCC unroll 3
        for (int n = 0; n < parts; ++n)
          put_row(to + block_at(row, k / unit_step) + n * block, row % unit_rows, k % unit_step, part[n]);
      }
      const bool usual = seen.all_zero() || (seen.any_not_below(least_power) && !seen.any_above(most_power));
      if (!usual) c.left[row] = 1;  // zeros behind the last row are
    }
  }

  static constexpr int64_t block = unit_rows * unit_step;  // of A, in elements
  MH_INLINE int64_t block_at(int64_t row, int64_t step) const {
    return (row / unit_rows * steps_of(min_of(c.in, unit_reach)) + step) * parts * block;
  }

  const linear_unit_args& c;
  matrix_unit unit;

  // The words of W that come after a piece: the next one. From L3 they came too late: 192 rows 1.1 times as fast.
  MH_INLINE line_walk words_after(int64_t stretch, int64_t k) const {
    const int64_t steps = steps_of(c.in), step = min_of(k / unit_step + unit_depth / unit_step, steps);
    const int64_t all = weight_words(c.columns, c.in), from = (stretch * steps + step) * parts * unit_block;
    const int64_t bytes = min_of(unit_depth / unit_step * parts * unit_block, all - from) * 4;
    return line_walk({reinterpret_cast<const char*>(static_cast<const uint32_t*>(c.weights) + from), bytes, bytes, 1});
  }

  // 32 x 32 sums on their way to y, a vector at a time: y = added + sums, for as many rows and columns as there are.
  class adder {
   public:
    adder() = default;
    MH_INLINE adder(const float* sums, float* y, int64_t y_stride, const float* added, int64_t added_stride,
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
        store<float>(to_ + l_, load(added_ + l_) + vec<float>::load_aligned(from_));
      } else {
        for (int64_t l = l_; l < columns_; ++l) to_[l] = added_[l] + from_[l - l_];
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
    float* to_ = nullptr;
    int64_t stride_ = 0;
    const float* added_ = nullptr;
    int64_t added_stride_ = 0, columns_ = 0, l_ = 0;
  };

  // Sums of a piece for all rows. What a product leaves is added to y while the unit works on the next one.
  void multiply(int64_t stretch, int64_t k) const {
    const int64_t step = k / unit_step, steps = steps_of(c.in), column = stretch * unit_rows;
    const unit_b w_at{static_cast<const uint32_t*>(c.weights) + (stretch * steps + step) * parts * unit_block,
                      unit_block, parts * unit_block};
    line_walk next = words_after(stretch, k);
    alignas(64) float sums[2][unit_rows * unit_rows];
    adder adding;
    for (int64_t row = 0; row < c.rows; row += unit_rows) {
      float* const to = sums[row / unit_rows % 2];
      const unit_a x_at{static_cast<const uint16_t*>(c.scratch) + block_at(row, step % (unit_reach / unit_step)), block,
                        parts * block, unit_step};
      const auto meanwhile = [&adding, &next]() MH_INLINE_LAMBDA {
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
          adding.step();
          if constexpr (asks_ahead) next.step();
        }
      };
      unit.product<values::format>(x_at, w_at, terms, {unit_rows, min_of(unit_depth, steps * unit_step - k)}, to,
                                   unit_rows, false, meanwhile);
      adding.finish();
      float* const y = static_cast<float*>(c.y) + row * c.y_stride + column;
      const float* const bias = static_cast<const float*>(c.bias) + column;
      adding = adder(to, y, c.y_stride, k == 0 ? bias : y, k == 0 ? 0 : c.y_stride, min_of(unit_rows, c.rows - row),
                     min_of(unit_rows, c.columns - column));
    }
    adding.finish();
  }

  void run() const {
    memset(c.left, 0, static_cast<size_t>(c.rows));
    for (int64_t first = 0; first < c.in; first += unit_reach) {
      pack_rows(first);
      for (int64_t stretch = 0; stretch * unit_rows < c.columns; ++stretch) {
        for (int64_t k = first; k < min_of(first + unit_reach, c.in); k += unit_depth) multiply(stretch, k);
      }
    }
  }
};

void run_linear_unit(const linear_unit_args* c) { linear_unit_task{*c, {}}.run(); }

// AMX beside AVX-512, 768 x 768, one core: 192 and 128 rows 1.8 times as fast, 96 1.55, 64 1.3, 32 as fast. Whole layers of
// 64 rows: 128 x 128 1.05 times as fast, 64 x 64 0.9. Of 48 rows: one entry 0.97 to 1.02, eight 1.2 to 1.7; of 40 and 32 one
// entry 0.89 to 0.98, eight and more 1.2 to 1.7, and one entry must have the bits of eight.
inline constexpr linear_unit_kernels linear_unit = {run_linear_unit,
                                                    linear_unit_task::row_bytes,
                                                    linear_unit_task::weight_words,
                                                    linear_unit_task::pack_weights,
                                                    48,
                                                    128};

#else
inline constexpr linear_unit_kernels linear_unit = {};
#endif

}  // namespace
}  // namespace manyhead::MH_ISA
