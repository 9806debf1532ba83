// The kernels' building blocks, one by one, at the width of the ISA this file is compiled for (and at the emulated
// widths): exp2, tanh, log2, conversions, transposition, the product micro-kernel with every tail, visibility bits, softmax
// rows.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <limits>
#include <random>
#include <set>
#include <type_traits>
#include <vector>

#include "kernels/merge.hpp"
#include "kernels/panel.hpp"
#include "micro_test.hpp"

namespace manyhead::MH_ISA {
namespace {

template <class T>
T exp2_scalar(T x) {
  aligned<T> out(lanes<T>);
  exp2_of<T>(vec<T>(x)).store_aligned(out.get());
  return out[0];
}

template <class T>
double ulps(T got, double want) {
  const T near = static_cast<T>(std::abs(want));
  const double unit =
      static_cast<double>(std::nextafter(near, std::numeric_limits<T>::infinity())) - static_cast<double>(near);
  return std::abs(static_cast<double>(got) - want) / unit;
}

template <int Degree, bool Flushed = false>
void check_exp2(double error) {
  for (float x = -130; x < 9; x += 0.0371F) {
    vec<float> v[4] = {vec<float>(x), vec<float>(-1.0F), vec<float>(-infinity<float>), vec<float>(std::nanf(""))};
    {
      [[maybe_unused]] const flush_denormals flushes;
      exp2_of<float, 4, Degree, Flushed>(v);
    }
    aligned<float> out(4 * lanes<float>);
    for (int i = 0; i < 4; ++i) v[i].store_aligned(out.get() + i * lanes<float>);
    if (x > -100) CHECK(std::abs(out[0] / std::exp2(static_cast<double>(x)) - 1) < error);
    if (x < (Flushed ? -127 : -101.5F)) CHECK(out[0] == 0);
    CHECK(out[lanes<float>] == 0.5F);
    CHECK(out[2 * lanes<float>] == 0);
    CHECK(std::isnan(out[3 * lanes<float>]));
  }
}
TEST_CASE("exp2 of degree 5, several at once") {
  check_exp2<5>(4e-7);
  check_exp2<5, true>(4e-7);
}
TEST_CASE("exp2 of degree 4, several at once") {
  check_exp2<4>(3.2e-6);
  check_exp2<4, true>(3.2e-6);
}
TEST_CASE("exp2 of degree 3, several at once") {
  check_exp2<fast_exp2_degree<float>>(1.03e-4);
  check_exp2<fast_exp2_degree<float>, true>(1.03e-4);
}

TEST_CASE("denormal results come back when they are no longer flushed") {
  volatile float least = std::numeric_limits<float>::min();
  {
    [[maybe_unused]] const flush_denormals flushes;
  }
  CHECK(least / 2 > 0);
}

TEST_CASE_TEMPLATE("exp2 is within 1.5 ulp, exact at integers, 0 far below, NaN for NaN", T, float, double) {
  const double low = sizeof(T) == 4 ? -100.0 : -996.0;
  double worst = 0;
  std::mt19937 random(7);
  std::uniform_real_distribution<double> uniform(low, 8.5);
  for (int i = 0; i < 200000; ++i) {
    const T x = static_cast<T>(i % 2 == 0 ? uniform(random) : uniform(random) / low);  // the whole range, and around 0
    const T got = exp2_scalar<T>(x);
    worst = std::max(worst, sizeof(T) == 4 ? ulps<T>(got, std::exp2(static_cast<double>(x)))
                                           : ulps<T>(got, static_cast<double>(std::exp2(static_cast<long double>(x)))));
  }
  MESSAGE("worst error in ulp: " << worst);
  CHECK(worst <= 1.5);
  for (int i = -100; i <= 8; ++i) CHECK(exp2_scalar<T>(static_cast<T>(i)) == std::exp2(static_cast<T>(i)));
  // No result is so small that its product with a value, or a sum of them, would be denormal.
  for (double x = low - 1.5; x > 3 * low; x *= 1.003) CHECK(exp2_scalar<T>(static_cast<T>(x)) == T(0));
  CHECK(exp2_scalar<T>(-infinity<T>) == T(0));
  CHECK(exp2_scalar<T>(lowest<T>) == T(0));
  CHECK(exp2_scalar<T>(static_cast<T>(-2000)) == T(0));
  CHECK(std::isnan(exp2_scalar<T>(std::numeric_limits<T>::quiet_NaN())));
  // A NaN with every payload bit set must not turn into a number.
  bits<T> all = ~bits<T>(0);
  T nan;
  std::memcpy(&nan, &all, sizeof(T));
  CHECK(std::isnan(exp2_scalar<T>(nan)));
}

TEST_CASE("log2 is within 5 ulp, exact at powers of two, infinite for infinity, NaN for NaN") {
  aligned<double> out(lanes<double>);
  const auto log2_scalar = [&](double x) {
    log2_of(vec<double>(x)).store_aligned(out.get());
    for (int64_t i = 1; i < lanes<double>; ++i) CHECK(std::memcmp(&out[i], &out[0], sizeof(double)) == 0);
    return out[0];
  };
  double worst = 0;
  std::mt19937 random(7);
  std::uniform_real_distribution<double> exponent(-1000, 1000), near_1(-20, 0);
  for (int i = 0; i < 100000; ++i) {
    // The whole range, from 1/2 to 2, and around 1, where results are small.
    const double x = i % 3 == 0   ? std::exp2(exponent(random))
                     : i % 3 == 1 ? std::exp2(exponent(random) / 1000)
                                  : 1 + (i % 2 == 0 ? 1 : -1) * std::exp2(near_1(random));
    worst = std::max(worst, ulps<double>(log2_scalar(x), static_cast<double>(std::log2(static_cast<long double>(x)))));
  }
  MESSAGE("worst error in ulp: " << worst);
  CHECK(worst <= 5);
  for (int i = -1022; i <= 1023; ++i) CHECK(log2_scalar(std::exp2(i)) == i);
  CHECK(log2_scalar(infinity<double>) == infinity<double>);
  CHECK(std::isnan(log2_scalar(std::numeric_limits<double>::quiet_NaN())));
}

template <class T, bool Rough>
void check_tanh(double error) {
  aligned<T> out(lanes<T>);
  for (const T cap : {T(1), T(50), T(1e-20), std::numeric_limits<T>::max()}) {
    for (double x = 1e-30; x < 1e5; x *= 1.01) {
      for (const double sign : {1.0, -1.0}) {
        const T at = static_cast<T>(sign * x);
        vec<T> of[1] = {vec<T>(at)};
        tanh_of<T, Rough>(of, cap);
        of[0].store_aligned(out.get());
        const double want = std::tanh(static_cast<double>(at) / tanh_units<T>);
        const double got = static_cast<double>(out[0]) / static_cast<double>(cap);
        // What is tiny itself may be denormal.
        if (std::abs(want) * static_cast<double>(cap) > static_cast<double>(std::numeric_limits<T>::min()) * 1e8)
          CHECK(std::abs(got - want) <= error * std::abs(want));
      }
    }
    vec<T> special[2] = {vec<T>(T(0)), vec<T>(std::numeric_limits<T>::quiet_NaN())};
    tanh_of<T, Rough>(special, cap);
    special[0].store_aligned(out.get());
    CHECK(out[0] == T(0));
    special[1].store_aligned(out.get());
    CHECK(std::isnan(out[0]));
  }
}
TEST_CASE_TEMPLATE("tanh times a cap keeps its relative precision near 0 and saturates", T, float, double) {
  check_tanh<T, false>(4 * static_cast<double>(std::numeric_limits<T>::epsilon()));
}
TEST_CASE("rough tanh") { check_tanh<float, true>(1.5e-6); }

TEST_CASE_TEMPLATE("transpose", T, float, double) {
  constexpr int64_t n = lanes<T>;
  vec<T> x[n];
  aligned<T> row(n);
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j < n; ++j) row[j] = static_cast<T>(i * n + j);
    x[i] = vec<T>::load_aligned(row.get());
  }
  transpose<T>(x);
  for (int64_t i = 0; i < n; ++i) {
    x[i].store_aligned(row.get());
    for (int64_t j = 0; j < n; ++j) CHECK(row[j] == static_cast<T>(j * n + i));
  }
}

