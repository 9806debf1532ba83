// The facts about strided arrays that argument checks rest on, against counting every byte of small random arrays.
#include "check.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <set>
#include <vector>

using namespace manyhead;

namespace {

alignas(64) char memory[1 << 18];

class generator {
 public:
  int64_t number(int64_t least, int64_t most) { return std::uniform_int_distribution<int64_t>(least, most)(random_); }

  // What slicing, stepping, reversing and transposing make of a C-ordered array.
  array view(const std::vector<int64_t>& base, int64_t element) {
    const int rank = static_cast<int>(base.size());
    array a = {"view", nullptr, rank, element, {}, {}};
    int64_t stride = 1, first = 0;
    for (int i = rank - 1; i >= 0; --i) {
      const int64_t size = base[static_cast<size_t>(i)], step = number(1, 3), start = number(0, size - 1);
      a.dims[i] = number(1, (size - start + step - 1) / step);
      const bool reversed = number(0, 3) == 0;
      a.strides[i] = stride * (reversed ? -step : step);
      first += stride * (reversed ? start + (a.dims[i] - 1) * step : start);
      stride *= size;
    }
    for (int i = rank - 1; i > 0; --i) {
      const int64_t j = number(0, i);
      std::swap(a.dims[i], a.dims[j]);
      std::swap(a.strides[i], a.strides[j]);
    }
    a.data = memory + sizeof memory / 2 + first * element;
    return a;
  }

  std::vector<int64_t> shape() {
    std::vector<int64_t> dims(static_cast<size_t>(number(1, 5)));
    for (int64_t& d : dims) d = number(1, 5);
    return dims;
  }

 private:
  std::mt19937_64 random_{7};
};

// Each byte as often as an element covers it.
std::multiset<int64_t> bytes_of(const array& a) {
  std::multiset<int64_t> bytes;
  int64_t index[5] = {};
  for (int i = 0; i >= 0;) {
    int64_t at = static_cast<const char*>(a.data) - memory;
    for (int k = 0; k < a.rank; ++k) at += index[k] * a.strides[k] * a.element;
    for (int64_t byte = 0; byte < a.element; ++byte) bytes.insert(at + byte);
    for (i = a.rank - 1; i >= 0 && ++index[i] == a.dims[i]; --i) index[i] = 0;
  }
  return bytes;
}

bool is_distinct(const array& a) {
  try {
    check_distinct(a);
    return true;
  } catch (const error&) {
    return false;
  }
}

}  // namespace

TEST_CASE("views of ordinary arrays are distinct, and what is found distinct is") {
  generator g;
  int accepted = 0, refused = 0;
  for (int i = 0; i < 20000; ++i) {
    array a = g.view(g.shape(), 4);
    REQUIRE(is_distinct(a));
    for (int k = 0; k < a.rank; ++k) a.strides[k] = g.number(-5, 5);
    if (is_distinct(a)) {
      const std::multiset<int64_t> bytes = bytes_of(a);
      REQUIRE(std::set<int64_t>(bytes.begin(), bytes.end()).size() == bytes.size());
      ++accepted;
    } else {
      ++refused;
    }
  }
  CHECK(accepted > 1000);
  CHECK(refused > 1000);
}

TEST_CASE("share_memory is exact") {
  generator g;
  int shared = 0, near = 0;
  for (int i = 0; i < 20000; ++i) {
    const std::vector<int64_t> base = g.shape();
    const array a = g.view(base, int64_t{1} << g.number(0, 3));
    // Another view of the same buffer, or anything else around there, with broadcast dimensions too.
    array b = g.number(0, 1) == 0 ? g.view(base, a.element) : g.view(g.shape(), int64_t{1} << g.number(0, 3));
    if (g.number(0, 2) == 0) b.strides[g.number(0, b.rank - 1)] = g.number(-4, 4);
    const std::multiset<int64_t> in_a = bytes_of(a), in_b = bytes_of(b);
    const bool expected = std::any_of(in_b.begin(), in_b.end(), [&](int64_t byte) { return in_a.count(byte) != 0; });
    REQUIRE(share_memory(a, b) == expected);
    REQUIRE(share_memory(b, a) == expected);
    shared += expected;
    near += !expected && *in_a.begin() <= *in_b.rbegin() && *in_b.begin() <= *in_a.rbegin();
  }
  CHECK(shared > 1000);
  CHECK(near > 1000);  // apart although their extents are not
}

TEST_CASE("large layouts are decided, and quickly") {
  // out and k as views of [batch, len, 4, heads, dim]: 2^40 elements each.
  const int64_t batch = 1 << 10, len = 1 << 15, heads = 1 << 7, dim = 1 << 8, row = 4 * heads * dim;
  array out = {"out", memory, 4, 4, {batch, heads, len, dim}, {len * row, dim, row, 1}};
  array k = out;
  k.data = memory + 4 * heads * dim;
  CHECK_FALSE(share_memory(out, k));
  k.data = memory + 4 * heads * dim - 4;
  CHECK(share_memory(out, k));
  // Strides with nothing in common: no answer within the bound, so not allowed.
  const array p = {"p", memory, 4, 4, {60, 60, 60, 60}, {1000003 * 2, 10007 * 2, 101 * 2, 2}};
  const array q = {"q", memory + 4, 4, 4, {61, 61, 61, 61}, {999983 * 2, 10009 * 2, 103 * 2, 2}};
  CHECK(share_memory(p, q));
}

TEST_CASE("strides that say nothing are made contiguous") {
  array a = {"a", nullptr, 4, 4, {2, 3, 1, 5}, {0, 0, 0, 0}};
  complete_strides(a, false);
  CHECK(std::equal(a.strides, a.strides + 4, std::begin({15, 5, 5, 1})));
  array broadcast = {"a", nullptr, 4, 4, {2, 3, 1, 5}, {0, 0, 0, 0}};
  complete_strides(broadcast, true);
  CHECK(std::equal(broadcast.strides, broadcast.strides + 4, std::begin({0, 0, 5, 0})));
  array given = {"a", nullptr, 4, 4, {2, 3, 1, 5}, {0, 7, INT64_MIN, 0}};
  complete_strides(given, false);
  CHECK(std::equal(given.strides, given.strides + 4, std::begin({0, 7, 5, 0})));
}
