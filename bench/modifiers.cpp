// What masks, modifiers and outputs besides the result cost: attention with each of them beside plain attention of the same
// shape, in turn, as speed per attended pair. 1.00 = a pair costs what it costs without.
#include <getopt.h>
#include <manyhead/manyhead.hpp>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <iterator>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "alternate.hpp"
#include "arguments.hpp"
#include "buffer.hpp"
#include "elements.hpp"

namespace {

constexpr const char* usage =
    "modifiers [--dtype f32] [--head-dim 64] [--threads 1] [--seconds 0.5]\n"
    "  --dtype D     f32, bf16 or f16; masks and biases stay what they are, biases f32\n"
    "  --head-dim N  size of a head\n"
    "  --threads N   0: all\n"
    "  --seconds S   of measuring a modifier\n";

constexpr int64_t heads = 8;

constexpr std::pair<const char*, int32_t> dtypes[] = {
    {"f32", MH_DTYPE_F32}, {"bf16", MH_DTYPE_BF16}, {"f16", MH_DTYPE_F16}};

struct options {
  std::pair<const char*, int32_t> dtype = dtypes[0];
  int head_dim = 64, threads = 1;
  double seconds = 0.5;
};

struct arrays {
  buffer q, k, v, out;
  std::vector<float> bias, slopes, sinks, lse, pairs;  // pairs: of weights or scores
  std::vector<uint8_t> mask, key_mask, lower;          // lower: a causal mask
  std::vector<float> lower_bias;                       // the same as a bias
};

// A problem of q_len queries and keys, and how many pairs of (query, key) a head attends.
struct variant {
  const char* name;
  std::function<void(mh_problem&, mh_tensors&)> set;
  double pairs;
};

std::vector<variant> variants_of(arrays& a, int64_t n) {
  const auto square = static_cast<double>(n * n), below_diagonal = 0.5 * static_cast<double>(n * (n + 1));
  const int64_t side = n / 8;
  double in_window = 0;
  for (int64_t i = 0; i < n; ++i)
    in_window += static_cast<double>(std::min(n, i + side + 1) - std::max<int64_t>(0, i - side));
  const auto with_mask = [&a](mh_problem& p, mh_tensors& t) {
    p.inputs |= MH_INPUT_MASK;
    t.mask = a.mask.data();
  };
  const auto with_bias = [&a](mh_problem& p, mh_tensors& t) {
    p.inputs |= MH_INPUT_BIAS;
    t.bias = a.bias.data();
  };
  const auto output = [](uint32_t bit, void* mh_tensors::* to, std::vector<float>& array) {
    return [=, &array](mh_problem& p, mh_tensors& t) {
      p.outputs |= bit;
      t.*to = array.data();
    };
  };
  const auto for_all_heads = [n](int64_t* strides) {
    const int64_t all[] = {0, 0, n, 1};
    std::copy_n(all, 4, strides);
  };
  const double seen = static_cast<double>(std::count(a.mask.begin(), a.mask.begin() + n * n, 1));
  return {
      {"plain", [](mh_problem&, mh_tensors&) {}, square},
      {"causal", [](mh_problem& p, mh_tensors&) { p.causal = 1; }, below_diagonal},
      {"window, an eighth each side",
       [side](mh_problem& p, mh_tensors&) {
         p.flags |= MH_FLAG_WINDOW;
         p.window_left = p.window_right = side;
       },
       in_window},
      {"boolean mask, of all heads",
       [=](mh_problem& p, mh_tensors& t) {
         with_mask(p, t);
         for_all_heads(p.mask_strides);
       },
       seen},
      {"boolean mask, of each head", with_mask,
       static_cast<double>(std::count(a.mask.begin(), a.mask.end(), 1)) / static_cast<double>(heads)},
      {"boolean mask that is causal",
       [=, &a](mh_problem& p, mh_tensors& t) {
         with_mask(p, t);
         t.mask = a.lower.data();
         for_all_heads(p.mask_strides);
       },
       below_diagonal},
      {"bias of 0 and -inf, causal",
       [=, &a](mh_problem& p, mh_tensors& t) {
         with_bias(p, t);
         t.bias = a.lower_bias.data();
         for_all_heads(p.bias_strides);
       },
       below_diagonal},
      {"key padding, the last eighth",
       [&a](mh_problem& p, mh_tensors& t) {
         p.inputs |= MH_INPUT_KEY_MASK;
         t.key_mask = a.key_mask.data();
       },
       square * 7 / 8},
      {"bias, of all heads",
       [=](mh_problem& p, mh_tensors& t) {
         with_bias(p, t);
         for_all_heads(p.bias_strides);
       },
       square},
      {"bias, of each head", with_bias, square},
      {"ALiBi",
       [&a](mh_problem& p, mh_tensors& t) {
         p.inputs |= MH_INPUT_ALIBI;
         t.alibi_slopes = a.slopes.data();
       },
       square},
      {"scores 30 times as wide",
       [](mh_problem& p, mh_tensors&) {
         p.flags |= MH_FLAG_SCALE;
         p.scale = 30 / std::sqrt(static_cast<double>(p.head_dim));
       },
       square},
      {"softcap", [](mh_problem& p, mh_tensors&) { p.softcap = 30; }, square},
      {"sinks",
       [&a](mh_problem& p, mh_tensors& t) {
         p.inputs |= MH_INPUT_SINKS;
         t.sinks = a.sinks.data();
       },
       square},
      {"lse", output(MH_OUTPUT_LSE, &mh_tensors::lse, a.lse), square},
      {"weights", output(MH_OUTPUT_WEIGHTS, &mh_tensors::weights, a.pairs), square},
      {"weights, their mean", output(MH_OUTPUT_MEAN_WEIGHTS, &mh_tensors::mean_weights, a.pairs), square},
      {"weights, their column sums", output(MH_OUTPUT_COLUMN_SUMS, &mh_tensors::column_sums, a.pairs), square},
      {"scores", output(MH_OUTPUT_SCORES, &mh_tensors::scores, a.pairs), square},
  };
}

void measure(int64_t n, const options& o) {
  std::minstd_rand bits(1);
  std::normal_distribution<float> normal;
  const auto floats = [&](int64_t size) {
    std::vector<float> x(static_cast<std::size_t>(size));
    for (float& value : x) value = normal(bits);
    return x;
  };
  const int64_t size = heads * n * o.head_dim;
  const auto bytes = static_cast<std::size_t>(size) * mh_dtype_size(o.dtype.second);
  arrays a{buffer(bytes),
           buffer(bytes),
           buffer(bytes),
           buffer(bytes),
           floats(heads * n * n),
           floats(heads),
           floats(heads),
           floats(heads * n),
           floats(heads * n * n),
           std::vector<uint8_t>(static_cast<std::size_t>(heads * n * n)),
           std::vector<uint8_t>(static_cast<std::size_t>(n), 1),
           std::vector<uint8_t>(static_cast<std::size_t>(n * n)),
           std::vector<float>(static_cast<std::size_t>(n * n))};
  for (const buffer* x : {&a.q, &a.k, &a.v, &a.out})
    for (int64_t i = 0; i < size; ++i) elements::store(o.dtype.second, x->data(), i, normal(bits));
  for (int64_t h = 0; h < heads; ++h)  // the usual slopes, down to 2^-8
    a.slopes[static_cast<std::size_t>(h)] = std::exp2(-8.0F * static_cast<float>(h + 1) / static_cast<float>(heads));
  for (uint8_t& bit : a.mask) bit = bits() % 16 != 0;  // no tile without a key that is masked
  for (int64_t i = 0; i < n * n; ++i) {
    const bool seen = i % n <= i / n;
    a.lower[static_cast<std::size_t>(i)] = seen ? 1 : 0;
    a.lower_bias[static_cast<std::size_t>(i)] = seen ? 0.0F : -std::numeric_limits<float>::infinity();
  }
  std::fill(a.key_mask.end() - n / 8, a.key_mask.end(), uint8_t{0});

  for (const variant& x : variants_of(a, n)) {
    std::vector<manyhead::plan> plans;
    std::vector<mh_tensors> tensors;
    for (const bool modified : {false, true}) {
      auto p = manyhead::make<mh_problem>();
      p.dtype = o.dtype.second;
      p.batch = 1;
      p.heads = heads;
      p.q_len = p.kv_len = n;
      p.head_dim = o.head_dim;
      auto t = manyhead::make<mh_tensors>();
      t.q = a.q.data();
      t.k = a.k.data();
      t.v = a.v.data();
      t.out = a.out.data();
      if (modified) x.set(p, t);
      plans.emplace_back(p);
      tensors.push_back(t);
    }
    const mh_exec exec = manyhead::with_threads(o.threads);
    const auto run = [&](std::size_t i) { return [&, i] { plans[i].run(tensors[i], exec); }; };
    const std::vector<double> best = alternate::fastest({run(0), run(1)}, o.seconds);
    const double plain = static_cast<double>(n * n) / best[0];
    std::printf("%-30s %6lld %10.1f %10.2f\n", x.name, static_cast<long long>(n), best[1] * 1e6,
                x.pairs / best[1] / plain);
  }
}

options read_options(int argc, char** argv) {
  options o;
  const option known[] = {{"dtype", required_argument, nullptr, 'D'},   {"head-dim", required_argument, nullptr, 'd'},
                          {"threads", required_argument, nullptr, 't'}, {"seconds", required_argument, nullptr, 'S'},
                          {"help", no_argument, nullptr, 'h'},          {nullptr, 0, nullptr, 0}};
  for (int c = 0, at = 0; (c = getopt_long(argc, argv, "", known, &at)) != -1;) {
    switch (c) {
      case 'D': {
        const auto* const found = std::find_if(std::begin(dtypes), std::end(dtypes),
                                               [](const auto& dtype) { return std::string(dtype.first) == optarg; });
        if (found == std::end(dtypes)) {
          std::fprintf(stderr, "modifiers: --dtype is \"%s\", must be f32, bf16 or f16\n", optarg);
          std::exit(2);
        }
        o.dtype = *found;
        break;
      }
      case 'd':
        o.head_dim = arguments::whole(known[at], 1);
        break;
      case 't':
        o.threads = arguments::whole(known[at], 0);
        break;
      case 'S':
        o.seconds = arguments::number(known[at], 0);
        break;
      default:
        std::fputs(usage, c == 'h' ? stdout : stderr);
        std::exit(c == 'h' ? 0 : 2);
    }
  }
  arguments::no_more(argc, argv, usage);
  return o;
}

}  // namespace

int main(int argc, char** argv) {
  const options o = read_options(argc, argv);
  std::printf("%s, 1 x %lld heads of %d, isa %s; speed per attended pair over that of plain attention\n\n",
              o.dtype.first, static_cast<long long>(heads), o.head_dim, mh_isa_current());
  std::printf("%-30s %6s %10s %10s\n", "modifier", "q, kv", "us", "ratio");
  try {
    for (const int64_t n : {512, 1024}) measure(n, o);
  } catch (const manyhead::error& e) {
    std::fprintf(stderr, "modifiers: %s\n", e.what());
    return 1;
  }
}