TEST_CASE_TEMPLATE("sums of vectors, in an order that does not depend on the lane", T, float, double) {
  constexpr int64_t n = lanes<T>;
  vec<T> x[n], same[n];
  aligned<T> row(n), sums(n);
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j < n; ++j) row[j] = static_cast<T>(100 * i + j);
    x[i] = vec<T>::load_aligned(row.get());
    for (int64_t j = 0; j < n; ++j) row[j] = static_cast<T>(1) / static_cast<T>(j * j + 3);
    same[i] = vec<T>::load_aligned(row.get());
  }
  sums_of<T>(x).store_aligned(sums.get());
  for (int64_t i = 0; i < n; ++i) CHECK(sums[i] == static_cast<T>(100 * i * n + n * (n - 1) / 2));
  sums_of<T>(same).store_aligned(sums.get());
  for (int64_t i = 1; i < n; ++i) CHECK(sums[i] == sums[0]);
}

template <class S, int64_t N>
void check_load_some() {
  for (int64_t n = 1; n <= N + 1; ++n) {
    std::vector<S> from(static_cast<size_t>(n));  // as long as it is: sanitizers see a read behind it
    for (size_t i = 0; i < from.size(); ++i) from[i] = static_cast<S>(i + 1);
    alignas(64) S to[N];
    std::fill_n(to, N, S(99));
    load_some(from.data(), n, to);
    for (int64_t i = 0; i < N; ++i) CHECK(to[i] == static_cast<S>(i < n ? i + 1 : 0));
  }
}

TEST_CASE_TEMPLATE("the first of some elements are loaded, and zeros for the others", S, float, uint16_t) {
  check_load_some<S, lanes<float>>();
  check_load_some<S, 2 * lanes<float>>();
}

TEST_CASE_TEMPLATE("the first of a vector's elements are stored, and none beside them", S, float, double, uint16_t) {
  constexpr int64_t n = sizeof(S) == 8 ? lanes<double> : lanes<float>;
  alignas(64) S from[n];
  for (int64_t i = 0; i < n; ++i) from[i] = static_cast<S>(i + 1);
  for (int64_t count = 0; count <= n; ++count) {
    S to[n];
    std::fill_n(to, n, S(99));
    store_some(to, count, from);
    for (int64_t i = 0; i < n; ++i) CHECK(to[i] == static_cast<S>(i < count ? i + 1 : 99));
  }
}

TEST_CASE_TEMPLATE("the largest of all lanes", T, float, double) {
  for (int64_t at = 0; at < lanes<T>; ++at) {
    alignas(64) T x[lanes<T>];
    for (int64_t i = 0; i < lanes<T>; ++i) x[i] = i == at ? T(-1) : -infinity<T>;
    CHECK(largest_of<T>(vec<T>::load_aligned(x)) == T(-1));
  }
}

TEST_CASE_TEMPLATE("interleave mixes two vectors, deinterleave parts them again", T, float, double) {
  constexpr int64_t n = lanes<T>;
  aligned<T> both(2 * n);
  for (int64_t i = 0; i < 2 * n; ++i) both[i] = static_cast<T>(i);
  vec<T> a = load(both.get()), b = load(both.get() + n);
  interleave<T>(a, b);
  store<T>(both.get(), a);
  store<T>(both.get() + n, b);
  for (int64_t i = 0; i < 2 * n; ++i) CHECK(both[i] == static_cast<T>(i / 2 + i % 2 * n));
  deinterleave<T>(a, b);
  store<T>(both.get(), a);
  store<T>(both.get() + n, b);
  for (int64_t i = 0; i < 2 * n; ++i) CHECK(both[i] == static_cast<T>(i));
}

TEST_CASE_TEMPLATE("pairs of vectors widen in the order that the trait says", D, f32, f64, bf16, f16) {
  using T = typename D::real;
  constexpr int64_t n = lanes<T>;
  // An odd address, as rows in the middle of an array have.
  typename D::storage narrow[2 * n + 1];
  aligned<T> wide(2 * n);
  for (int64_t first = 0; first < 0x10000; first += 2 * n) {
    for (int64_t i = 0; i < 2 * n; ++i) narrow[i + 1] = static_cast<typename D::storage>(first + i);
    vec<T> a, b;
    D::widen_pair(narrow + 1, a, b);
    if (D::pairs_apart) interleave<T>(a, b);
    store<T>(wide.get(), a);
    store<T>(wide.get() + n, b);
    for (int64_t i = 0; i < 2 * n; ++i) {
      const T want = D::widen(narrow[i + 1]);
      CHECK((std::isnan(want) ? std::isnan(wide[i]) : std::memcmp(&wide[i], &want, sizeof(T)) == 0));
    }
  }
}

TEST_CASE("half precision: every value widens exactly and comes back") {
  for (uint32_t h = 0; h < 0x10000U; ++h) {
    const auto x = static_cast<uint16_t>(h);
    const uint32_t exponent = h >> 10 & 0x1fU;
    const double mantissa = h & 0x3ffU;
    const double sign = h >> 15 != 0 ? -1.0 : 1.0;
    const float wide = f16::widen(x);
    if (exponent == 31) {
      CHECK((mantissa == 0 ? std::isinf(wide) : std::isnan(wide)));
    } else {
      const double want = sign * (exponent == 0 ? std::ldexp(mantissa, -24)
                                                : std::ldexp(1024 + mantissa, static_cast<int>(exponent) - 25));
      CHECK(static_cast<double>(wide) == want);
    }
    if (!std::isnan(wide)) CHECK(f16::narrow(wide) == x);
    const float wide_b = bf16::widen(x);
    if (!std::isnan(wide_b)) CHECK(bf16::narrow(wide_b) == x);
  }
}

TEST_CASE("narrowing rounds to nearest even") {
  CHECK(f16::widen(f16::narrow(65519.996F)) == 65504.0F);
  CHECK(std::isinf(f16::widen(f16::narrow(65520.0F))));
  CHECK(f16::narrow(0x1.002p0F) == f16::narrow(1.0F));      // half way, even is below
  CHECK(f16::narrow(0x1.006p0F) == f16::narrow(1.0F) + 2);  // half way, even is above
  CHECK(f16::narrow(0x1p-25F) == 0);                        // half of the smallest
  CHECK(f16::narrow(0x1.8p-25F) == 1);
  CHECK(std::isnan(f16::widen(f16::narrow(std::nanf("")))));
  CHECK(bf16::narrow(0x1.01p0F) == bf16::narrow(1.0F));
  CHECK(bf16::narrow(0x1.03p0F) == bf16::narrow(1.0F) + 2);
  CHECK(std::isnan(bf16::widen(bf16::narrow(std::nanf("")))));
  CHECK(std::isinf(bf16::widen(bf16::narrow(3.4e38F))));
}

