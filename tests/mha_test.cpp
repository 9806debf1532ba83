// The multi-head layer against the same in double: projections as three loops, attention by reference.hpp, with the
// extra keys of torch's bias_k, bias_v and add_zero_attn put after the others. Through the functions behind the C
// border, so that errors arrive as exceptions.
#include "mha.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "error.hpp"
#include "exec_of.hpp"
#include "numbers.hpp"
#include "problem.hpp"
#include "random_numbers.hpp"
#include "reference.hpp"

namespace {

using manyhead::test::attention_result;
using manyhead::test::bf16;
using manyhead::test::dtype_of;
using manyhead::test::exec_of;
using manyhead::test::f16;
using manyhead::test::random_numbers;
using manyhead::test::real_of;
using manyhead::test::rounding_of;

template <class Number>
std::vector<Number> random(int64_t size, uint64_t seed, double scale = 1.0) {
  random_numbers from(seed);
  std::vector<Number> v(static_cast<size_t>(size));
  for (Number& x : v) x = static_cast<Number>(scale * (2 * from.uniform() - 1));
  return v;
}

struct sizes {
  int64_t batch = 2, q_len = 5, kv_len = 5, embed = 24, heads = 4;
  int64_t k_embed = 0, v_embed = 0, out = 0, kv_heads = 0, head_dim = 0, v_dim = 0;

  sizes resolved() const {
    sizes s = *this;
    if (s.k_embed == 0) s.k_embed = s.embed;
    if (s.v_embed == 0) s.v_embed = s.k_embed;
    if (s.kv_heads == 0) s.kv_heads = s.heads;
    if (s.head_dim == 0) s.head_dim = s.embed / s.heads;
    if (s.v_dim == 0) s.v_dim = s.head_dim;
    if (s.out == 0) s.out = s.embed;
    return s;
  }
};

// Weights in torch's layout, a call with contiguous arrays, and what it should give. Tests change `w` and `c` (and the
// arrays) at will.
template <class Number>
struct fixture {
  sizes s;
  std::vector<Number> w_q, w_k, w_v, w_o, b_q, b_k, b_v, b_o, bias_k, bias_v;
  std::vector<Number> x_q, x_k, x_v, out;
  std::vector<real_of<Number>> weights, mean_weights;
  std::vector<uint8_t> mask, key_mask;
  std::vector<float> bias;
  std::vector<int32_t> seqused_k;
  mh_mha_weights w = {};
  mh_mha_call c = {};

  explicit fixture(const sizes& user = {}) : s(user.resolved()) {
    const int64_t q_out = s.heads * s.head_dim, k_out = s.kv_heads * s.head_dim, v_out = s.kv_heads * s.v_dim;
    const int64_t cat = s.heads * s.v_dim;
    const auto norm = [](int64_t in) { return 1.7 / std::sqrt(static_cast<double>(in)); };
    w_q = random<Number>(q_out * s.embed, 1, 2 * norm(s.embed));
    w_k = random<Number>(k_out * s.k_embed, 2, 2 * norm(s.k_embed));
    w_v = random<Number>(v_out * s.v_embed, 3, norm(s.v_embed));
    w_o = random<Number>(s.out * cat, 4, norm(cat));
    b_q = random<Number>(q_out, 5, 0.3);
    b_k = random<Number>(k_out, 6, 0.3);
    b_v = random<Number>(v_out, 7, 0.3);
    b_o = random<Number>(s.out, 8, 0.3);
    bias_k = random<Number>(k_out, 9);
    bias_v = random<Number>(v_out, 10);
    x_q = random<Number>(s.batch * s.q_len * s.embed, 11);
    x_k = random<Number>(s.batch * s.kv_len * s.k_embed, 12);
    x_v = random<Number>(s.batch * s.kv_len * s.v_embed, 13);
    out.assign(static_cast<size_t>(s.batch * s.q_len * s.out), Number(-77));

    w.struct_size = sizeof w;
    w.dtype = dtype_of<Number>;
    w.embed_dim = user.embed;
    w.k_embed_dim = user.k_embed;
    w.v_embed_dim = user.v_embed;
    w.out_dim = user.out;
    w.heads = user.heads;
    w.kv_heads = user.kv_heads;
    w.head_dim = user.head_dim;
    w.v_dim = user.v_dim;
    w.w_q = w_q.data();
    w.w_k = w_k.data();
    w.w_v = w_v.data();
    w.w_o = w_o.data();

    c.struct_size = sizeof c;
    c.batch = s.batch;
    c.q_len = s.q_len;
    c.kv_len = s.kv_len;
    c.x_q = x_q.data();
    c.x_k = x_k.data();
    c.x_v = x_v.data();
    c.out = out.data();
  }
  fixture(const fixture&) = delete;

  void all_biases() {
    w.b_q = b_q.data();
    w.b_k = b_k.data();
    w.b_v = b_v.data();
    w.b_o = b_o.data();
  }
  void self_attention() { c.x_k = c.x_v = nullptr; }
  int64_t extra() const { return (w.bias_k != nullptr) + w.add_zero_attn; }
  int64_t keys() const { return s.kv_len + extra(); }
  void want_weights(bool per_head, bool mean) {
    weights.assign(static_cast<size_t>(s.batch * s.heads * s.q_len * keys()), -77);
    mean_weights.assign(static_cast<size_t>(s.batch * s.q_len * keys()), -77);
    if (per_head) c.weights = weights.data();
    if (mean) c.mean_weights = mean_weights.data();
  }
  void random_mask(uint64_t seed) {
    random_numbers from(seed);
    mask.resize(static_cast<size_t>(s.batch * s.heads * s.q_len * s.kv_len));
    for (uint8_t& m : mask) m = from.uniform() < 0.6 ? 3 : 0;
    c.mask = mask.data();
  }
  void random_bias(uint64_t seed) {
    random_numbers from(seed);
    bias.resize(static_cast<size_t>(s.batch * s.heads * s.q_len * s.kv_len));
    for (float& b : bias) b = from.uniform() < 0.2 ? -INFINITY : static_cast<float>(2 * from.uniform() - 1);
    c.bias = bias.data();
  }

