// The matrix unit, and what numbers become for it. Of an ISA with a unit and another one's vectors, this is all there is to
// test but for whole kernels; where there is no unit, its plain body.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <iterator>
#include <random>
#include <utility>
#include <vector>

#include "kernels/decode_unit.hpp"
#include "kernels/matrix_unit.hpp"
#include "micro_test.hpp"

namespace manyhead::MH_ISA {
namespace {

// The words of a vector.
std::vector<uint32_t> words_of(word_vec x) {
  aligned<uint32_t> out(lanes<float>);
  x.store_aligned(out.get());
  return {out.get(), out.get() + lanes<float>};
}

// The sum of the parts of two floats, given as words: of the even one, or the odd.
template <class Format, size_t Parts>
std::pair<double, double> sum_of(const word_vec (&part)[Parts]) {
  std::pair<double, double> sum{0, 0};
  for (const word_vec& x : part) {
    const uint32_t word = words_of(x)[0];
    sum.first += Format::widen(static_cast<uint16_t>(word));
    sum.second += Format::widen(static_cast<uint16_t>(word >> 16));
  }
  return sum;
}

TEST_CASE("numbers are split into parts for the matrix unit") {
  aligned<uint32_t> pair(lanes<float>);
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    if ((bits & 0x7c00U) == 0x7c00U) continue;  // inf, NaN
    const uint32_t other = (bits * 40503U + 7) & 0x3bffU;
    for (int64_t i = 0; i < lanes<float>; ++i) pair[i] = bits | other << 16;
    const word_vec x[1] = {word_vec::load_aligned(pair.get())};
    word_vec part[2], whole[1];
    split_pairs<f16, in_bf16>(x, part);
    const std::pair<double, double> values{f16::widen(static_cast<uint16_t>(bits)),
                                           f16::widen(static_cast<uint16_t>(other))};
    REQUIRE(sum_of<in_bf16>(part) == values);
    split_pairs<f16, in_f16>(x, whole);
    REQUIRE(sum_of<in_f16>(whole) == values);
  }
  const auto loses = [](auto format, auto& part, float x, double most) {
    vec<float> even(x), odd(-3 * x);
    split_floats<decltype(format)>(even, odd, part);
    const auto [first, second] = sum_of<decltype(format)>(part);
    const double a = static_cast<double>(x), b = static_cast<double>(-3 * x);
    CHECK(std::abs(first - a) <= most * std::abs(a));
    CHECK(std::abs(second - b) <= most * std::abs(b));
  };
  word_vec one[1], two[2], three[3];
  for (const float x : normal<float>(2000, 3)) {
    loses(in_bf16{}, one, x, 0x1p-8);
    loses(in_bf16{}, two, x, 0x1p-16);
    loses(in_bf16{}, three, x, 0);
    loses(in_bf16{}, three, x * 0x1p100F, 0);
    loses(in_bf16{}, three, x * 0x1p-90F, 0);
    if (std::abs(x) < 0x1p-8F) continue;  // f16 has few exponents: the second part would be denormal
    loses(in_f16{}, one, 16 * x, 0x1p-11);
    loses(in_f16{}, two, 16 * x, 0x1p-22);
  }
}

TEST_CASE("pairs of bf16 are for the unit up to 2^80 and if none is denormal, in every place of a vector") {
  constexpr uint16_t usual[] = {0x0000, 0x8000, 0x0080, 0x3f80, 0x6780, 0xe780};
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const uint32_t size = bits & 0x7fffU;
    const bool want = size == 0 || (size >= 0x80 && size <= 0x6780);
    const size_t place = bits % (2 * lanes<float>);
    aligned<uint16_t> x(2 * lanes<float>);
    for (int64_t i = 0; i < 2 * lanes<float>; ++i) x[i] = usual[static_cast<size_t>(bits + i) % std::size(usual)];
    x[static_cast<int64_t>(place)] = static_cast<uint16_t>(bits);
    pair_magnitudes seen;
    seen.take(word_vec::load_aligned(reinterpret_cast<const uint32_t*>(x.get())));
    seen.take(word_vec(0x3f803f80U));
    if (seen.all_usual() != want) FAIL_CHECK("0x" << std::hex << bits);
  }
}