TEST_CASE_TEMPLATE("vectors widen and narrow as single elements do", D, bf16, f16) {
  constexpr int64_t n = lanes<float>;
  aligned<float> wide(n);
  uint16_t narrow[n];
  const auto bits_of_float = [](float f) {
    uint32_t u;
    std::memcpy(&u, &f, 4);
    return u;
  };
  for (uint32_t first = 0; first < 0x10000U; first += n) {
    for (int64_t i = 0; i < n; ++i) narrow[i] = static_cast<uint16_t>(first + i);
    D::widen(narrow).store_aligned(wide.get());
    for (int64_t i = 0; i < n; ++i) {
      const float want = D::widen(narrow[i]);
      CHECK((std::isnan(want) ? std::isnan(wide[i]) : bits_of_float(wide[i]) == bits_of_float(want)));
    }
  }
  // All exponents and signs, mantissas around the halves that are rounded.
  for (uint32_t top = 0; top < 0x10000U; top += 3) {
    for (const uint32_t low : {0U, 1U, 0x0fffU, 0x1000U, 0x1001U, 0x3000U, 0x7fffU, 0x8000U, 0x8001U, 0xffffU}) {
      const uint32_t u = top << 16 | low;
      float f;
      std::memcpy(&f, &u, 4);
      for (int64_t i = 0; i < n; ++i) wide[i] = i % 2 == 0 ? f : 1.0F;
      D::narrow(vec<float>::load_aligned(wide.get()), narrow);
      const uint16_t want = D::narrow(f);
      for (int64_t i = 0; i < n; i += 2) {
        const bool same = std::isnan(f) ? std::isnan(D::widen(narrow[i])) : narrow[i] == want;
        CHECK_MESSAGE(same, u);
      }
      CHECK(D::widen(narrow[1]) == 1.0F);
    }
  }
}

TEST_CASE_TEMPLATE("rows of every length and stride widen and narrow", D, f32, f64, bf16, f16) {
  using S = typename D::storage;
  using T = typename D::real;
  for (int64_t n = 0; n <= 2 * lanes<T> + 1; ++n) {
    for (const int64_t stride : {1, 3, -2}) {
      std::vector<S> memory(200, S(0));
      S* base = memory.data() + 100;
      const std::vector<T> values = normal<T>(static_cast<size_t>(n) + 1, 3);
      for (int64_t i = 0; i < n; ++i) base[i * stride] = D::narrow(values[static_cast<size_t>(i)]);
      std::vector<T> wide(static_cast<size_t>(n) + 1, T(42));
      widen_row<D>(base, stride, n, wide.data());
      for (int64_t i = 0; i < n; ++i) CHECK(wide[static_cast<size_t>(i)] == D::widen(base[i * stride]));
      CHECK(wide[static_cast<size_t>(n)] == T(42));
      std::vector<S> before = memory;
      narrow_row<D>(wide.data(), n, base, stride);
      CHECK(memory == before);
    }
  }
}

TEST_CASE("nonzero_bytes: every count, several strides, nothing read behind the last byte") {
  std::mt19937 random(5);
  for (int64_t n = 0; n <= 32; ++n) {
    for (const int64_t stride : {1, 2, 0, -1}) {
      std::vector<uint8_t> bytes(128, 0xff);
      const uint8_t* p = bytes.data() + 64;
      uint32_t want = 0;
      for (int64_t i = 0; i < n; ++i)
        bytes[static_cast<size_t>(64 + i * stride)] = random() % 2 == 0 ? 0 : static_cast<uint8_t>(1 + random() % 255);
      for (int64_t i = 0; i < n; ++i) want |= static_cast<uint32_t>(p[i * stride] != 0) << i;
      CHECK(nonzero_bytes(p, stride, n) == want);
    }
  }
}

TEST_CASE("bit_range") {
  CHECK(bit_range(0, 32) == 0xffffffffU);
  CHECK(bit_range(-5, 3) == 7U);
  CHECK(bit_range(30, 99) == 0xc0000000U);
  CHECK(bit_range(4, 4) == 0U);
  CHECK(bit_range(9, 2) == 0U);
  CHECK(bit_range(40, 50) == 0U);
  CHECK(bit_range(std::numeric_limits<int64_t>::min() / 2, std::numeric_limits<int64_t>::max() / 2) == 0xffffffffU);
}

// The micro-kernel against three loops, for every number of rows around the tiles and some depths.
template <class T, int NV>
void check_product() {
  constexpr int64_t used = NV * lanes<T>;
  constexpr int64_t width = used + lanes<T>;  // B and C are some vectors of a wider panel
  const double tolerance = sizeof(T) == 4 ? 1e-5 : 1e-13;
  for (int64_t rows = 0; rows <= 2 * tile_rows<NV> + 1; ++rows) {
    for (const int64_t depth : {int64_t{0}, int64_t{1}, int64_t{5}, int64_t{17}}) {
      const std::vector<T> a = normal<T>(static_cast<size_t>((rows + 1) * (depth + 3)), 11);
      const std::vector<T> b_values = normal<T>(static_cast<size_t>((depth + 1) * width), 12);
      aligned<T> b((depth + 1) * width);
      std::copy(b_values.begin(), b_values.end(), b.get());
      aligned<T> c((rows + 1) * width, T(3));
      aligned<T> top(used, T(0.5));
      const by_rows<T> in_rows{a.data(), depth + 3};
      const in_panel<const T> in_b{b.get(), width};
      product<product_mode::set_max, NV>(in_rows, in_b, rows, depth, in_panel<T>{c.get(), width}, top.get());
      for (int64_t j = 0; j < used; ++j) {
        double want_top = 0.5;
        for (int64_t m = 0; m < rows; ++m) {
          double want = 0;
          for (int64_t k = 0; k < depth; ++k)
            want += static_cast<double>(a[static_cast<size_t>(m * (depth + 3) + k)]) *
                    static_cast<double>(b[k * width + j]);
          CHECK(std::abs(static_cast<double>(c[m * width + j]) - want) < tolerance);
          want_top = std::max(want_top, static_cast<double>(c[m * width + j]));
        }
        CHECK(static_cast<double>(top[j]) == want_top);
        CHECK(c[rows * width + j] == T(3));  // the row behind is not touched
      }
      for (int64_t m = 0; m < rows; ++m) CHECK(c[m * width + used] == T(3));  // nor the vector beside
      // Whole panels, whose last rows go through tiles of other sizes: the same bits.
      aligned<T> whole_b((depth + 1) * used), whole_c((rows + 1) * used, T(3)), whole_top(used, T(0.5));
      for (int64_t k = 0; k < depth; ++k) std::copy_n(b.get() + k * width, used, whole_b.get() + k * used);
      product<product_mode::set_max, NV>(in_rows, whole_panel<const T, NV>{whole_b.get()}, rows, depth,
                                         whole_panel<T, NV>{whole_c.get()}, whole_top.get());
      for (int64_t m = 0; m <= rows; ++m)
        CHECK(std::equal(whole_c.get() + m * used, whole_c.get() + (m + 1) * used, c.get() + m * width));
      CHECK(std::equal(whole_top.get(), whole_top.get() + used, top.get()));
      // Rows of A that would share a set of L1, for which tiles may be smaller: the same bits.
      constexpr int64_t apart = set_stride / static_cast<int64_t>(sizeof(T));
      std::vector<T> far(static_cast<size_t>((rows + 1) * apart));
      for (int64_t m = 0; m < rows; ++m) std::copy_n(a.data() + m * (depth + 3), depth, far.data() + m * apart);
      std::fill_n(whole_c.get(), rows * used, T(4));
      std::fill_n(whole_top.get(), used, T(0.5));
      product<product_mode::set_max, NV>(by_rows<T>{far.data(), apart}, whole_panel<const T, NV>{whole_b.get()}, rows,
                                         depth, whole_panel<T, NV>{whole_c.get()}, whole_top.get());
      for (int64_t m = 0; m <= rows; ++m)
        CHECK(std::equal(whole_c.get() + m * used, whole_c.get() + (m + 1) * used, c.get() + m * width));
      CHECK(std::equal(whole_top.get(), whole_top.get() + used, top.get()));
      // By columns, adding: what was there plus the product.
      const by_columns<T> in_columns{a.data(), rows + 1};
      if (static_cast<size_t>(depth * (rows + 1)) > a.size()) continue;
      product<product_mode::add, NV>(in_columns, in_b, rows, depth, in_panel<T>{c.get(), width}, top.get());
      aligned<T> again((rows + 1) * width, T(0));
      product<product_mode::set, NV>(in_rows, in_b, rows, depth, in_panel<T>{again.get(), width}, top.get());
      for (int64_t m = 0; m < rows; ++m) {
        for (int64_t j = 0; j < used; ++j) {
          double want = static_cast<double>(again[m * width + j]);
          for (int64_t k = 0; k < depth; ++k)
            want +=
                static_cast<double>(a[static_cast<size_t>(k * (rows + 1) + m)]) * static_cast<double>(b[k * width + j]);
          CHECK(std::abs(static_cast<double>(c[m * width + j]) - want) < tolerance);
        }
      }
    }
  }
}