  void run(int32_t threads = 0) const {
    const auto layer = manyhead::make_mha(w);
    layer->run(c, exec_of(threads));
  }
};

std::vector<double> project(const std::vector<double>& x, int64_t in, const std::vector<double>& w,
                            const std::vector<double>& b) {
  const int64_t out = static_cast<int64_t>(w.size()) / in, rows = static_cast<int64_t>(x.size()) / in;
  std::vector<double> y(static_cast<size_t>(rows * out));
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < out; ++j) {
      double sum = b.empty() ? 0.0 : b[static_cast<size_t>(j)];
      for (int64_t k = 0; k < in; ++k) sum += x[static_cast<size_t>(i * in + k)] * w[static_cast<size_t>(j * in + k)];
      y[static_cast<size_t>(i * out + j)] = sum;
    }
  }
  return y;
}

template <class Number>
std::vector<double> widen(const std::vector<Number>& v) {
  return {v.begin(), v.end()};
}
// As a layer of 16 bits keeps it.
template <class Number>
std::vector<double> rounded(std::vector<double> v) {
  if constexpr (sizeof(Number) == 2) {
    for (double& x : v) x = static_cast<Number>(x);
  }
  return v;
}
template <class Number>
std::vector<double> widen(const std::vector<Number>& v, const void* used) {
  return used != nullptr ? widen(v) : std::vector<double>{};
}

struct expectation {
  std::vector<double> out, weights, mean_weights;
};

// What f's arrays (not its pointers and strides, but for which of them are there) should give.
template <class Number>
expectation expected(const fixture<Number>& f) {
  const sizes& s = f.s;
  const int64_t keys = f.keys();
  const std::vector<double> x_q = widen(f.x_q);
  const std::vector<double> x_k = f.c.x_k == nullptr ? x_q : widen(f.x_k);
  const std::vector<double> x_v = f.c.x_v == nullptr ? x_k : widen(f.x_v);
  const bool biased = f.w.b_q != nullptr || f.w.in_proj_bias != nullptr;
  const auto with_extras = [&](const std::vector<double>& y, int64_t columns, const std::vector<Number>& learned) {
    std::vector<double> all;
    const int64_t entry = s.kv_len * columns;
    for (int64_t b = 0; b < s.batch; ++b) {
      all.insert(all.end(), y.begin() + b * entry, y.begin() + (b + 1) * entry);
      if (f.w.bias_k != nullptr) all.insert(all.end(), learned.begin(), learned.end());
      if (f.w.add_zero_attn != 0) all.insert(all.end(), static_cast<size_t>(columns), 0.0);
    }
    return all;
  };
  const std::vector<double> none;
  const auto projected = [&](const std::vector<double>& x, int64_t in, const std::vector<Number>& w,
                             const std::vector<Number>& b) {
    return rounded<Number>(project(x, in, widen(w), biased ? widen(b) : none));
  };
  const std::vector<double> q = projected(x_q, s.embed, f.w_q, f.b_q);
  const std::vector<double> k = with_extras(projected(x_k, s.k_embed, f.w_k, f.b_k), s.kv_heads * s.head_dim, f.bias_k);
  const std::vector<double> v = with_extras(projected(x_v, s.v_embed, f.w_v, f.b_v), s.kv_heads * s.v_dim, f.bias_v);

  mh_problem p = {};
  p.struct_size = sizeof p;
  p.dtype = MH_DTYPE_F64;
  p.batch = s.batch;
  p.heads = s.heads;
  p.kv_heads = s.kv_heads;
  p.q_len = s.q_len;
  p.kv_len = keys;
  p.head_dim = s.head_dim;
  p.v_dim = s.v_dim;
  p.flags = f.c.flags & MH_FLAG_WINDOW;
  const auto rows = [](int64_t* strides, int64_t length, int64_t heads, int64_t dim) {
    const int64_t values[4] = {length * heads * dim, dim, heads * dim, 1};
    std::copy_n(values, 4, strides);
  };
  rows(p.q_strides, s.q_len, s.heads, s.head_dim);
  rows(p.k_strides, keys, s.kv_heads, s.head_dim);
  rows(p.v_strides, keys, s.kv_heads, s.v_dim);
  p.scale = f.w.scale;
  p.softcap = f.c.softcap;
  p.causal = f.c.causal;
  p.align = f.c.align;
  p.q_offset = f.c.q_offset;
  p.window_left = f.c.window_left;
  p.window_right = f.c.window_right;
  mh_tensors t = {};
  t.q = q.data();
  t.k = k.data();
  t.v = v.data();
  if (f.c.mask != nullptr) p.inputs |= MH_INPUT_MASK, t.mask = f.mask.data();
  if (f.c.bias != nullptr) p.inputs |= MH_INPUT_BIAS, t.bias = f.bias.data();
  if (f.c.key_mask != nullptr) p.inputs |= MH_INPUT_KEY_MASK, t.key_mask = f.key_mask.data();
  if (f.c.seqused_k != nullptr) p.inputs |= MH_INPUT_SEQUSED_K, t.seqused_k = f.seqused_k.data();
  const attention_result r = manyhead::test::reference(manyhead::validate(p, f.extra()), t);

  std::vector<double> concatenation(r.out.size());
  for (int64_t i = 0; i < static_cast<int64_t>(r.out.size()); ++i) {
    const int64_t d = i % s.v_dim, row = i / s.v_dim % s.q_len, h = i / s.v_dim / s.q_len % s.heads,
                  b = i / s.v_dim / s.q_len / s.heads;
    concatenation[static_cast<size_t>(((b * s.q_len + row) * s.heads + h) * s.v_dim + d)] =
        r.out[static_cast<size_t>(i)];
  }
  expectation e;
  e.weights = r.weights;
  e.mean_weights = r.mean_weights;
  e.out = f.w.w_o == nullptr
              ? concatenation
              : project(rounded<Number>(concatenation), s.heads * s.v_dim, widen(f.w_o), widen(f.b_o, f.w.b_o));
  return e;
}

template <class Number>
double distance(const std::vector<Number>& got, const std::vector<double>& want) {
  REQUIRE(got.size() == want.size());
  double worst = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    const double d = std::fabs(static_cast<double>(got[i]) - want[i]);
    if (!(d <= worst)) worst = d;  // NaN too
  }
  return worst;
}

template <class Number>
constexpr double tolerance = sizeof(Number) == 8   ? 1e-13
                             : sizeof(Number) == 4 ? 5e-6
                                                   : 3 * rounding_of<Number>;

