// Is manyhead anywhere slower than the plain composition (plain.hpp)? Many shapes, drawn from lists of lengths, sizes
// and layouts by a fixed sequence, each checked and then timed against the composition in turn. Prints the worst.
#include <cblas.h>
#include <getopt.h>
#include <manyhead/manyhead.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "alternate.hpp"
#include "arguments.hpp"
#include "buffer.hpp"
#include "openblas_core.hpp"
#include "plain.hpp"

namespace {

constexpr const char* usage =
    "sweep [--shapes 300] [--seed 1] [--threads 1] [--seconds 0.06] [--list]\n"
    "  --shapes N    how many shapes are drawn\n"
    "  --seed N      where the drawing begins\n"
    "  --threads N   of both sides; 0: all\n"
    "  --seconds S   of measuring a shape\n"
    "  --list        print every shape, not only the worst ten\n"
    "For another instruction set on both sides: MH_ISA=avx2 OPENBLAS_CORETYPE=Haswell\n";

// Shapes that take longer than this many FLOPs say nothing that a smaller one does not.
constexpr double most_flops = 2e9;

struct options {
  int shapes = 300, threads = 1;
  unsigned seed = 1;
  double seconds = 0.06;
  bool list = false;
};

struct result {
  plain::shape shape;
  std::string text;
  double ours, plain;  // seconds
  double ratio() const { return plain / ours; }
};

double flops_of(const plain::shape& s) {
  return 4.0 * static_cast<double>(s.batch * s.heads * s.head_dim) * static_cast<double>(s.q_len * s.kv_len);
}

class drawing {
 public:
  explicit drawing(unsigned seed) : bits_(seed) {}

  plain::shape operator()() {
    for (;;) {
      const int64_t len = one_of({8, 10, 16, 17, 32, 49, 64, 100, 128, 197, 256, 384, 512, 577, 1024, 2048});
      const int64_t few = one_of({1, 2, 3, 4, 7, 8, 9, 15, 16, 31});
      plain::shape s{};
      s.kv_len = len;
      // Half of them self-attention, the others a few or fewer queries against more keys.
      switch (one_of({0, 0, 1, 2})) {
        case 0:
          s.q_len = len;
          break;
        case 1:
          s.q_len = std::min(few, len);
          s.kv_len = len * one_of({1, 4, 8});
          break;
        default:
          s.q_len = std::max<int64_t>(1, len / one_of({2, 3, 4}));
      }
      s.head_dim = one_of({16, 32, 40, 64, 64, 80, 96, 128, 128, 160, 256});
      s.heads = one_of({1, 2, 8, 12, 16, 32});
      s.batch = one_of({1, 1, 2, 8});
      s.heads_inner = one_of({0, 1}) == 1;
      s.causal = one_of({0, 1}) == 1;
      if (flops_of(s) <= most_flops) return s;
    }
  }