TEST_CASE_TEMPLATE("product of one, two and three vectors", T, float, double) {
  check_product<T, 1>();
  check_product<T, 2>();
  if constexpr (max_panel_vectors == 3) check_product<T, 3>();
}

TEST_CASE_TEMPLATE("add_signed leaves out factors of negative sign, NaN and inf included", T, float, double) {
  constexpr int64_t width = lanes<T>;
  const std::vector<T> a = {T(2), std::numeric_limits<T>::quiet_NaN(), infinity<T>, T(5)};
  aligned<T> b(4 * width);
  aligned<T> c(width, T(1));
  for (int64_t j = 0; j < width; ++j) {
    b[j] = T(3);
    b[width + j] = T(-0.0);
    b[2 * width + j] = T(-0.0);
    b[3 * width + j] = j % 2 == 0 ? T(-0.0) : T(1);
  }
  product<product_mode::add_signed, 1>(by_rows<T>{a.data(), 4}, whole_panel<const T, 1>{b.get()}, 1, 4,
                                       whole_panel<T, 1>{c.get()}, c.get());
  for (int64_t j = 0; j < width; ++j) CHECK(c[j] == (j % 2 == 0 ? T(7) : T(12)));
}

TEST_CASE("lines that are needed soon are asked for once each, in order") {
  const char memory[4096] = {};
  lines_ahead ahead;
  CHECK(ahead.empty());
  ahead.add({memory, 1000, 130, 2});       // two rows of three lines
  ahead.add({memory + 3000, 64, 64, 0});   // no rows
  ahead.add({memory + 2048, 64, 64, 3});   // rows side by side
  ahead.add({memory + 3000, -64, 64, 3});  // backwards: left out
  const int64_t want[] = {0, 64, 128, 1000, 1064, 1128, 2048, 2112, 2176};
  for (const int64_t place : want) {
    ahead.walk.turn();
    REQUIRE_FALSE(ahead.walk.done());
    CHECK(ahead.walk.at - memory == place);
    ahead.walk.step();
  }
  ahead.walk.turn();
  ahead.walk.turn();
  CHECK(ahead.empty());
  ahead.walk.step();  // nothing is left to ask for
  CHECK(ahead.empty());
  ahead.add({memory, 64, 64, 1});  // goes on after running empty
  ahead.walk.turn();
  CHECK(ahead.walk.at == memory);
  ahead.clear();
  CHECK(ahead.empty());
  for (int i = 0; i < 20; ++i) ahead.add({memory + 64 * i, 64, 64, 1});  // the last of so many are left out
  int asked = 0;
  for (ahead.walk.turn(); !ahead.walk.done(); ahead.walk.turn()) {
    CHECK(ahead.walk.at == memory + 64 * asked++);
    ahead.walk.step();
  }
  CHECK(asked == 8);
}

TEST_CASE("lines come in runs of those that lie side by side") {
  const char memory[4096] = {};
  lines_ahead ahead;
  ahead.add({memory, 1000, 130, 2});        // two rows of three lines
  ahead.add({memory + 2048, 100, 100, 4});  // rows without gaps: seven lines
  const auto check = [&](int64_t most, int64_t place, int64_t count) {
    const line_run run = ahead.walk.run(most);
    CHECK(run.at - memory == place);
    CHECK(run.step == 64);
    CHECK(run.count == count);
  };
  check(2, 0, 2);
  check(8, 128, 1);
  check(8, 1000, 3);
  check(5, 2048, 5);
  CHECK_FALSE(ahead.empty());
  check(8, 2368, 2);
  CHECK(ahead.empty());
  const line_run none = ahead.walk.run(8);  // one place for all that are wanted
  CHECK(none.step == 0);
  CHECK(none.count == 8);
}

TEST_CASE("each line of a mask that a panel needs is asked for, and of rows whole lines apart no other") {
  alignas(64) static uint8_t mask[32 * 1024];
  kernel_call c{};
  c.group = 1;
  c.prefetch = 1;
  c.kv_len = 1000;
  c.mask_strides[3] = 1;
  const int64_t rows = 5, keys = 128;
  for (const int64_t pitch : {0, 1000, 1001, 1024}) {
    for (const int64_t off : {0, 16, 63}) {
      for (const int64_t begin : {0, 128, 872}) {
        CAPTURE(pitch);
        CAPTURE(off);
        CAPTURE(begin);
        c.mask = mask + 64 + off;
        c.mask_strides[2] = pitch;
        panel<float> x{};
        x.row = 3;
        x.count = rows;
        lines_ahead ahead;
        ask_for_mask<float>(ahead, c, 0, 0, x, begin, begin + keys);
        const auto line_of = [](const void* at) { return reinterpret_cast<uintptr_t>(at) / 64; };
        std::set<uintptr_t> asked, needed;
        for (ahead.walk.turn(); !ahead.walk.done(); ahead.walk.step()) asked.insert(line_of(ahead.walk.at));
        for (int64_t row = x.row; row < x.row + (pitch == 0 ? 1 : rows); ++row) {
          for (int64_t key = begin; key < begin + keys; ++key) needed.insert(line_of(c.mask + row * pitch + key));
        }
        CHECK(std::includes(asked.begin(), asked.end(), needed.begin(), needed.end()));
        if (pitch % 64 == 0) CHECK(asked == needed);
      }
    }
  }
}