template <class Number>
void check(const fixture<Number>& f) {
  const expectation e = expected(f);
  CHECK(distance(f.out, e.out) < tolerance<Number>);
  if (f.c.weights != nullptr) CHECK(distance(f.weights, e.weights) < tolerance<Number>);
  if (f.c.mean_weights != nullptr) CHECK(distance(f.mean_weights, e.mean_weights) < tolerance<Number>);
}

template <class Number>
void run_and_check(const fixture<Number>& f) {
  f.run();
  check(f);
}

// The text of the error that `f.run` ends with; out and weights must be as they were.
template <class Number>
std::string failure(const fixture<Number>& f, mh_status status = MH_INVALID_ARGUMENT) {
  const auto bytes = [](const auto& v) {
    return std::string(reinterpret_cast<const char*>(v.data()), v.size() * sizeof(v[0]));
  };
  const std::string before[] = {bytes(f.out), bytes(f.weights), bytes(f.mean_weights)};
  try {
    f.run();
  } catch (const manyhead::error& e) {
    CHECK(e.status() == status);
    const std::string after[] = {bytes(f.out), bytes(f.weights), bytes(f.mean_weights)};
    for (size_t i = 0; i < 3; ++i) CHECK(before[i] == after[i]);
    return e.what();
  }
  return "no error";
}

std::string failure_of(const std::function<void(fixture<float>&)>& spoil, mh_status status = MH_INVALID_ARGUMENT) {
  fixture<float> f;
  spoil(f);
  return failure(f, status);
}

bool mentions(const std::string& text, const std::string& part) {
  INFO("the text is: ", text);
  CHECK(text.find(part) != std::string::npos);
  return text.find(part) != std::string::npos;
}

// A copy of [a, b, c] with other strides, in memory full of NaN; data() is element 0.
template <class Number>
struct strided {
  std::vector<Number> memory;
  int64_t dims[3], strides[3], start = 0;

  strided(const std::vector<Number>& from, const int64_t (&d)[3], const int64_t (&s)[3]) {
    int64_t highest = 0;
    for (int i = 0; i < 3; ++i) {
      dims[i] = d[i];
      strides[i] = s[i];
      if (s[i] < 0) start -= (d[i] - 1) * s[i];
      if (s[i] > 0) highest += (d[i] - 1) * s[i];
    }
    memory.assign(static_cast<size_t>(start + highest + 1), static_cast<Number>(NAN));
    each([&](Number& x, size_t i) { x = from[i]; });
  }
  template <class F>
  void each(const F& f) {
    size_t i = 0;
    for (int64_t a = 0; a < dims[0]; ++a) {
      for (int64_t b = 0; b < dims[1]; ++b) {
        for (int64_t c = 0; c < dims[2]; ++c) {
          f(memory[static_cast<size_t>(start + a * strides[0] + b * strides[1] + c * strides[2])], i++);
        }
      }
    }
  }
  Number* data() { return memory.data() + start; }
  std::vector<Number> values() {
    std::vector<Number> v(static_cast<size_t>(dims[0] * dims[1] * dims[2]));
    each([&](Number& x, size_t i) { v[i] = x; });
    return v;
  }
};

}  // namespace

TEST_CASE_TEMPLATE("self-attention, with and without biases", Number, float, double, bf16, f16) {
  for (const bool biases : {false, true}) {
    CAPTURE(biases);
    fixture<Number> f;
    if (biases) f.all_biases();
    f.self_attention();
    run_and_check(f);
  }
}

TEST_CASE_TEMPLATE("cross-attention where every size differs", Number, float, double, bf16, f16) {
  sizes s;
  s.q_len = 7;
  s.kv_len = 11;
  s.embed = 20;
  s.k_embed = 13;
  s.v_embed = 17;
  s.out = 9;
  s.heads = 6;
  s.kv_heads = 2;
  s.head_dim = 5;
  s.v_dim = 3;
  fixture<Number> f(s);
  f.all_biases();
  f.want_weights(true, true);
  run_and_check(f);

  SUBCASE("values from x_k") {
    s.v_embed = 0;
    fixture<Number> g(s);
    g.c.x_v = nullptr;
    run_and_check(g);
  }
}

TEST_CASE_TEMPLATE("any number of rows", Number, float, double, bf16, f16) {
  // Around the borders between tiles of rows, one block of rows and several, blocks within an entry and across entries.
  for (const int64_t q_len : {1, 2, 4, 5, 8, 16, 17, 64, 127, 192, 193, 300, 530}) {
    CAPTURE(q_len);
    sizes s;
    s.batch = q_len < 20 ? 5 : 2;
    s.q_len = q_len;
    s.kv_len = q_len < 100 ? 2 * q_len + 1 : 3;
    s.embed = 40;
    fixture<Number> f(s);
    f.all_biases();
    run_and_check(f);
  }
}

TEST_CASE("any number of outputs") {
  for (const int64_t head_dim : {1, 2, 33, 129, 300}) {
    CAPTURE(head_dim);
    sizes s;
    s.q_len = s.kv_len = 6;
    s.heads = 4;
    s.embed = 12;
    s.head_dim = head_dim;
    s.out = 4 * head_dim + 1;
    fixture<float> f(s);
    f.all_biases();
    run_and_check(f);
    s.q_len = 20;
    fixture<float> g(s);
    run_and_check(g);
  }
}

TEST_CASE("large") {
  sizes s;
  s.batch = 2;
  s.q_len = 130;
  s.kv_len = 200;
  s.embed = 384;
  s.heads = 12;
  fixture<float> f(s);
  f.all_biases();
  f.want_weights(false, true);
  run_and_check(f);
}