 private:
  int64_t one_of(std::initializer_list<int64_t> values) { return values.begin()[bits_() % values.size()]; }
  std::mt19937 bits_;  // the same sequence everywhere, which the standard's distributions are not
};

mh_problem problem_of(const plain::shape& s) {
  mh_problem p{};
  p.struct_size = sizeof p;
  p.batch = s.batch;
  p.heads = s.heads;
  p.q_len = s.q_len;
  p.kv_len = s.kv_len;
  p.head_dim = s.head_dim;
  p.causal = s.causal ? 1 : 0;
  p.align = s.causal ? MH_ALIGN_BOTTOM_RIGHT : MH_ALIGN_UNSET;
  if (s.heads_inner) {
    const auto set = [&](int64_t* strides, int64_t len) {
      const int64_t row = s.heads * s.head_dim;
      const int64_t all[] = {len * row, s.head_dim, row, 1};
      std::copy_n(all, 4, strides);
    };
    set(p.q_strides, s.q_len);
    set(p.k_strides, s.kv_len);
    set(p.v_strides, s.kv_len);
    set(p.out_strides, s.q_len);
  }
  return p;
}

std::string text_of(const plain::shape& s) {
  std::array<char, 128> text{};
  std::snprintf(text.data(), text.size(), "b%lld h%lld q%lld kv%lld d%lld%s%s", static_cast<long long>(s.batch),
                static_cast<long long>(s.heads), static_cast<long long>(s.q_len), static_cast<long long>(s.kv_len),
                static_cast<long long>(s.head_dim), s.causal ? " causal" : "", s.heads_inner ? " bshd" : "");
  return text.data();
}

[[noreturn]] void fail(const std::string& text) {
  std::fprintf(stderr, "sweep: %s\n", text.c_str());
  std::exit(1);
}

result measure(const plain::shape& s, const options& o) {
  const auto floats = [](int64_t n) { return buffer(static_cast<std::size_t>(n) * sizeof(float)); };
  const auto data = [](buffer& b) { return reinterpret_cast<float*>(b.data()); };
  const int64_t q_size = s.batch * s.heads * s.q_len * s.head_dim, kv_size = q_size / s.q_len * s.kv_len;
  buffer q = floats(q_size), k = floats(kv_size), v = floats(kv_size), ours = floats(q_size), theirs = floats(q_size),
         scores = floats(plain::scores_needed(s, o.threads));
  std::minstd_rand bits(1);
  std::normal_distribution<float> normal;
  for (buffer* x : {&q, &k, &v})
    for (std::size_t i = 0; i < x->size() / sizeof(float); ++i) data(*x)[i] = normal(bits);

  const mh_problem problem = problem_of(s);
  mh_tensors tensors{};
  tensors.struct_size = sizeof tensors;
  tensors.q = q.data();
  tensors.k = k.data();
  tensors.v = v.data();
  tensors.out = ours.data();
  mh_exec exec{};
  exec.struct_size = sizeof exec;
  exec.threads = o.threads;
  const auto run_ours = [&] {
    if (mh_attention(&problem, &tensors, &exec) != MH_OK) fail(text_of(s) + ": " + mh_last_error());
  };
  const auto run_plain = [&] { plain::attention(s, data(q), data(k), data(v), data(theirs), data(scores), o.threads); };
  run_ours();
  run_plain();
  for (int64_t i = 0; i < q_size; ++i) {
    const float a = data(ours)[i], b = data(theirs)[i];
    if (!(std::fabs(a - b) <= 5e-5F * (1 + std::fabs(b))))
      fail(text_of(s) + ": the results differ, " + std::to_string(a) + " and " + std::to_string(b));
  }
  const std::vector<double> best = alternate::fastest({run_ours, run_plain}, o.seconds);
  return {s, text_of(s), best[0], best[1]};
}

void print(const result& r) {
  std::printf("%-44s %11.2f %11.2f %7.2f\n", r.text.c_str(), r.ours * 1e6, r.plain * 1e6, r.ratio());
}

options read_options(int argc, char** argv) {
  options o;
  const option known[] = {{"shapes", required_argument, nullptr, 'n'},
                          {"seed", required_argument, nullptr, 's'},
                          {"threads", required_argument, nullptr, 't'},
                          {"seconds", required_argument, nullptr, 'S'},
                          {"list", no_argument, nullptr, 'l'},
                          {"help", no_argument, nullptr, 'h'},
                          {nullptr, 0, nullptr, 0}};
  for (int c = 0, at = 0; (c = getopt_long(argc, argv, "", known, &at)) != -1;) {
    switch (c) {
      case 'n':
        o.shapes = arguments::whole(known[at], 1);
        break;
      case 's':
        o.seed = static_cast<unsigned>(arguments::whole(known[at], 0));
        break;
      case 't':
        o.threads = arguments::whole(known[at], 0);
        break;
      case 'S':
        o.seconds = arguments::number(known[at], 0);
        break;
      case 'l':
        o.list = true;
        break;
      default:
        std::fputs(usage, c == 'h' ? stdout : stderr);
        std::exit(c == 'h' ? 0 : 2);
    }
  }
  arguments::no_more(argc, argv, usage);
  if (o.threads < 1) o.threads = mh_threads();
  return o;
}

}  // namespace

int main(int argc, char** argv) {
  openblas_core::start_with_best(argv);
  const options o = read_options(argc, argv);
  drawing draw(o.seed);
  std::vector<result> results;
  const char* head = "shape                                                us       plain   ratio";
  if (o.list) std::puts(head);
  for (int i = 0; i < o.shapes; ++i) {
    results.push_back(measure(draw(), o));
    if (o.list) print(results.back());
  }
  std::sort(results.begin(), results.end(), [](const result& a, const result& b) { return a.ratio() < b.ratio(); });
  double logs = 0;
  for (const result& r : results) logs += std::log(r.ratio());
  const auto slower = std::count_if(results.begin(), results.end(), [](const result& r) { return r.ratio() < 1; });
  std::printf("\nThe worst of %d shapes (isa %s, OpenBLAS for %s, %d threads), microseconds of a call:\n%s\n", o.shapes,
              mh_isa_current(), openblas_get_corename(), o.threads, head);
  for (std::size_t i = 0; i < std::min<std::size_t>(10, results.size()); ++i) print(results[i]);
  std::printf("\nworst ratio %.2f (%s), geometric mean %.2f, slower than plain: %d of %d\n", results[0].ratio(),
              results[0].text.c_str(), std::exp(logs / o.shapes), static_cast<int>(slower), o.shapes);
}