TEST_CASE("results are asked for once, with the tile that few of the panel's keys follow") {
  float out[32 * 8];
  kernel_call c{};
  c.group = 1;
  c.chunks = 1;
  c.prefetch = 1;
  c.v_dim = 8;
  c.out = out;
  c.out_strides[2] = 8;
  c.out_strides[3] = 1;
  const kernel_task task{};
  // The panel's last key; the tile of 64 that asks, counted from 0.
  const int64_t cases[][2] = {{5, 0}, {64, 0}, {95, 0}, {96, 1}, {128, 1}, {130, 1}, {197, 2}};
  for (const auto& [last, tile] : cases) {
    CAPTURE(last);
    panel<float> x{};
    x.row = 3;
    x.count = 4;
    x.vectors = 1;
    x.clip = {0, last};
    for (int64_t i = 0; i * 64 < last; ++i) {
      const upcoming rows = results_ahead<f32>(c, task, 0, (i + 1) * 64, x);
      CHECK(rows.rows == (i == tile ? 4 : 0));
      if (i != tile) continue;
      CHECK(rows.base == reinterpret_cast<const char*>(out + 3 * 8));
      CHECK(rows.stride == 32);
      CHECK(rows.bytes == 32);
    }
  }
  panel<float> x{};
  x.count = 4;
  x.vectors = 1;
  c.chunks = 2;
  CHECK(results_ahead<f32>(c, task, 0, 64, x).rows == 0);
}

// see_tile against the definition, for each kind of restriction alone and together.
TEST_CASE_TEMPLATE("visibility bits", T, float, double) {
  std::mt19937 random(21);
  const auto pick = [&](int64_t low, int64_t high) {
    return low + static_cast<int64_t>(random() % static_cast<uint64_t>(high - low + 1));
  };
  for (int round = 0; round < 600; ++round) {
    kernel_call c{};
    c.group = pick(1, 3);
    c.q_len = pick(1, 30);
    c.extra_keys = pick(0, 2) == 0 ? pick(1, 2) : 0;
    c.kv_len = pick(0, 130) + c.extra_keys;
    c.causal = static_cast<int32_t>(pick(0, 1));
    c.align = static_cast<int32_t>(pick(MH_ALIGN_TOP_LEFT, MH_ALIGN_OFFSET));
    c.q_offset = pick(-30, 60);
    c.window_left = pick(-1, 30);
    c.window_right = pick(-1, 30);
    const int64_t ordinary = c.kv_len - c.extra_keys;
    const auto used = static_cast<int32_t>(pick(0, ordinary));
    if (pick(0, 1) == 0) c.seqused_k = &used;
    c.index_type = MH_INDEX_I32;
    const int64_t heads = c.group;
    const int64_t apart = pick(0, 3) == 0 ? 2 : 1;  // from one key of the mask to the next
    std::vector<uint8_t> mask(static_cast<size_t>(heads * c.q_len * ordinary * apart + 1));
    std::vector<uint8_t> key_mask(static_cast<size_t>(ordinary + 1));
    for (uint8_t& m : mask) m = random() % 4 != 0;
    for (uint8_t& m : key_mask) m = random() % 8 != 0;
    if (pick(0, 1) == 0) {
      c.mask = mask.data();
      const bool of_heads = pick(0, 1) == 0, of_queries = pick(0, 3) != 0, of_keys = pick(0, 3) != 0;
      const int64_t strides[4] = {0, of_heads ? c.q_len * ordinary * apart : 0, of_queries ? ordinary * apart : 0,
                                  of_keys ? apart : 0};
      std::copy_n(strides, 4, c.mask_strides);
    }
    if (pick(0, 1) == 0) {
      c.key_mask = key_mask.data();
      c.key_mask_strides[1] = 1;
    }
    const positions at = positions_of(c, 0);
    const int64_t rows = c.group * c.q_len;
    const int64_t row = pick(0, rows - 1);
    const int64_t width = lanes<T> * pick(1, max_panel_vectors);
    const int64_t count = pick(1, std::min<int64_t>(rows - row, width));
    const int64_t begin = pick(0, c.kv_len);
    const int64_t end = pick(begin, std::min(c.kv_len, begin + most_tile_keys));
    std::vector<bits<T>> words(static_cast<size_t>((end - begin + 63) / word_keys * width), 0);
    const visibility see = see_tile<T>(c, at, {0, 0, row, count, begin, end}, width, words.data());
    bool any = false;
    bool hidden = false;
    for (int64_t lane = 0; lane < count; ++lane) {
      const int64_t query = (row + lane) / c.group;
      const int64_t head = (row + lane) % c.group;
      const int64_t p = query + at.offset;
      for (int64_t j = begin; j < end; ++j) {
        bool want = j < (c.seqused_k != nullptr ? used : ordinary);
        if (c.causal != 0 && j > p) want = false;
        if (c.window_left >= 0 && j < p - c.window_left) want = false;
        if (c.window_right >= 0 && j > p + c.window_right) want = false;
        if (want && c.mask != nullptr &&
            mask[static_cast<size_t>(head * c.mask_strides[1] + query * c.mask_strides[2] + j * c.mask_strides[3])] ==
                0)
          want = false;
        if (want && c.key_mask != nullptr && key_mask[static_cast<size_t>(j)] == 0) want = false;
        if (j >= ordinary) want = true;
        const auto word = words[static_cast<size_t>((j - begin) / word_keys * width + lane)];
        CHECK(((word >> ((j - begin) % word_keys)) & 1U) == (want ? 1U : 0U));
        any = any || want;
        hidden = hidden || !want;
      }
    }
    CHECK(see == (!any ? visibility::none : hidden ? visibility::some : visibility::all));
  }
}

// Numbers, some of them -inf or NaN, as biases of every dtype.
struct biases {
  std::vector<double> doubles = normal<double>(12000, 29);
  std::vector<float> floats;
  std::vector<uint16_t> bf16s, f16s;

  biases() {
    for (size_t i = 0; i < doubles.size(); i += 61) doubles[i] = -infinity<double>;
    for (size_t i = 5; i < doubles.size(); i += 67) doubles[i] = std::numeric_limits<double>::quiet_NaN();
    for (const double x : doubles) {
      floats.push_back(static_cast<float>(x));
      bf16s.push_back(bf16::narrow(floats.back()));
      f16s.push_back(f16::narrow(floats.back()));
    }
  }
  const void* of(int32_t dtype) const {
    if (dtype == MH_DTYPE_F64) return doubles.data();
    if (dtype == MH_DTYPE_F32) return floats.data();
    return dtype == MH_DTYPE_BF16 ? bf16s.data() : f16s.data();
  }
  double at(int32_t dtype, int64_t place) const {
    const auto i = static_cast<size_t>(place);
    if (dtype == MH_DTYPE_F64) return doubles[i];
    if (dtype == MH_DTYPE_F32) return static_cast<double>(floats[i]);
    return static_cast<double>(dtype == MH_DTYPE_BF16 ? bf16::widen(bf16s[i]) : f16::widen(f16s[i]));
  }
};