TEST_CASE_TEMPLATE("layouts of the weights give the same bits", Number, float, double, bf16, f16) {
  sizes s;
  s.k_embed = 10;
  s.v_embed = 14;
  s.head_dim = 7;
  s.v_dim = 5;
  s.kv_heads = 2;
  s.out = 11;
  fixture<Number> f(s);
  f.all_biases();
  run_and_check(f);
  const std::vector<Number> out = f.out;
  const auto same = [&] { return std::memcmp(out.data(), f.out.data(), out.size() * sizeof(Number)) == 0; };

  // Element [row, column] of a matrix with `columns` columns, moved to where the layout has it.
  const auto moved = [](const std::vector<Number>& from, int64_t columns, const auto& place) {
    std::vector<Number> to(from.size());
    for (int64_t i = 0; i < static_cast<int64_t>(from.size()); ++i) {
      to[static_cast<size_t>(place(i / columns, i % columns))] = from[static_cast<size_t>(i)];
    }
    return to;
  };
  const auto in_out = [&](const std::vector<Number>& from, int64_t columns) {
    const int64_t rows = static_cast<int64_t>(from.size()) / columns;
    return moved(from, columns, [=](int64_t r, int64_t c) { return c * rows + r; });
  };
  const auto per_head = [&](const std::vector<Number>& from, int64_t columns, int64_t dim) {
    return moved(from, columns, [=](int64_t r, int64_t c) { return r / dim * columns * dim + c * dim + r % dim; });
  };
  const int64_t cat = s.heads * s.v_dim;

  SUBCASE("[in, out]") {
    const auto q = in_out(f.w_q, s.embed), k = in_out(f.w_k, s.k_embed), v = in_out(f.w_v, s.v_embed),
               o = in_out(f.w_o, cat);
    f.w.layout = MH_WEIGHTS_IN_OUT;
    f.w.w_q = q.data(), f.w.w_k = k.data(), f.w.w_v = v.data(), f.w.w_o = o.data();
    f.run();
    CHECK(same());
  }
  SUBCASE("[head][in, dim]") {
    const auto q = per_head(f.w_q, s.embed, s.head_dim), k = per_head(f.w_k, s.k_embed, s.head_dim);
    const auto v = per_head(f.w_v, s.v_embed, s.v_dim), o = in_out(f.w_o, cat);
    f.w.layout = MH_WEIGHTS_PER_HEAD;
    f.w.w_q = q.data(), f.w.w_k = k.data(), f.w.w_v = v.data(), f.w.w_o = o.data();
    f.run();
    CHECK(same());
  }
  SUBCASE("in_proj and in_proj_bias") {
    std::vector<Number> all(f.w_q), bias(f.b_q);
    for (const auto* w : {&f.w_k, &f.w_v}) all.insert(all.end(), w->begin(), w->end());
    for (const auto* b : {&f.b_k, &f.b_v}) bias.insert(bias.end(), b->begin(), b->end());
    f.w.in_proj = all.data();
    f.w.w_q = f.w.w_k = f.w.w_v = nullptr;
    f.run();
    CHECK(same());
    f.w.in_proj_bias = bias.data();
    f.w.b_q = f.w.b_k = f.w.b_v = nullptr;
    f.run();
    CHECK(same());
  }
  SUBCASE("strides, negative ones too") {
    const int64_t dims_q[3] = {s.heads, s.head_dim, s.embed}, dims_k[3] = {s.kv_heads, s.head_dim, s.k_embed};
    const int64_t dims_v[3] = {s.kv_heads, s.v_dim, s.v_embed}, dims_o[3] = {1, s.out, cat};
    strided<Number> q(f.w_q, dims_q, {-1000, 1, 9}), k(f.w_k, dims_k, {500, 11, -1}), v(f.w_v, dims_v, {3, 6, 40});
    strided<Number> o(f.w_o, dims_o, {0, 2, 25});
    f.w.w_q = q.data(), f.w.w_k = k.data(), f.w.w_v = v.data(), f.w.w_o = o.data();
    std::copy_n(q.strides, 3, f.w.w_q_strides);
    std::copy_n(k.strides, 3, f.w.w_k_strides);
    std::copy_n(v.strides, 3, f.w.w_v_strides);
    std::copy_n(o.strides + 1, 2, f.w.w_o_strides);
    f.run();
    CHECK(same());
    f.w.flags = MH_FLAG_STRIDES;
    f.run();
    CHECK(same());
  }
}

TEST_CASE("a stride of zero shares weights") {
  sizes s;
  fixture<float> f(s), g(s);
  const size_t head = f.w_q.size() / 4;
  for (size_t i = head; i < f.w_q.size(); ++i) f.w_q[i] = f.w_q[i % head];
  const int64_t strides[3] = {0, 24, 1};
  std::copy_n(strides, 3, g.w.w_q_strides);
  f.run();
  g.run();
  CHECK(f.out == g.out);
}

TEST_CASE("weights are copied") {
  fixture<float> f;
  f.all_biases();
  f.w.bias_k = f.bias_k.data();
  f.w.bias_v = f.bias_v.data();
  const expectation e = expected(f);
  const auto layer = manyhead::make_mha(f.w);
  for (auto* v : {&f.w_q, &f.w_k, &f.w_v, &f.w_o, &f.b_q, &f.b_k, &f.b_v, &f.b_o, &f.bias_k, &f.bias_v}) {
    std::fill(v->begin(), v->end(), NAN);
  }
  layer->run(f.c, exec_of(0));
  CHECK(distance(f.out, e.out) < tolerance<float>);
}

TEST_CASE_TEMPLATE("masks and options", Number, float, double, bf16, f16) {
  sizes s;
  s.q_len = 9;
  s.kv_len = 9;
  s.kv_heads = 2;
  fixture<Number> f(s);
  f.all_biases();
  f.want_weights(true, true);
  SUBCASE("mask") { f.random_mask(1); }
  SUBCASE("bias") { f.random_bias(2); }
  SUBCASE("mask and bias and causal") {
    f.random_mask(3);
    f.random_bias(4);
    f.c.causal = 1;
  }
  SUBCASE("key mask") {
    f.key_mask.assign(18, 1);
    for (const size_t i : {1U, 2U, 12U, 17U}) f.key_mask[i] = 0;
    f.c.key_mask = f.key_mask.data();
  }
  SUBCASE("seqused_k") {
    f.seqused_k = {4, 9};
    f.c.seqused_k = f.seqused_k.data();
  }
  SUBCASE("window and softcap and scale") {
    f.c.flags = MH_FLAG_WINDOW;
    f.c.window_left = 2;
    f.c.window_right = 1;
    f.c.softcap = 1.5;
    f.w.scale = 0.7;
  }
  SUBCASE("offset") {
    f.c.causal = 1;
    f.c.align = MH_ALIGN_OFFSET;
    f.c.q_offset = -3;
  }
  run_and_check(f);
}