TEST_CASE("which products of parts are taken") {
  const auto are = [](const unit_terms& t, std::vector<int> b_parts) {
    return t.a_parts == static_cast<int>(b_parts.size()) && std::equal(b_parts.begin(), b_parts.end(), t.b_parts);
  };
  CHECK(are(unit_number<f32>::scores(false), {3, 2, 1}));
  CHECK(are(unit_number<f32>::values::terms(false), {3, 2, 1}));
  CHECK(are(unit_number<f32>::values::terms(true), {2, 1, 1}));
  CHECK(are(unit_number<bf16>::scores(false), {1}));
  CHECK(are(unit_number<bf16>::values::terms(false), {1}));
#if MH_UNIT_F16
  CHECK(are(unit_number<f16>::scores(false), {1}));
  CHECK(are(unit_number<f16>::values::terms(false), {2}));
#else
  CHECK(are(unit_number<f16>::scores(false), {2, 2}));
  CHECK(are(unit_number<f16>::scores(true), {2, 1}));
  CHECK(are(unit_number<f16>::values::terms(false), {2, 1}));
  CHECK(are(unit_number<f16>::values::terms(true), {1, 1}));
#endif
}

template <class Format>
void check_products(uint16_t (*narrow)(float)) {
  constexpr int64_t steps = 3, rows = unit_rows, stride = 48;
  constexpr int64_t sums = steps * unit_step, part = rows * sums, w = lanes<float>;
  // Both in [part][line][values of the sum], small integers: results are exact. Columns and weights are two ways to
  // bring the same to B.
  std::mt19937 random(11);
  aligned<uint16_t> a(3 * part), b(3 * part), a_packed(3 * part), a_rows(3 * part);
  aligned<uint32_t> columns(3 * part / 2), weights(3 * part / 2);
  const auto small = [&] { return narrow(static_cast<float>(static_cast<int>(random() % 15) - 7)); };
  for (int64_t i = 0; i < 3 * part; ++i) {
    a[i] = small();
    b[i] = small();
  }
  const auto pairs_at = [](const uint16_t* x) {
    return word_vec::load_unaligned(reinterpret_cast<const uint32_t*>(x));
  };
  for (int64_t i = 0; i < 3; ++i) {
    for (int64_t k = 0; k < sums; k += 2 * w) {
      for (int64_t row = 0; row < rows; ++row) {
        put_row(&a_packed[i * part + k / unit_step * rows * unit_step], unit_step, row, k % unit_step,
                pairs_at(&a[i * part + row * sums + k]));
        if (unit_takes_memory) put_row(&a_rows[i * part], sums, row, k, pairs_at(&a[i * part + row * sums + k]));
      }
      for (int64_t column = 0; column < rows; column += w) {
        word_vec x[w][1];
        for (int64_t l = 0; l < w; ++l) x[l][0] = pairs_at(&b[i * part + (column + l) * sums + k]);
        put_columns(&columns[i * part / 2], column, k, x);
      }
    }
    for (int64_t k = 0; k < sums; k += 2 * weight_pairs) {
      for (int64_t column = 0; column < rows; column += w) {
        word_vec x[weight_pairs];
        for (int64_t pair = 0; pair < weight_pairs; ++pair) {
          aligned<uint32_t> of(w);
          for (int64_t l = 0; l < w; ++l) {
            const uint16_t* at = &b[i * part + (column + l) * sums + k + 2 * pair];
            of[l] = at[0] | static_cast<uint32_t>(at[1]) << 16;
          }
          x[pair] = word_vec::load_aligned(of.get());
        }
        put_weights(&weights[i * part / 2], column, k, x);
      }
    }
  }
  CHECK(std::equal(columns.get(), columns.get() + 3 * part / 2, weights.get()));
  // A by columns: [step][pair][row] words.
  aligned<uint16_t> a_columns(3 * part);
  for (int64_t i = 0; i < 3; ++i) {
    for (int64_t m = 0; m < rows; ++m) {
      for (int64_t k = 0; k < sums; ++k)
        a_columns[i * part + (k / 2 * rows + m) * 2 + k % 2] = a[i * part + m * sums + k];
    }
  }
  std::vector<unit_a> ways;
  if (!unit_takes_columns) ways.push_back({a_packed.get(), part, rows * unit_step, unit_step});
  if (unit_takes_memory) ways.push_back({a_rows.get(), part, unit_step, sums});
  if (unit_takes_columns) ways.push_back({a_columns.get(), part, rows * unit_step, 2, 2 * rows});
  for (const unit_terms& terms : {unit_terms{1, {1}}, unit_terms{1, {2}}, unit_terms{2, {2, 1}}, unit_terms{2, {2, 2}},
                                  unit_terms{3, {3, 2, 1}}}) {
    for (const unit_extent& size : {unit_extent{rows, sums},
                                    {rows, 66},
                                    {rows, 4},
                                    {rows, 2},
                                    {27, 34},
                                    {20, 32},
                                    {15, 64},
                                    {14, 66},
                                    {9, 34},
                                    {3, 2},
                                    {2, 66},
                                    {1, 32},
                                    {rows, 66, 16},
                                    {31, 34, 9},
                                    {17, 2, 17},
                                    {16, 32, 1},
                                    {7, 66, 16},
                                    {1, 2, 2}}) {
      const int64_t depth = round_up<unit_grain.sums>(size.sums);
      const int64_t columns_done = unit_takes_halves && size.columns <= rows / 2 ? rows / 2 : rows;
      std::vector<float> want(static_cast<size_t>(rows * rows));
      for (int64_t m = 0; m < rows; ++m) {
        for (int64_t column = 0; column < rows; ++column) {
          for (int i = 0; i < terms.a_parts; ++i) {
            for (int j = 0; j < terms.b_parts[i]; ++j) {
              for (int64_t k = 0; k < depth; ++k)
                want[static_cast<size_t>(m * rows + column)] +=
                    Format::widen(a[i * part + m * sums + k]) * Format::widen(b[j * part + column * sums + k]);
            }
          }
        }
      }
      for (const unit_a& way : ways) {
        struct results {
          bool add, closes;
          float scale;
          bool asks;
        };
        for (const results& asked : {results{false, false, 1, false},
                                     {false, true, 1, true},
                                     {false, false, 0.5F, true},
                                     {false, true, 0.5F, false},
                                     {true, false, 1, true}}) {
          if (!unit_finds_tops && (asked.closes || asked.scale != 1)) continue;
          lines_ahead ahead;  // short rows, so that some runs end within a product
          ahead.add({reinterpret_cast<const char*>(a.get()), 200, 130, 3});
          const bool add = asked.add;
          // Some columns' maxima are below all results before, some above; some rows count in all columns, or in none.
          const bool finds = unit_finds_tops && !add && terms.products() == 1;
          aligned<uint32_t> open(rows);
          for (int64_t column = 0; column < rows; ++column)
            open[column] = column % 7 == 0 ? 0U : column % 7 == 1 ? ~0U : 0x9e3779b9U * static_cast<uint32_t>(column);
          const bool closes = finds && asked.closes;
          const float scale = finds ? asked.scale : 1;
          const auto result = [&](int64_t row, int64_t column) {
            if (column >= columns_done) return 0.0F;
            const bool is_open = !closes || (open[column] >> row & 1U) != 0;
            return is_open ? scale * want[static_cast<size_t>(row * rows + column)] : -infinity<float>;
          };
          const auto top_before = [](int64_t column) { return column % 5 == 0 ? 1e5F : -1e5F; };
          aligned<float> c(rows * stride, 5.0F), top(rows);
          for (int64_t column = 0; column < rows; ++column) top[column] = top_before(column);
          const matrix_unit unit;
          unit.template product<Format>(
              way, {columns.get(), part / 2, unit_block}, terms, size, c.get(), stride, add, [] {},
              finds ? unit_scores{scale, closes ? open.get() : nullptr, top.get()} : unit_scores{},
              asked.asks ? &ahead : nullptr);
          bool same = true;
          for (int64_t column = 0; column < rows; ++column) {
            float largest = top_before(column);
            for (int64_t m = 0; finds && column < columns_done && m < size.rows; ++m)
              largest = std::max(largest, result(m, column));
            same = same && top[column] == largest;
          }
          for (int64_t m = 0; m < rows; ++m) {
            if (m >= size.rows && m < round_up<unit_grain.rows>(size.rows)) continue;  // may be anything
            for (int64_t column = 0; column < stride; ++column) {
              const bool counts = m < size.rows && column < rows;
              const float before = add || !counts ? 5.0F : 0.0F;
              same = same && c[m * stride + column] == before + (counts ? result(m, column) : 0.0F);
            }
          }
          CHECK(same);
        }
      }
    }
  }
}