// What a bias leaves open, and whether it does something else, against the definition.
TEST_CASE_TEMPLATE("biases that close keys", T, float, double) {
  std::mt19937 random(24);
  const auto pick = [&](int64_t low, int64_t high) {
    return low + static_cast<int64_t>(random() % static_cast<uint64_t>(high - low + 1));
  };
  const auto lowest_bf16 = static_cast<double>(bf16::widen(0xff7f));
  for (int round = 0; round < 300; ++round) {
    // Which numbers there are: masks of 0 and -inf, masks of 0 and the lowest number, and biases that are no masks.
    const double numbers[] = {0,   -0.0,  -infinity<double>, sizeof(T) == 4 ? lowest_bf16 : -1.79e308,
                              1.5, -1e30, std::nan("")};
    const int64_t kinds = pick(2, 7), zeros = pick(0, 2);
    biases bias;
    for (size_t i = 0; i < bias.doubles.size(); ++i) {
      const double x = numbers[pick(0, 2) < zeros ? 0 : pick(0, kinds - 1)];
      bias.doubles[i] = x;
      bias.floats[i] = static_cast<float>(x);
      bias.bf16s[i] = bf16::narrow(bias.floats[i]);
      bias.f16s[i] = f16::narrow(bias.floats[i]);
    }
    kernel_call c{};
    c.group = pick(1, 3);
    c.extra_keys = pick(0, 2);
    const int64_t width = lanes<T> * pick(1, max_panel_vectors), begin = pick(0, 70);
    const tile_at t{1, 1, pick(0, 5), pick(1, width), begin, begin + pick(1, most_tile_keys)};
    c.kv_len = t.end - pick(0, c.extra_keys) + c.extra_keys;
    c.bias_dtype = static_cast<int32_t>(pick(0, 3));
    c.bias = bias.of(c.bias_dtype);
    const int64_t key_strides[] = {1, 1, 1, 2, 0};
    const int64_t strides[4] = {500, 301 * pick(0, 1), 157 * pick(0, 1), key_strides[pick(0, 4)]};
    std::copy_n(strides, 4, c.bias_strides);
    const T closed_to = pick(0, 1) == 0 ? -infinity<T> : least_bias<T>;
    std::vector<bits<T>> words(static_cast<size_t>((t.keys() + word_keys - 1) / word_keys * width), 0);
    const bool adds = open_of_bias<T>(c, t, width, closed_to, words.data());
    bool want_adds = false;
    int64_t wrong = 0;
    for (int64_t lane = 0; lane < width; ++lane) {
      const int64_t row = t.row + min_of(lane, t.count - 1);
      const int64_t place = strides[0] + (c.group + row % c.group) * strides[1] + row / c.group * strides[2];
      for (int64_t key = t.begin; key < t.end; ++key) {
        const bool has_bias = key < c.kv_len - c.extra_keys;
        const double b = has_bias ? bias.at(c.bias_dtype, place + key * strides[3]) : 0;
        const bool closes = b <= static_cast<double>(closed_to);
        const auto word = words[static_cast<size_t>((key - t.begin) / word_keys * width + lane)];
        wrong += (word >> ((key - t.begin) % word_keys) & 1U) == (closes ? 0U : 1U) ? 0 : 1;
        want_adds = want_adds || (!closes && !(b == 0));
      }
    }
    CAPTURE(round);
    CHECK(wrong == 0);
    CHECK(adds == want_adds);
    // No tile that something closes whole may pass for one of a bias that is no mask.
    bool none = true;
    for (const bits<T> word : words) none = none && static_cast<uint32_t>(word) == 0;
    if (none && c.kv_len > word_keys) CHECK(bias_may_close<T>(c, t));
  }
}

// What is left of a tile and of what its vectors reach.
TEST_CASE_TEMPLATE("tiles that end with the last key seen", T, float, double) {
  std::mt19937 random(25);
  const auto pick = [&](int64_t low, int64_t high) {
    return low + static_cast<int64_t>(random() % static_cast<uint64_t>(high - low + 1));
  };
  constexpr int NV = 2;
  constexpr int64_t width = NV * lanes<T>;
  for (int round = 0; round < 400; ++round) {
    kernel_call c{};
    c.kept_pitch = pick(0, 3) == 0 ? 8 : 0;
    panel<T> x{};
    x.vectors = NV;
    x.count = width;
    const int64_t keys = pick(1, most_tile_keys), begin = pick(0, 100);
    // Of each vector an interval, whole or with holes, or nothing.
    std::vector<bits<T>> words(static_cast<size_t>((keys + word_keys - 1) / word_keys * width), 0);
    const auto sees = [&](int64_t lane, int64_t key) {
      return (words[static_cast<size_t>(key / word_keys * width + lane)] >> (key % word_keys) & 1U) != 0;
    };
    const bool alike = pick(0, 2) == 0, holes = pick(0, 1) == 0;
    int64_t from = 0, to = 0;
    for (int64_t lane = 0; lane < width; ++lane) {
      if (lane % lanes<T> == 0 && (lane == 0 || !alike)) {
        from = pick(0, keys - 1);
        to = pick(0, 4) == 0 ? from : pick(from, keys);
      }
      for (int64_t key = from; key < to; ++key) {
        if (holes && pick(0, 9) == 0) continue;
        words[static_cast<size_t>(key / word_keys * width + lane)] |= bits<T>(1) << (key % word_keys);
      }
    }
    key_range want[NV], all{keys, 0};
    int64_t seen = 0;
    for (int v = 0; v < NV; ++v) {
      want[v] = {keys, 0};
      for (int64_t key = 0; key < keys; ++key) {
        for (int64_t l = 0; l < lanes<T>; ++l) {
          if (!sees(v * lanes<T> + l, key)) continue;
          want[v] = {min_of(want[v].begin, key), key + 1};
          ++seen;
        }
      }
      all = {min_of(all.begin, want[v].begin), max_of(all.end, want[v].end)};
    }
    if (seen == 0 || seen == keys * width) continue;  // such tiles do not come here

    tile_at t{0, 0, 0, width, begin, begin + keys};
    panel_view<T> view{visibility::some, false, words.data(), {}};
    narrow_panel<T>(c, x, t, view);
    CAPTURE(round);
    const int64_t cut = t.begin - begin;
    if (c.kept_pitch > 0) {
      CHECK(t.keys() == keys);
    } else {
      CHECK(cut == all.begin / word_keys * word_keys);
      CHECK(t.end == begin + all.end);
      CHECK(view.see == (seen == t.keys() * width ? visibility::all : visibility::some));
    }
    CHECK(view.words == words.data() + cut / word_keys * width);
    stairs<NV> reached;
    stairs_of<T, NV>(view, t.keys(), reached);
    for (int v = 0; v < NV; ++v) {
      if (want[v].end > 0) {
        CHECK(view.seen[v].begin == want[v].begin - cut);
        CHECK(view.seen[v].end == want[v].end - cut);
      }
      CHECK(view.seen[v].end <= t.keys());
      // Vectors reach what they see, in order.
      CHECK(reached.begin[v] >= 0);
      CHECK(reached.end[v] >= 0);
      CHECK(reached.end[v] <= t.keys());
      if (want[v].end > 0) {
        CHECK(reached.begin[v] <= view.seen[v].begin);
        CHECK(reached.end[v] >= view.seen[v].end);
      }
      if (v > 0) {
        CHECK(reached.begin[v - 1] <= reached.begin[v]);
        CHECK(reached.end[v - 1] <= reached.end[v]);
      }
    }
    CHECK(reached.begin[NV - 1] <= reached.end[0]);
  }
}