TEST_CASE("masks broadcast by stride 0") {
  fixture<float> f, g;
  f.random_mask(5);
  const std::vector<uint8_t> row(f.mask.begin(), f.mask.begin() + 25);
  for (size_t i = 0; i < f.mask.size(); ++i) f.mask[i] = row[i % 25];
  g.c.mask = row.data();
  g.c.mask_strides[2] = 5;
  g.c.mask_strides[3] = 1;
  f.run();
  g.run();
  CHECK(f.out == g.out);
  check(f);
}

TEST_CASE_TEMPLATE("extra keys as in torch", Number, float, double, bf16, f16) {
  sizes s;
  s.q_len = 6;
  s.kv_len = 8;
  s.kv_heads = 2;
  s.v_dim = 5;
  for (const bool learned : {false, true}) {
    for (const int zero : {0, 1}) {
      for (const int masked : {0, 1, 2, 3}) {
        CAPTURE(learned);
        CAPTURE(zero);
        CAPTURE(masked);
        fixture<Number> f(s);
        f.all_biases();
        if (learned) f.w.bias_k = f.bias_k.data(), f.w.bias_v = f.bias_v.data();
        f.w.add_zero_attn = zero;
        f.want_weights(true, true);
        if (masked == 1) {
          f.random_mask(6);
          std::fill_n(f.mask.begin(), 24, uint8_t{0});  // some rows have the extra keys alone
        }
        if (masked == 2) {
          f.c.causal = 1;
          f.c.align = MH_ALIGN_BOTTOM_RIGHT;
          f.random_bias(7);
        }
        if (masked == 3) {
          f.seqused_k = {0, 5};
          f.c.seqused_k = f.seqused_k.data();
        }
        run_and_check(f);
      }
    }
  }
}

TEST_CASE("extra keys of a causal square call need no align") {
  fixture<float> f;
  f.w.add_zero_attn = 1;
  f.c.causal = 1;
  run_and_check(f);
}

TEST_CASE_TEMPLATE("no output projection", Number, float, double, bf16, f16) {
  sizes s;
  s.v_dim = 7;
  s.out = 28;
  fixture<Number> f(s);
  f.w.w_o = nullptr;
  SUBCASE("out_dim given") {}
  SUBCASE("out_dim 0") { f.w.out_dim = 0; }
  run_and_check(f);
}

TEST_CASE("a row without any key gives the bias of the output, exactly") {
  fixture<float> f;
  f.all_biases();
  f.random_mask(8);
  for (size_t h = 0; h < 4; ++h)
    std::fill_n(f.mask.begin() + static_cast<std::ptrdiff_t>(25 * h + 10), 5, uint8_t{0});  // query 2 of entry 0
  f.want_weights(true, true);
  run_and_check(f);
  CHECK(std::equal(f.b_o.begin(), f.b_o.end(), f.out.begin() + 2 * 24));
  CHECK(std::all_of(f.mean_weights.begin() + 10, f.mean_weights.begin() + 15, [](float x) { return x == 0; }));
}

TEST_CASE("no keys, no queries, no batch") {
  sizes s;
  SUBCASE("no keys") {
    s.kv_len = 0;
    fixture<float> f(s);
    f.all_biases();
    float somewhere = 0;
    f.c.x_k = f.c.x_v = &somewhere;
    f.run();
    for (size_t i = 0; i < f.out.size(); ++i) CHECK(f.out[i] == f.b_o[i % 24]);
    f.w.bias_k = f.bias_k.data();
    f.w.bias_v = f.bias_v.data();
    run_and_check(f);
  }
  SUBCASE("no queries") {
    s.q_len = 0;
    fixture<float>(s).run();
  }
  SUBCASE("no batch") {
    s.batch = 0;
    fixture<float> f(s);
    f.c.x_q = f.c.x_k = f.c.x_v = nullptr;
    f.c.out = nullptr;
    f.run();
  }
}

TEST_CASE_TEMPLATE("any strides", Number, float, double, bf16, f16) {
  sizes s;
  s.q_len = 6;
  s.kv_len = 7;
  s.out = 10;
  fixture<Number> f(s);
  f.all_biases();
  f.want_weights(true, true);
  run_and_check(f);
  const int64_t dims_q[3] = {2, 6, 24}, dims_k[3] = {2, 7, 24}, dims_out[3] = {2, 6, 10}, dims_m[3] = {2, 6, 7};
  const std::vector<Number> many(200, Number(-5));
  struct choice {
    int64_t q[3], k[3], v[3], out[3], w[4], m[3];
  };
  const choice choices[] = {
      {{6 * 30, 30, 1}, {1, 2, 14}, {-200, -24, 1}, {100, 12, 1}, {168, 42, 7, 1}, {42, 7, 1}},
      {{24, 48, 1}, {-2, -4, -28}, {49, 100, 2}, {1, 2, 12}, {7, 14, 56, 1}, {1, 14, 2}},
      {{1, 2, 12}, {7 * 24, 24, 1}, {400, 50, -2}, {-70, 11, -1}, {-168, -42, -7, -1}, {-42, -7, -1}},
  };
  for (const choice& x : choices) {
    strided<Number> q(f.x_q, dims_q, x.q), k(f.x_k, dims_k, x.k), v(f.x_v, dims_k, x.v);
    strided<Number> out(many, dims_out, x.out);
    strided<real_of<Number>> m(std::vector<real_of<Number>>(200, -5), dims_m, x.m);
    std::vector<real_of<Number>> w_memory(1000, -5);
    int64_t w_start = 0;
    const int64_t w_dims[4] = {2, 4, 6, 7};
    for (int i = 0; i < 4; ++i) w_start += x.w[i] < 0 ? (1 - w_dims[i]) * x.w[i] : 0;
    fixture<Number> g(s);
    g.all_biases();
    g.c.x_q = q.data(), g.c.x_k = k.data(), g.c.x_v = v.data(), g.c.out = out.data();
    g.c.weights = w_memory.data() + w_start;
    g.c.mean_weights = m.data();
    g.c.flags = MH_FLAG_STRIDES;
    std::copy_n(x.q, 3, g.c.x_q_strides);
    std::copy_n(x.k, 3, g.c.x_k_strides);
    std::copy_n(x.v, 3, g.c.x_v_strides);
    std::copy_n(x.out, 3, g.c.out_strides);
    std::copy_n(x.w, 4, g.c.weights_strides);
    std::copy_n(x.m, 3, g.c.mean_weights_strides);
    g.run();
    CHECK(out.values() == f.out);
    CHECK(m.values() == f.mean_weights);
    size_t i = 0;
    bool same = true;
    for (int64_t b = 0; b < 2; ++b) {
      for (int64_t h = 0; h < 4; ++h) {
        for (int64_t r = 0; r < 6; ++r) {
          for (int64_t n = 0; n < 7; ++n) {
            same = same && w_memory[static_cast<size_t>(w_start + b * x.w[0] + h * x.w[1] + r * x.w[2] + n * x.w[3])] ==
                               f.weights[i++];
          }
        }
      }
    }
    CHECK(same);
    // Nothing but the elements of out has been written: the rest still holds NaN.
    const auto written =
        std::count_if(out.memory.begin(), out.memory.end(), [](Number value) { return value == value; });
    CHECK(written == 2 * 6 * 10);
  }
}