TEST_CASE("the matrix unit adds up the products of the parts") {
  check_products<in_bf16>([](float x) { return bf16::narrow(x); });
#if MH_UNIT_F16
  check_products<in_f16>([](float x) { return f16::narrow(x); });
#endif
}

// Small integers again: exact. Rows of K lie apart, and are not looked at behind the last.
template <class Format>
void check_steps(uint16_t (*narrow)(float)) {
  constexpr int64_t dims = 96, v_dim = 64, stride = 112, part = 300;
  std::mt19937 random(12);
  const auto small = [&] {
    return static_cast<uint32_t>(narrow(static_cast<float>(static_cast<int>(random() % 15) - 7)));
  };
  aligned<uint16_t> k(32 * stride);
  aligned<uint32_t> q(dims / 2 * 16), p(2 * part), v(v_dim / 16 * 256);
  for (int64_t i = 0; i < 32 * stride; ++i) k[i] = static_cast<uint16_t>(small());
  for (aligned<uint32_t>* x : {&q, &p, &v}) {
    const int64_t count = x == &q ? dims / 2 * 16 : x == &p ? 2 * part : v_dim / 16 * 256;
    for (int64_t i = 0; i < count; ++i) (*x)[i] = small() | small() << 16;
  }
  const auto times = [](uint32_t a, uint32_t b) {
    const auto low = [](uint32_t x) { return Format::widen(static_cast<uint16_t>(x)); };
    return low(a) * low(b) + low(a >> 16) * low(b >> 16);
  };
  for (const int64_t rows : {1, 2, 7, 8, 15, 16}) {
    const step_unit<Format> unit(rows);
    const auto check_scores = [&]<int Blocks>() {
      aligned<float> to(32 * 16, 5.0F);
      int64_t steps = 0;
      unit.template scores<Blocks>(k.get(), stride * 2, q.get(), dims / 32, to.get(),
                                   [&](int64_t at) { steps += at + 1; });
      CHECK(steps == 6);
      bool same = true;
      for (int64_t key = 0; key < 32; ++key) {
        for (int64_t row = 0; row < 16; ++row) {
          float want = key < 16 * Blocks ? 0.0F : 5.0F;
          for (int64_t i = 0; key < 16 * Blocks && i < dims / 2; ++i) {
            const uint16_t* pair = &k[key * stride + 2 * i];
            want += times(pair[0] | static_cast<uint32_t>(pair[1]) << 16, q[i * 16 + row]);
          }
          same = same && to[key * 16 + row] == want;
        }
      }
      CHECK(same);
    };
    check_scores.template operator()<1>();
    check_scores.template operator()<2>();
    const auto check_values = [&]<int Parts>(bool add) {
      aligned<float> out(17 * v_dim, 5.0F);
      int64_t turns = 0;
      unit.template values<Parts>(p.get(), part, v.get(), v_dim, out.get(), add, rows,
                                  [&](int64_t at) { turns += at + 1; });
      CHECK(turns == 3);
      bool same = true;
      for (int64_t row = 0; row < 17; ++row) {
        for (int64_t d = 0; d < v_dim; ++d) {
          float want = add || row >= rows ? 5.0F : 0.0F;
          for (int64_t i = 0; row < rows && i < 16 * Parts; ++i)
            want += times(p[i / 16 * part + row * 16 + i % 16], v[d / 16 * 256 + i % 16 * 16 + d % 16]);
          same = same && out[row * v_dim + d] == want;
        }
      }
      CHECK(same);
    };
    for (const bool add : {false, true}) {
      check_values.template operator()<1>(add);
      check_values.template operator()<2>(add);
    }
  }
}

TEST_CASE("the unit's products of a few rows") {
  check_steps<in_bf16>([](float x) { return bf16::narrow(x); });
#if MH_UNIT_F16 || !defined(__AMX_BF16__)
  check_steps<in_f16>([](float x) { return f16::narrow(x); });
#endif
}

}  // namespace
}  // namespace manyhead::MH_ISA