template <class T, int NV, bool Closes>
void check_changed_scores(const biases& bias) {
  constexpr int64_t width = NV * lanes<T>;
  constexpr int64_t sizes[] = {0, 1, 2, 15, 16, 17, 31, 33, 64, 95, 96};
  constexpr int64_t key_strides[] = {1, 1, 1, 2, -1, 0};
  constexpr T nan = std::numeric_limits<T>::quiet_NaN();
  constexpr double epsilon = static_cast<double>(std::numeric_limits<T>::epsilon());
  std::mt19937 random(23);
  const auto pick = [&](int64_t low, int64_t high) {
    return low + static_cast<int64_t>(random() % static_cast<uint64_t>(high - low + 1));
  };
  const std::vector<T> values = normal<T>(100 * width, 37);
  std::vector<T> slopes = normal<T>(12, 38);
  for (T& slope : slopes) slope /= T(16);
  for (int64_t i = 0; i < 192; ++i) {  // each set of modifiers four times
    const bool hides = (i & 1) != 0;
    const double scale = (i & 2) != 0 ? 0.5 : 1.0;
    kernel_call c{};
    c.group = pick(1, 3);
    c.extra_keys = pick(0, 2);
    const int64_t behind = pick(0, c.extra_keys);  // how many of them the tile has
    const int64_t keys = pick(0, 2) == 0 && behind > 0 ? pick(1, behind) : sizes[pick(0, std::ssize(sizes) - 1)];
    const int64_t begin = pick(40, 70);
    const tile_at t{1, 1, pick(0, 5), pick(1, width), begin, begin + keys};
    c.kv_len = t.end - behind + c.extra_keys + (behind == 0 ? pick(0, 9) : 0);
    if ((i & 4) != 0) c.softcap = 2.5;
    if (i % 3 != 0) c.alibi_slopes = slopes.data();
    c.alibi_mode = i % 3 == 1 ? MH_ALIBI_ABS : MH_ALIBI_SIGNED;
    c.alibi_batch_stride = 6;
    const auto own = static_cast<int64_t>(sizeof(T) == 4 ? MH_DTYPE_F32 : MH_DTYPE_F64);
    c.bias_dtype = static_cast<int32_t>(pick(0, 1) == 0 ? own : pick(0, 3));
    if ((i & 8) != 0) c.bias = bias.of(c.bias_dtype);
    const bool one_row = pick(0, 2) == 0;
    c.bias_strides[0] = 500;
    c.bias_strides[1] = one_row ? 0 : 301 * pick(0, 1);
    c.bias_strides[2] = one_row ? 0 : 157 * pick(0, 1);
    c.bias_strides[3] = key_strides[pick(0, std::ssize(key_strides) - 1)];
    const positions at{0, pick(-20, 60)};
    tile_at whole = t;
    whole.begin -= 32 * pick(0, 1);  // t may be some of a tile's keys
    row_terms<T> rows;
    rows.look_up(c, at, whole, width, c.bias != nullptr);

    // Of each lane one score lies far above the others, one is -inf and one NaN.
    aligned<T> s((keys + 1) * width), tops(width, -infinity<T>);
    std::copy_n(values.begin() + pick(0, width), (keys + 1) * width, s.get());
    for (int64_t lane = 0; lane < width; ++lane) {
      for (const T special : {nan, -infinity<T>, T(50)}) {
        const int64_t places[] = {0, keys - 1, keys - behind - 1, pick(0, keys), pick(0, keys)};
        s[max_of(0, min_of(places[pick(0, 4)], keys - 1)) * width + lane] = special;
      }
      if (pick(0, 2) == 0) tops[lane] = static_cast<T>(pick(-1, 60));
    }
    std::vector<bits<T>> words(static_cast<size_t>(4 * width));
    for (int64_t first = 0; first < 4 * width; first += lanes<T>) {
      const bool all = pick(0, 2) == 0;
      for (int64_t l = first; l < first + lanes<T>; ++l) {
        const uint32_t some = pick(0, 7) == 0 ? 0 : static_cast<uint32_t>(random() | random());
        words[static_cast<size_t>(l)] = (all ? ~0U : some) & bit_range(0, keys - first / width * word_keys);
      }
    }
    const std::vector<T> before(s.get(), s.get() + (keys + 1) * width);
    std::vector<T> want_tops(tops.get(), tops.get() + width);
    const panel_view<T> view{hides ? visibility::some : visibility::all, c.bias != nullptr, words.data(), {}};
    for (int64_t lane = 0; lane < width; ++lane) rows.closed_to[lane] = pick(0, 1) == 0 ? -infinity<T> : T(-3);
    change_scores<T, NV, Closes>(c, rows, t, view, s.get(), tops.get(), scale);

    int64_t wrong = 0;
    for (int64_t lane = 0; lane < width; ++lane) {
      const int64_t row = t.row + min_of(lane, t.count - 1);
      const int64_t query = row / c.group, head = t.kv_head * c.group + row % c.group;
      for (int64_t k = 0; k < keys; ++k) {
        double x = scale * static_cast<double>(before[static_cast<size_t>(k * width + lane)]);
        if (c.softcap > 0) x = c.softcap * std::tanh(x / c.softcap);
        double size = std::abs(x);  // of what is added up
        if (c.alibi_slopes != nullptr) {
          const auto distance = static_cast<double>(query + at.offset - t.begin - k);
          const double slope = static_cast<double>(slopes[static_cast<size_t>(6 + head)]);
          x -= slope * (c.alibi_mode == MH_ALIBI_SIGNED ? distance : std::abs(distance));
          size += std::abs(slope * distance);
        }
        if (c.bias != nullptr && t.begin + k < c.kv_len - c.extra_keys) {
          const int64_t place = c.bias_strides[0] + head * c.bias_strides[1] + query * c.bias_strides[2];
          const double b = bias.at(c.bias_dtype, place + (t.begin + k) * c.bias_strides[3]);
          x = Closes && b <= static_cast<double>(rows.closed_to[lane]) ? -infinity<double> : x + b;
          size += std::abs(b);
        }
        const bool hidden =
            hides && (words[static_cast<size_t>(k / word_keys * width + lane)] >> k % word_keys & 1) == 0;
        if (hidden) x = -infinity<double>;
        const T stored = s[k * width + lane];
        const auto got = static_cast<double>(stored);
        const bool right = std::isnan(x)   ? std::isnan(got)
                           : std::isinf(x) ? got == x
                                           : std::abs(got - x) <= 8 * epsilon * size;
        wrong += right ? 0 : 1;
        T& want_top = want_tops[static_cast<size_t>(lane)];
        if (!hidden && stored > want_top) want_top = stored;
      }
    }
    CAPTURE(i);
    CHECK(wrong == 0);
    CHECK(std::equal(want_tops.begin(), want_tops.end(), tops.get()));
    CHECK(std::equal(before.end() - width, before.end(), s.get() + keys * width));  // the row behind is not touched
  }
}

TEST_CASE_TEMPLATE("scores change as their modifiers say, and the maxima are those of what rows see", T, float,
                   double) {
  const biases bias;
  check_changed_scores<T, 1, true>(bias);
  check_changed_scores<T, 1, false>(bias);
  check_changed_scores<T, 2, true>(bias);
  check_changed_scores<T, 2, false>(bias);
  if constexpr (max_panel_vectors == 3) {
    check_changed_scores<T, 3, true>(bias);
    check_changed_scores<T, 3, false>(bias);
  }
}