TEST_CASE("x with stride 0 is read again and again") {
  fixture<float> f, g;
  for (size_t i = 24; i < f.x_q.size(); ++i) f.x_q[i] = f.x_q[i % 24];
  g.c.flags = MH_FLAG_STRIDES;
  g.c.x_q_strides[2] = 1;
  const int64_t rows[3] = {5 * 24, 24, 1};
  for (int64_t* strides : {g.c.x_k_strides, g.c.x_v_strides, g.c.out_strides}) std::copy_n(rows, 3, strides);
  f.run();
  g.run();
  CHECK(f.out == g.out);
}

TEST_CASE("no output projection, any strides") {
  sizes s;
  fixture<float> f(s);
  f.w.w_o = nullptr;
  run_and_check(f);
  const int64_t dims[3] = {2, 5, 24};
  strided<float> out(std::vector<float>(240, -5.0F), dims, {1, 2, -11});
  fixture<float> g(s);
  g.w.w_o = nullptr;
  g.c.out = out.data();
  std::copy_n(out.strides, 3, g.c.out_strides);
  g.run();
  CHECK(out.values() == f.out);
}

// Embeddings of 128 and more numbers go to the matrix unit where there is one, of f32 48 rows, of f16 12, of bf16 all or 8.
TEST_CASE_TEMPLATE("same bits for any number of threads", Number, float, double, bf16, f16) {
  const struct {
    int64_t q_len, embed;
  } all[] = {{1, 96},   {3, 96},   {40, 96},   {150, 96},
             {50, 160}, {70, 160}, {150, 160}, {4, 480}};  // the last in shares, where weights fit
  for (const auto& [q_len, embed] : all) {
    CAPTURE(q_len);
    CAPTURE(embed);
    sizes s;
    s.batch = 3;
    s.q_len = s.kv_len = q_len;
    s.embed = embed;
    s.head_dim = 48;
    fixture<Number> f(s);
    f.all_biases();
    f.want_weights(true, true);
    f.run(1);
    const std::vector<Number> out = f.out;
    const std::vector<real_of<Number>> weights = f.weights, mean = f.mean_weights;
    for (const int32_t threads : {2, 3, 7, 0}) {
      CAPTURE(threads);
      std::fill(f.out.begin(), f.out.end(), Number(0));
      f.run(threads);
      CHECK(f.out == out);
      CHECK(f.weights == weights);
      CHECK(f.mean_weights == mean);
    }
  }
}

TEST_CASE_TEMPLATE("same bits whatever else is in the batch", Number, float, double, bf16, f16) {
  // Odd sizes, so that the entries start at any alignment. One entry alone, and third of seven.
  const struct {
    int64_t q_len, embed, out;
  } shapes[] = {{1, 51, 37},   {2, 51, 37},    {3, 51, 37},    {5, 51, 37},    {17, 51, 37},   {60, 51, 37},
                {130, 51, 37}, {17, 150, 137}, {61, 150, 137}, {67, 150, 137}, {130, 150, 137}};
  for (const auto& [q_len, embed, outputs] : shapes) {
    CAPTURE(q_len);
    CAPTURE(embed);
    sizes s;
    s.batch = 1;
    s.q_len = q_len;
    s.kv_len = q_len + 4;
    s.embed = embed;
    s.heads = 3;
    s.out = outputs;
    fixture<Number> one(s);
    s.batch = 7;
    fixture<Number> many(s);
    const auto put = [](std::vector<Number>& all, const std::vector<Number>& entry) {
      std::copy(entry.begin(), entry.end(), all.begin() + static_cast<std::ptrdiff_t>(2 * entry.size()));
    };
    put(many.x_q, one.x_q);
    put(many.x_k, one.x_k);
    put(many.x_v, one.x_v);
    for (auto* f : {&one, &many}) f->all_biases();
    one.run();
    many.run();
    const size_t size = one.out.size();
    CHECK(std::memcmp(one.out.data(), many.out.data() + 2 * size, size * sizeof(Number)) == 0);
    CHECK(std::memcmp(one.out.data(), many.out.data() + 3 * size, size * sizeof(Number)) != 0);
  }
}

TEST_CASE("same bits for self-attention, however it is asked for") {
  fixture<float> a, b;
  a.self_attention();
  b.x_k = b.x_v = b.x_q;
  a.run();
  b.run();
  CHECK(a.out == b.out);
  b.c.x_k = b.c.x_v = b.c.x_q;
  b.run();
  CHECK(a.out == b.out);
}

TEST_CASE("NaN stays where it belongs") {
  fixture<float> f;
  f.all_biases();
  f.run();
  const std::vector<float> out = f.out;
  SUBCASE("in one batch entry") {
    for (float* x : {&f.x_q[0], &f.x_k[3], &f.x_v[7]}) *x = NAN;
    f.run();
    CHECK(std::equal(out.begin() + 120, out.end(), f.out.begin() + 120));
    CHECK(std::isnan(f.out[0]));
  }
  SUBCASE("in a query") {
    f.x_q[24] = NAN;
    f.run();
    for (size_t i = 0; i < out.size(); ++i) CHECK((i / 24 == 1 ? std::isnan(f.out[i]) : f.out[i] == out[i]));
  }
  SUBCASE("in a masked key") {
    f.key_mask.assign(10, 1);
    f.key_mask[3] = 0;
    f.c.key_mask = f.key_mask.data();
    f.run();
    const std::vector<float> masked = f.out;
    f.x_k[3 * 24] = NAN;
    f.x_v[3 * 24 + 5] = INFINITY;
    f.run();
    CHECK(f.out == masked);
  }
  SUBCASE("behind seqused_k") {
    f.seqused_k = {5, 2};
    f.c.seqused_k = f.seqused_k.data();
    f.run();
    const std::vector<float> masked = f.out;
    for (size_t i = 120 + 2 * 24; i < 240; ++i) f.x_k[i] = f.x_v[i] = NAN;
    f.run();
    CHECK(f.out == masked);
  }
}