// The streaming softmax over tiles of any sizes gives the plain softmax.
TEST_CASE_TEMPLATE("softmax rows", T, float, double) {
  constexpr int64_t width = lanes<T>;
  const double tolerance = sizeof(T) == 4 ? 2e-6 : 1e-14;
  for (const double spread : {1.0, 30.0, 1e4}) {
    const int64_t keys = 50;
    std::vector<T> scores = normal<T>(static_cast<size_t>(keys * width), 31);
    for (T& s : scores) s *= static_cast<T>(spread);
    for (int64_t k = 0; k < keys; ++k) scores[static_cast<size_t>(k * width)] = -infinity<T>;  // lane 0 sees nothing
    aligned<T> row_max(width, lowest<T>);
    aligned<T> row_sum(width);
    aligned<T> out(width);  // v_dim 1: the sum of weights times the key's index
    const softmax_rows<T, 1> rows{row_max.get(), row_sum.get(), out.get(), 1};
    bool started = false;
    for (int64_t first = 0; first < keys; first += 7) {
      const int64_t n = min_of(7, keys - first);
      aligned<T> tile(7 * width);
      aligned<T> top(width, -infinity<T>);
      for (int64_t i = 0; i < n * width; ++i) {
        tile[i] = scores[static_cast<size_t>(first * width + i)];
        top[i % width] = std::max(top[i % width], tile[i]);
      }
      rows.raise(top.get(), T(1), started);
      rows.weigh_tile(tile.get(), n, T(1), false);
      for (int64_t k = 0; k < n; ++k) {
        for (int64_t j = 0; j < width; ++j) out[j] += tile[k * width + j] * static_cast<T>(first + k);
      }
      started = true;
    }
    CHECK(row_sum[0] == T(0));
    for (int64_t j = 1; j < width; ++j) {
      double top = -std::numeric_limits<double>::infinity();
      for (int64_t k = 0; k < keys; ++k)
        top = std::max(top, static_cast<double>(scores[static_cast<size_t>(k * width + j)]));
      double sum = 0;
      double value = 0;
      for (int64_t k = 0; k < keys; ++k) {
        const double p = std::exp2(static_cast<double>(scores[static_cast<size_t>(k * width + j)]) - top);
        sum += p;
        value += p * static_cast<double>(k);
      }
      const double total = static_cast<double>(row_sum[j]);
      CHECK(std::abs(static_cast<double>(out[j]) / total - value / sum) < tolerance * 50);
      CHECK(std::abs(lse_of(static_cast<double>(row_max[j]), total, 1.0, MH_LSE_BASE2) - (top + std::log2(sum))) <=
            tolerance * std::max(1.0, std::abs(top)));
    }
  }
}

TEST_CASE("the end of a row") {
  const double none = -std::numeric_limits<double>::infinity();
  struct row_end {
    double factor, total, lse;
  };
  const auto end = [](double top, double sum, double sink) -> row_end {
    row_states rows{vec<double>(top), vec<double>(sum)};
    const double share = add_sinks(rows, vec<double>(sink), 1.0).get(0), total = rows.total.get(0);
    return {sum == 0 ? 0 : share / total, total, lse_of(rows.top.get(0), total, 1.0, MH_LSE_BASE2)};
  };
  CHECK(end(-3e38, 0, none).factor == 0);
  CHECK(end(-3e38, 0, none).lse == none);
  CHECK(end(-3e38, 0, 2.0).factor == 0);
  CHECK(end(-3e38, 0, 2.0).lse == doctest::Approx(2.0 * 1.4426950408889634));
  CHECK(end(0, 4, none).factor == 0.25);
  CHECK(end(0, 3, 0.0).factor == 0.25);  // three keys and the sink, all equal
  CHECK(end(0, 3, 0.0).lse == 2.0);
  CHECK(end(-5000, 1, 5000).factor == 0);  // a sink far above every key
  CHECK(end(5000, 3, -5000).total == 3);   // and far below
  CHECK(end(-1e30, 7, none).total == 7);   // nothing of the sum is lost beside a large top
  CHECK(std::isnan(end(0, std::nan(""), none).factor));
  for (const double sink : {std::nan(""), -none}) {
    CHECK(std::isnan(end(0, 2, sink).factor));
    CHECK(std::isnan(end(0, 2, sink).lse));
  }
}

TEST_CASE_TEMPLATE("merge of states", D, f32, f64, bf16, f16) {
  using T = typename D::real;
  for (const int64_t v_dim : {1, 7, 64, 65, 130}) {
    const int64_t states = 5;
    const int64_t rows = 3;
    std::vector<typename D::storage> outs(static_cast<size_t>(states * rows * v_dim));
    const std::vector<T> values = normal<T>(outs.size(), 41);
    for (size_t i = 0; i < outs.size(); ++i) outs[i] = D::narrow(values[i]);
    std::vector<T> lses = normal<T>(static_cast<size_t>(states * rows), 42);
    lses[3] = -infinity<T>;  // state 1, row 0: nothing, whatever its out holds
    for (int64_t d = 0; d < v_dim; ++d)
      outs[static_cast<size_t>(rows * v_dim + d)] = D::narrow(std::numeric_limits<T>::quiet_NaN());
    for (int64_t s = 0; s < states; ++s)
      lses[static_cast<size_t>(s * rows + 2)] = -infinity<T>;  // row 2: no state counts
    std::vector<typename D::storage> out(static_cast<size_t>(rows * v_dim), D::narrow(T(9)));
    std::vector<T> lse(static_cast<size_t>(rows), T(9));
    merge_args m{};
    m.states = states;
    m.heads = 1;
    m.q_len = rows;
    m.v_dim = v_dim;
    m.outs = outs.data();
    m.lses = lses.data();
    m.out = out.data();
    m.lse = lse.data();
    const int64_t outs_strides[5] = {rows * v_dim, 0, 0, v_dim, 1};
    const int64_t lses_strides[4] = {rows, 0, 0, 1};
    const int64_t out_strides[4] = {0, 0, v_dim, 1};
    const int64_t lse_strides[3] = {0, 0, 1};
    std::copy_n(outs_strides, 5, m.outs_strides);
    std::copy_n(lses_strides, 4, m.lses_strides);
    std::copy_n(out_strides, 4, m.out_strides);
    std::copy_n(lse_strides, 3, m.lse_strides);
    merge_rows<D, D>(&m, 0, rows);
    const double tolerance = sizeof(typename D::storage) == 2 ? 1e-2 : sizeof(T) == 4 ? 1e-6 : 1e-14;
    for (int64_t r = 0; r < 2; ++r) {
      double total = 0;
      for (int64_t s = 0; s < states; ++s)
        total += std::exp(static_cast<double>(lses[static_cast<size_t>(s * rows + r)]));
      CHECK(static_cast<double>(lse[static_cast<size_t>(r)]) == doctest::Approx(std::log(total)).epsilon(1e-6));
      for (int64_t d = 0; d < v_dim; ++d) {
        double want = 0;
        for (int64_t s = 0; s < states; ++s) {
          const double share = std::exp(static_cast<double>(lses[static_cast<size_t>(s * rows + r)])) / total;
          if (share > 0)
            want += share * static_cast<double>(D::widen(outs[static_cast<size_t>((s * rows + r) * v_dim + d)]));
        }
        CHECK(std::abs(static_cast<double>(D::widen(out[static_cast<size_t>(r * v_dim + d)])) - want) < tolerance * 4);
      }
    }
    CHECK(lse[2] == -infinity<T>);
    for (int64_t d = 0; d < v_dim; ++d) CHECK(D::widen(out[static_cast<size_t>(2 * v_dim + d)]) == T(0));
  }
}

}  // namespace
}  // namespace manyhead::MH_ISA