TEST_CASE("concurrent runs of one layer") {
  sizes s;
  s.q_len = s.kv_len = 67;
  s.embed = 160;
  fixture<float> f(s);
  f.all_biases();
  f.run();
  const auto layer = manyhead::make_mha(f.w);
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([&] {
      std::vector<float> out(f.out.size());
      mh_mha_call c = f.c;
      c.out = out.data();
      for (int i = 0; i < 20; ++i) {
        layer->run(c, exec_of(0));
        wrong += out != f.out;
      }
    });
  }
  for (std::thread& t : threads) t.join();
  CHECK(wrong == 0);
}

TEST_CASE("a small step wakes nobody") {
  // 2 rows of 64: less work than waking a thread takes. 4 rows of 512 are worth some threads, not 64.
  struct host {
    int64_t calls = 0, most = 0;
  };
  for (const int64_t embed : {64, 512}) {
    sizes s;
    s.batch = 1;
    s.q_len = s.kv_len = embed == 64 ? 2 : 4;
    s.embed = embed;
    fixture<float> f(s);
    host seen;
    mh_exec exec = exec_of(1000);
    exec.parallel_ctx = &seen;
    exec.parallel_for = [](void* ctx, int64_t n, mh_task_fn fn, void* arg) {
      host& h = *static_cast<host*>(ctx);
      ++h.calls;
      h.most = std::max(h.most, n);
      for (int64_t i = 0; i < n; ++i) fn(arg, i);
    };
    const auto layer = manyhead::make_mha(f.w);
    layer->run(f.c, exec);
    check(f);
    if (embed == 64) CHECK(seen.calls == 0);
    if (embed == 512) CHECK((seen.calls == 2 && seen.most >= 2 && seen.most <= 40));
  }
}

TEST_CASE("a host's parallel_for runs everything") {
  sizes s;
  s.q_len = s.kv_len = 200;
  s.embed = 96;
  fixture<float> f(s);
  f.run(1);
  const std::vector<float> out = f.out;
  const auto layer = manyhead::make_mha(f.w);
  int64_t calls = 0;
  mh_exec exec = exec_of(3);
  exec.parallel_ctx = &calls;
  exec.parallel_for = [](void* ctx, int64_t n, mh_task_fn fn, void* arg) {
    ++*static_cast<int64_t*>(ctx);
    for (int64_t i = n; i-- > 0;) fn(arg, i);
  };
  layer->run(f.c, exec);
  CHECK(calls == 3);  // projections, attention, output projection
  CHECK(f.out == out);
}

TEST_CASE("errors name the argument of the weights") {
  using F = fixture<float>;
  mentions(failure_of([](F& f) { f.w.dtype = MH_DTYPE_F16 + 1; }), "dtype is 4, must be an mh_dtype, 0..3");
  mentions(failure_of([](F& f) { f.w.layout = 3; }), "layout is 3");
  mentions(failure_of([](F& f) { f.w.flags = MH_FLAG_WINDOW; }), "flags is 4");
  mentions(failure_of([](F& f) { f.w.embed_dim = 0; }), "embed_dim is 0, must be >= 1");
  mentions(failure_of([](F& f) { f.w.embed_dim = -24; }), "embed_dim is -24");
  mentions(failure_of([](F& f) { f.w.k_embed_dim = -1; }), "k_embed_dim is -1");
  mentions(failure_of([](F& f) { f.w.v_embed_dim = -1; }), "v_embed_dim is -1");
  mentions(failure_of([](F& f) { f.w.out_dim = -1; }), "out_dim is -1");
  mentions(failure_of([](F& f) { f.w.heads = 0; }), "heads is 0");
  mentions(failure_of([](F& f) { f.w.heads = 5; }), "heads is 5, must divide embed_dim = 24");
  mentions(failure_of([](F& f) { f.w.kv_heads = 3; }), "kv_heads is 3, must divide heads = 4");
  mentions(failure_of([](F& f) { f.w.head_dim = -2; }), "head_dim is -2");
  mentions(failure_of([](F& f) { f.w.v_dim = -2; }), "v_dim is -2");
  mentions(failure_of([](F& f) { f.w.scale = NAN; }), "scale is ");
  mentions(failure_of([](F& f) { f.w.add_zero_attn = 2; }), "add_zero_attn is 2");
  mentions(failure_of([](F& f) { f.w.w_q = nullptr; }), "w_q is NULL");
  mentions(failure_of([](F& f) { f.w.w_k = nullptr; }), "w_k is NULL");
  mentions(failure_of([](F& f) { f.w.w_v = nullptr; }), "w_v is NULL");
  mentions(failure_of([](F& f) { f.w.w_o = nullptr, f.w.b_o = f.b_o.data(); }), "b_o is not NULL, but w_o is NULL");
  mentions(failure_of([](F& f) { f.w.w_o = nullptr, f.w.w_o_strides[0] = 1; }),
           "w_o_strides are not zero, but w_o is NULL");
  mentions(failure_of([](F& f) { f.w.w_o = nullptr, f.w.out_dim = 23; }),
           "out_dim is 23, must be 0 or heads * v_dim = 24");
  mentions(failure_of([](F& f) { f.w.in_proj = f.w_q.data(); }), "w_q is not NULL, but in_proj is given");
  mentions(failure_of([](F& f) {
             f.w.in_proj = f.w_q.data();
             f.w.w_q = f.w.w_k = f.w.w_v = nullptr;
             f.w.layout = MH_WEIGHTS_IN_OUT;
           }),
           "layout is 1, must be MH_WEIGHTS_OUT_IN with in_proj");
  mentions(failure_of([](F& f) {
             f.w.in_proj = f.w_q.data();
             f.w.w_q = f.w.w_k = f.w.w_v = nullptr;
             f.w.w_k_strides[2] = 1;
           }),
           "w_k_strides are not zero, but in_proj is given");
  mentions(failure_of([](F& f) { f.w.in_proj_bias = f.b_q.data(), f.w.b_v = f.b_v.data(); }),
           "b_v is not NULL, but in_proj_bias is given");
  mentions(failure_of([](F& f) { f.w.bias_k = f.bias_k.data(); }), "bias_k is not NULL, but bias_v is");
  mentions(failure_of([](F& f) { f.w.bias_v = f.bias_v.data(); }), "bias_v is not NULL, but bias_k is");
  mentions(failure_of([](F& f) { f.w.w_q = reinterpret_cast<const char*>(f.w_q.data()) + 1; }), "w_q is at address");
  mentions(failure_of([](F& f) { f.w.b_q = reinterpret_cast<const char*>(f.b_q.data()) + 2; }), "b_q is at address");
  mentions(failure_of([](F& f) { f.w.w_v_strides[0] = INT64_MAX / 2; }), "w_v_strides are [");
  mentions(failure_of([](F& f) { f.w.embed_dim = int64_t{1} << 60, f.w.head_dim = 1; }),
           "w_q has shape [4, 1, 1152921504606846976]");
  mentions(failure_of([](F& f) { f.w.out_dim = int64_t{1} << 60; }), "w_o has shape");
}

TEST_CASE("errors name the argument of the call") {
  using F = fixture<float>;
  mentions(failure_of([](F& f) { f.c.batch = -1; }), "batch is -1");
  mentions(failure_of([](F& f) { f.c.q_len = -1; }), "q_len is -1");
  mentions(failure_of([](F& f) { f.c.kv_len = -1; }), "kv_len is -1");
  mentions(failure_of([](F& f) { f.c.flags = MH_FLAG_SCALE; }), "flags is 1");
  mentions(failure_of([](F& f) { f.c.reserved0 = 1; }), "reserved0 is 1");
  mentions(failure_of([](F& f) { f.c.x_q = nullptr; }), "x_q is NULL");
  mentions(failure_of([](F& f) { f.c.out = nullptr; }), "out is NULL");
  mentions(failure_of([](F& f) { f.c.x_k = nullptr, f.c.kv_len = 4; }),
           "kv_len is 4, must equal q_len = 5 where x_k is NULL");
  mentions(failure_of([](F& f) { f.c.x_k = nullptr, f.w.k_embed_dim = 12; }),
           "x_k is NULL (self-attention), but k_embed_dim = 12");
  mentions(failure_of([](F& f) { f.c.x_v = nullptr, f.w.v_embed_dim = 12; }),
           "x_v is NULL (values from x_k), but v_embed_dim = 12");
  mentions(failure_of([](F& f) { f.c.x_q = reinterpret_cast<const char*>(f.x_q.data()) + 1; }), "x_q is at address");
  mentions(failure_of([](F& f) { f.c.x_q_strides[0] = INT64_MAX / 4; }), "x_q_strides are [");
  mentions(failure_of([](F& f) { f.c.out_strides[0] = 1, f.c.out_strides[1] = 2, f.c.out_strides[2] = 2; }),
           "out_strides are [");
  mentions(failure_of([](F& f) { f.c.flags = MH_FLAG_STRIDES; }), "out_strides are [0, 0, 0]");
  mentions(failure_of([](F& f) { f.c.batch = int64_t{1} << 60; }), "x_q has shape");
  mentions(failure_of([](F& f) { f.c.causal = 2; }), "causal is 2");
  mentions(failure_of([](F& f) { f.c.align = 7; }), "align is 7");
  mentions(failure_of([](F& f) { f.c.causal = 1, f.c.kv_len = 4; }), "align is MH_ALIGN_UNSET");
  mentions(failure_of([](F& f) { f.c.q_offset = 1; }), "q_offset is 1");
  mentions(failure_of([](F& f) { f.c.window_left = 1; }), "MH_FLAG_WINDOW");
  mentions(failure_of([](F& f) { f.c.softcap = -1; }), "softcap is -1");
  mentions(failure_of([](F& f) { f.c.bias_dtype = 9; }), "bias_dtype is 9");
  mentions(failure_of([](F& f) {
             f.seqused_k = {5, 6};
             f.c.seqused_k = f.seqused_k.data();
             f.want_weights(true, true);
           }),
           "seqused_k[1] is 6, must be 0..5");
  mentions(failure_of([](F& f) {
             f.w.add_zero_attn = 1;
             f.seqused_k = {5, 6};
             f.c.seqused_k = f.seqused_k.data();
           }),
           "seqused_k[1] is 6, must be 0..5");
}

TEST_CASE("outputs may not overlap anything") {
  using F = fixture<float>;
  mentions(failure_of([](F& f) { f.c.out = f.x_q.data(); }), "out overlaps x_q");
  // With room around x, so that out meets nothing else, wherever malloc puts the arrays.
  const auto in_the_middle = [](std::vector<float>& x, const void*& pointer) {
    x.resize(600);
    pointer = x.data() + 200;
    return x.data() + 200;
  };
  mentions(failure_of([&](F& f) { f.c.out = in_the_middle(f.x_k, f.c.x_k) + 5; }), "out overlaps x_k");
  mentions(failure_of([&](F& f) { f.c.out = in_the_middle(f.x_v, f.c.x_v) - 5; }), "out overlaps x_v");
  mentions(failure_of([](F& f) { f.c.mask = reinterpret_cast<const uint8_t*>(f.out.data()); }), "out overlaps mask");
  mentions(failure_of([](F& f) { f.c.bias = f.out.data(), f.c.bias_strides[3] = 1; }), "out overlaps bias");
  mentions(failure_of([](F& f) { f.c.key_mask = reinterpret_cast<const uint8_t*>(f.out.data()) + 7; }),
           "out overlaps key_mask");
  mentions(failure_of([](F& f) { f.want_weights(true, false), f.c.out = f.weights.data(); }), "out overlaps weights");
  mentions(failure_of([](F& f) { f.want_weights(false, true), f.c.mean_weights = f.x_q.data(); }),
           "mean_weights overlaps x_q");
  mentions(failure_of([](F& f) { f.want_weights(true, true), f.c.mean_weights = f.c.weights; }),
           "mean_weights overlaps weights");
  mentions(failure_of([](F& f) {
             f.self_attention();
             f.want_weights(true, false);
             f.x_q.resize(400);
             f.c.x_q = f.x_q.data();
             f.c.weights = f.x_q.data() + 100;
           }),
           "weights overlaps x_q");
}
