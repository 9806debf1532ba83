// Times the kernels through the C interface: one row for every workload of workloads.txt, instruction set and dtype,
// on one thread and on all. A row is called attention/<dtype>/<route>@<isa>/<workload>/threads:<n>; the part before the
// workload is what the plan says it runs, so a row cannot bear the name of a kernel that it did not time. Before it is
// timed, a row's result is compared with plain attention in double. Rows layer/<dtype>/<isa>/<layer> are the multi-head
// layers of layers.txt. Rows bare/f32/openblas/<workload> are OpenBLAS on one thread on the matrix products alone: two
// of attention, without softmax, or four of a layer.
#include <benchmark/benchmark.h>
#include <manyhead/manyhead.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <iostream>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "buffer.hpp"
#include "elements.hpp"

#if MH_WITH_BLAS
#include <cblas.h>

#include "openblas_core.hpp"
#endif

namespace {

// Time of one probe; there are two before and two after each measurement.
constexpr double probe_seconds = 0.01;

struct workload {
  std::string name;
  int64_t batch, heads, kv_heads, q_len, kv_len, head_dim;
  bool causal;

  int64_t q_size() const { return batch * heads * q_len * head_dim; }
  int64_t kv_size() const { return batch * kv_heads * kv_len * head_dim; }
  double flops() const {
    const double pairs = causal ? 0.5 * static_cast<double>(q_len * (q_len + 1)) : static_cast<double>(q_len * kv_len);
    return 4.0 * static_cast<double>(batch * heads * head_dim) * pairs;
  }
};

struct layer_size {
  std::string name;
  int64_t batch, heads, tokens, width;
  bool causal;

  int64_t x_size() const { return batch * tokens * width; }
  double flops() const {
    const double pairs =
        causal ? 0.5 * static_cast<double>(tokens * (tokens + 1)) : static_cast<double>(tokens * tokens);
    return static_cast<double>(batch * width) * (8.0 * static_cast<double>(tokens * width) + 4.0 * pairs);
  }
  double weight_bytes(int32_t dtype) const {
    return 4.0 * static_cast<double>(width * width) * static_cast<double>(mh_dtype_size(dtype));
  }
};

std::istream& operator>>(std::istream& in, workload& w) {
  return in >> w.name >> w.batch >> w.heads >> w.kv_heads >> w.q_len >> w.kv_len >> w.head_dim >> w.causal;
}
std::istream& operator>>(std::istream& in, layer_size& l) {
  return in >> l.name >> l.batch >> l.heads >> l.tokens >> l.width >> l.causal;
}

template <class Row>
std::vector<Row> read_rows(const char* path) {
  std::ifstream file(path);
  std::vector<Row> all;
  for (std::string line; std::getline(file, line);) {
    if (line.empty() || line[0] == '#') continue;
    Row row;
    std::istringstream words(line);
    if (words >> row) all.push_back(row);
  }
  return all;
}

// --- values ----------------------------------------------------------------------------------------------------------

// Cheap numbers of mean 0 and variance 1, near enough to normal: the sum of four uniform ones.
class generator {
 public:
  float operator()() {
    state_ += 0x9e3779b97f4a7c15u;
    uint64_t z = state_;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    z ^= z >> 31;
    const uint64_t sum = (z & 0xffff) + ((z >> 16) & 0xffff) + ((z >> 32) & 0xffff) + (z >> 48);
    return (static_cast<float>(sum) - 131070.0f) * (1.7320508f / 65536.0f);
  }

 private:
  uint64_t state_ = 1;
};

// Largest difference from double, absolute and relative.
double tolerance(int32_t dtype) {
  switch (dtype) {
    case MH_DTYPE_F64:
      return 1e-10;
    case MH_DTYPE_BF16:
      return 1.6e-2;
    case MH_DTYPE_F16:
      return 2e-3;
    default:
      return 2e-5;
  }
}

struct tensors {
  tensors(const workload& w, int32_t type)
      : name(w.name),
        dtype(type),
        q(bytes(w.q_size())),
        k(bytes(w.kv_size())),
        v(bytes(w.kv_size())),
        out(bytes(w.q_size())) {
    generator next;
    for (int64_t i = 0; i < w.q_size(); ++i) elements::store(dtype, q.data(), i, next());
    for (int64_t i = 0; i < w.kv_size(); ++i) elements::store(dtype, k.data(), i, next());
    for (int64_t i = 0; i < w.kv_size(); ++i) elements::store(dtype, v.data(), i, next());
    std::memset(out.data(), 0xff, out.size());
  }

  std::size_t bytes(int64_t elements) const { return static_cast<std::size_t>(elements) * mh_dtype_size(dtype); }

  std::string name;
  int32_t dtype;
  buffer q, k, v, out;
};

// Rows follow each other by workload, so its arrays are made once and kept for the next row.
tensors& tensors_of(const workload& w, int32_t dtype) {
  static std::unique_ptr<tensors> kept;
  if (!kept || kept->name != w.name || kept->dtype != dtype) {
    kept.reset();
    kept = std::make_unique<tensors>(w, dtype);
  }
  return *kept;
}

// The largest excess over the tolerance in a few rows of out, at or below 0 when all is well; NaN counts as excess.
double check(const workload& w, const tensors& t) {
  double worst = -1;
  for (int sample = 0; sample < 5; ++sample) {
    const int64_t b = (w.batch - 1) * sample / 4, h = (w.heads - 1) * sample / 4, i = (w.q_len - 1) * sample / 4;
    const int64_t kv = (b * w.kv_heads + h / (w.heads / w.kv_heads)) * w.kv_len * w.head_dim;
    const int64_t row = ((b * w.heads + h) * w.q_len + i) * w.head_dim;
    const int64_t keys = w.causal ? i + 1 : w.kv_len;
    std::vector<double> weights(static_cast<std::size_t>(keys)), sum(static_cast<std::size_t>(w.head_dim));
    for (int64_t j = 0; j < keys; ++j) {
      double dot = 0;
      for (int64_t d = 0; d < w.head_dim; ++d) {
        dot +=
            elements::load(t.dtype, t.q.data(), row + d) * elements::load(t.dtype, t.k.data(), kv + j * w.head_dim + d);
      }
      weights[static_cast<std::size_t>(j)] = dot / std::sqrt(static_cast<double>(w.head_dim));
    }
    const double top = *std::max_element(weights.begin(), weights.end());
    double total = 0;
    for (int64_t j = 0; j < keys; ++j) {
      const double weight = std::exp(weights[static_cast<std::size_t>(j)] - top);
      total += weight;
      for (int64_t d = 0; d < w.head_dim; ++d) {
        sum[static_cast<std::size_t>(d)] += weight * elements::load(t.dtype, t.v.data(), kv + j * w.head_dim + d);
      }
    }
    for (int64_t d = 0; d < w.head_dim; ++d) {
      const double expected = sum[static_cast<std::size_t>(d)] / total;
      const double excess = std::abs(elements::load(t.dtype, t.out.data(), row + d) - expected) -
                            tolerance(t.dtype) * (1 + std::abs(expected));
      worst = std::isnan(excess) ? 1e30 : std::max(worst, excess);
    }
  }
  return worst;
}

// --- measuring -------------------------------------------------------------------------------------------------------

// Runs the benchmark loop between two looks at what the machine can do now, and reports the rates and their shares.
// `bytes` is what a call must read.
template <class Run>
void measure(benchmark::State& state, double bytes, const char* isa, int32_t dtype, int threads, double flops,
             Run run) {
  const auto fma_now = [&] {  // what is stored in 16 bits is compared with f32 too
    double rate = 0;
    mh_probe_arithmetic(isa, dtype == MH_DTYPE_F64 ? dtype : MH_DTYPE_F32, threads, probe_seconds, &rate);
    return rate;
  };
  const auto read_now = [&] {
    double rate = 0;
    mh_probe_read(nullptr, static_cast<std::size_t>(bytes), threads, probe_seconds, &rate);
    return rate;
  };
  double fma = fma_now(), read = read_now();
  const auto start = std::chrono::steady_clock::now();
  for (auto _ : state) run();
  const double elapsed = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  fma = std::max(fma, fma_now());
  read = std::max(read, read_now());

  const double calls_per_second = static_cast<double>(state.iterations()) / elapsed;
  state.counters["FLOP/s"] = flops * calls_per_second;
  state.counters["bytes/s"] = bytes * calls_per_second;
  state.counters["FMA_peak"] = fma;
  state.counters["read_peak"] = read;
  if (fma > 0) state.counters["of_FMA"] = flops * calls_per_second / fma;
  if (read > 0) state.counters["of_read"] = bytes * calls_per_second / read;
}

// K and V, each once.
double kv_bytes(const workload& w, int32_t dtype) {
  return 2.0 * static_cast<double>(w.kv_size()) * static_cast<double>(mh_dtype_size(dtype));
}

struct plan_deleter {
  void operator()(mh_plan* plan) const { mh_plan_destroy(plan); }
};

struct row {
  workload w;
  int32_t dtype;
  std::string isa;
  std::unique_ptr<mh_plan, plan_deleter> plan;
};

void run_attention(benchmark::State& state, const row& r, int threads) {
  tensors& t = tensors_of(r.w, r.dtype);
  mh_tensors pointers{};
  pointers.struct_size = sizeof pointers;
  pointers.q = t.q.data();
  pointers.k = t.k.data();
  pointers.v = t.v.data();
  pointers.out = t.out.data();
  mh_exec exec{};
  exec.struct_size = sizeof exec;
  exec.threads = threads;
  // The first run checks the result; Google Benchmark calls this function several times, so the check is repeated
  // only where the arrays are new.
  std::memset(t.out.data(), 0xff, t.out.size());
  if (mh_plan_run(r.plan.get(), &pointers, &exec) != MH_OK) return state.SkipWithError(mh_last_error());
  static std::string checked;
  const std::string key = r.w.name + mh_dtype_name(r.dtype) + r.isa + std::to_string(threads);
  if (checked != key) {
    const double excess = check(r.w, t);
    if (excess > 0)
      return state.SkipWithError(("wrong result: beyond the tolerance by " + std::to_string(excess)).c_str());
    checked = key;
  }
  measure(state, kv_bytes(r.w, r.dtype), r.isa.c_str(), r.dtype, threads, r.w.flops(),
          [&] { benchmark::DoNotOptimize(mh_plan_run(r.plan.get(), &pointers, &exec)); });
}

#if MH_WITH_BLAS
void run_bare_products(benchmark::State& state, const workload& w) {
  openblas_set_num_threads(1);
  tensors& t = tensors_of(w, MH_DTYPE_F32);
  buffer scores(static_cast<std::size_t>(w.q_len * w.kv_len) * sizeof(float));
  const auto floats = [](const buffer& b) { return reinterpret_cast<float*>(b.data()); };
  const int rows = static_cast<int>(w.q_len), keys = static_cast<int>(w.kv_len), dim = static_cast<int>(w.head_dim);
  // Causal rows compute the whole products, so all of it counts.
  const double flops = 4.0 * static_cast<double>(w.q_size()) * static_cast<double>(w.kv_len);
  measure(state, kv_bytes(w, MH_DTYPE_F32), nullptr, MH_DTYPE_F32, 1, flops, [&] {
    for (int64_t head = 0; head < w.batch * w.heads; ++head) {
      const int64_t kv_head = head / w.heads * w.kv_heads + head % w.heads / (w.heads / w.kv_heads);
      const float* q = floats(t.q) + head * w.q_len * w.head_dim;
      const float* k = floats(t.k) + kv_head * w.kv_len * w.head_dim;
      const float* v = floats(t.v) + kv_head * w.kv_len * w.head_dim;
      float* out = floats(t.out) + head * w.q_len * w.head_dim;
      cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, rows, keys, dim, 1, q, dim, k, dim, 0, floats(scores), keys);
      cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, rows, dim, keys, 1, floats(scores), keys, v, dim, 0, out,
                  dim);
    }
  });
}
#endif

// --- layers ----------------------------------------------------------------------------------------------------------

// x, the weights as torch.nn.MultiheadAttention has them, out, and what some rows of out should be.
struct layer_arrays {
  layer_arrays(const layer_size& l, int32_t of_dtype)
      : size(l),
        dtype(of_dtype),
        x(dtype, l.x_size()),
        w_in(dtype, 3 * l.width * l.width),
        b_in(dtype, 3 * l.width),
        w_out(dtype, l.width * l.width),
        b_out(dtype, l.width),
        out(dtype, l.x_size()) {
    generator next;
    const float scale = 1 / std::sqrt(static_cast<float>(l.width));
    x.fill([&] { return next(); });
    for (numbers* array : {&w_in, &b_in, &w_out, &b_out}) array->fill([&] { return next() * scale; });
    const exact all{w_in.values(), b_in.values(), w_out.values(), b_out.values()};
    for (const int64_t row : {int64_t{0}, l.tokens / 2, l.tokens - 1}) expected.push_back(reference(row, all));
  }

  struct numbers {
    numbers(int32_t of_dtype, int64_t n)
        : dtype(of_dtype), count(n), memory(static_cast<std::size_t>(n) * mh_dtype_size(of_dtype)) {}
    template <class Next>
    void fill(const Next& next) {
      for (int64_t i = 0; i < count; ++i) elements::store(dtype, memory.data(), i, next());
    }
    double operator[](int64_t i) const { return elements::load(dtype, memory.data(), i); }
    std::vector<double> values() const {
      std::vector<double> all(static_cast<std::size_t>(count));
      for (int64_t i = 0; i < count; ++i) all[static_cast<std::size_t>(i)] = (*this)[i];
      return all;
    }
    const void* data() const { return memory.data(); }
    float* as_floats() const { return reinterpret_cast<float*>(memory.data()); }
    int32_t dtype;
    int64_t count;
    buffer memory;
  };

  struct exact {
    std::vector<double> w_in, b_in, w_out, b_out;
  };
  // Row `i` of the last batch entry in double.
  std::vector<double> reference(int64_t i, const exact& of) const {
    const int64_t n = size.width, dim = n / size.heads, keys = size.causal ? i + 1 : size.tokens;
    const auto row_of_x = [&](int64_t row) {
      std::vector<double> values(static_cast<std::size_t>(n));
      for (int64_t k = 0; k < n; ++k)
        values[static_cast<std::size_t>(k)] = x[((size.batch - 1) * size.tokens + row) * n + k];
      return values;
    };
    // With the n rows of w from `first` on.
    const auto project = [n](const std::vector<double>& from, const std::vector<double>& w,
                             const std::vector<double>& b, int64_t first) {
      std::vector<double> to(static_cast<std::size_t>(n));
      for (int64_t j = 0; j < n; ++j) {
        double sum = b[static_cast<std::size_t>(first + j)];
        const double* const row = w.data() + (first + j) * n;
        for (int64_t k = 0; k < n; ++k) sum += from[static_cast<std::size_t>(k)] * row[k];
        to[static_cast<std::size_t>(j)] = sum;
      }
      return to;
    };
    const std::vector<double> q = project(row_of_x(i), of.w_in, of.b_in, 0);
    std::vector<double> heads(static_cast<std::size_t>(n)), total(static_cast<std::size_t>(size.heads));
    for (int64_t key = 0; key < keys; ++key) {
      const std::vector<double> k = project(row_of_x(key), of.w_in, of.b_in, n);
      const std::vector<double> v = project(row_of_x(key), of.w_in, of.b_in, 2 * n);
      for (int64_t h = 0; h < size.heads; ++h) {
        double score = 0;
        for (int64_t d = 0; d < dim; ++d) {
          score += q[static_cast<std::size_t>(h * dim + d)] * k[static_cast<std::size_t>(h * dim + d)];
        }
        const double weight = std::exp(score / std::sqrt(static_cast<double>(dim)));  // scores are small here
        total[static_cast<std::size_t>(h)] += weight;
        for (int64_t d = 0; d < dim; ++d) {
          heads[static_cast<std::size_t>(h * dim + d)] += weight * v[static_cast<std::size_t>(h * dim + d)];
        }
      }
    }
    for (int64_t d = 0; d < n; ++d) heads[static_cast<std::size_t>(d)] /= total[static_cast<std::size_t>(d / dim)];
    return project(heads, of.w_out, of.b_out, 0);
  }

  bool right() const {
    const int64_t entry = (size.batch - 1) * size.tokens * size.width;
    std::size_t sample = 0;
    for (const int64_t row : {int64_t{0}, size.tokens / 2, size.tokens - 1}) {
      for (int64_t d = 0; d < size.width; ++d) {
        const double want = expected[sample][static_cast<std::size_t>(d)];
        const double got = out[entry + row * size.width + d];
        if (!(std::abs(got - want) <= tolerance(dtype) * (1 + std::abs(want)))) return false;
      }
      ++sample;
    }
    return true;
  }

  layer_size size;
  int32_t dtype;
  numbers x, w_in, b_in, w_out, b_out, out;
  std::vector<std::vector<double>> expected;
};

layer_arrays& arrays_of(const layer_size& l, int32_t dtype) {
  static std::unique_ptr<layer_arrays> kept;
  if (!kept || kept->size.name != l.name || kept->dtype != dtype) {
    kept.reset();
    kept = std::make_unique<layer_arrays>(l, dtype);
  }
  return *kept;
}

void run_layer(benchmark::State& state, const layer_size& l, int32_t dtype, const char* isa, int threads) {
  layer_arrays& a = arrays_of(l, dtype);
  mh_mha_weights weights{};
  weights.struct_size = sizeof weights;
  weights.dtype = dtype;
  weights.embed_dim = l.width;
  weights.heads = l.heads;
  weights.in_proj = a.w_in.data();
  weights.in_proj_bias = a.b_in.data();
  weights.w_o = a.w_out.data();
  weights.b_o = a.b_out.data();
  mh_mha* layer = nullptr;
  if (mh_set_isa(isa) != MH_OK || mh_mha_create(&weights, &layer) != MH_OK) return state.SkipWithError(mh_last_error());
  const std::unique_ptr<mh_mha, void (*)(mh_mha*)> owner(layer, mh_mha_destroy);
  mh_mha_call call{};
  call.struct_size = sizeof call;
  call.batch = l.batch;
  call.q_len = call.kv_len = l.tokens;
  call.causal = l.causal ? 1 : 0;
  call.x_q = a.x.data();
  call.out = a.out.memory.data();
  mh_exec exec{};
  exec.struct_size = sizeof exec;
  exec.threads = threads;
  std::memset(a.out.memory.data(), 0xff, a.out.memory.size());  // NaN
  if (mh_mha_run(layer, &call, &exec) != MH_OK) return state.SkipWithError(mh_last_error());
  if (!a.right()) return state.SkipWithError("wrong result");
  measure(state, l.weight_bytes(dtype), isa, dtype, threads, l.flops(),
          [&] { benchmark::DoNotOptimize(mh_mha_run(layer, &call, &exec)); });
}

#if MH_WITH_BLAS
// A gemv for each of few rows: OpenBLAS packs the weights in every gemm.
void run_bare_layer(benchmark::State& state, const layer_size& l) {
  openblas_set_num_threads(1);
  layer_arrays& a = arrays_of(l, MH_DTYPE_F32);
  layer_arrays::numbers projected(MH_DTYPE_F32, 3 * l.x_size());
  const int rows = static_cast<int>(l.batch * l.tokens), n = static_cast<int>(l.width);
  const auto multiply = [rows, n](int out, const float* x, const float* w, float* y) {
    if (rows > 4) {
      cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, rows, out, n, 1, x, n, w, n, 0, y, out);
    } else {
      for (int i = 0; i < rows; ++i) {
        cblas_sgemv(CblasRowMajor, CblasNoTrans, out, n, 1, w, n, x + i * n, 1, 0, y + i * out, 1);
      }
    }
  };
  const double flops = 8.0 * static_cast<double>(l.x_size() * l.width);
  measure(state, l.weight_bytes(MH_DTYPE_F32), nullptr, MH_DTYPE_F32, 1, flops, [&] {
    multiply(3 * n, a.x.as_floats(), a.w_in.as_floats(), projected.as_floats());
    multiply(n, a.x.as_floats(), a.w_out.as_floats(), a.out.as_floats());
  });
}
#endif

// The plan that the library makes for a workload on an instruction set, and the name of the kernel it chose.
bool make_row(const workload& w, int32_t dtype, const char* isa, row& r, std::string& kernel) {
  mh_problem problem{};
  problem.struct_size = sizeof problem;
  problem.batch = w.batch;
  problem.heads = w.heads;
  problem.kv_heads = w.kv_heads;
  problem.q_len = w.q_len;
  problem.kv_len = w.kv_len;
  problem.head_dim = w.head_dim;
  problem.dtype = dtype;
  problem.causal = w.causal ? 1 : 0;
  mh_plan* plan = nullptr;
  std::array<char, 4096> text{};
  if (mh_set_isa(isa) != MH_OK || mh_plan_create(&problem, &plan) != MH_OK) return false;
  r = {w, dtype, isa, std::unique_ptr<mh_plan, plan_deleter>(plan)};
  if (mh_plan_describe(plan, MH_FORMAT_JSON, text.data(), text.size(), nullptr) != MH_OK) return false;
  const std::string json = text.data(), mark = "\"kernel\": \"";
  const std::size_t from = json.find(mark);
  if (from == std::string::npos) return false;
  kernel = json.substr(from + mark.size(), json.find('"', from + mark.size()) - from - mark.size());
  return true;
}

}  // namespace

int main(int argc, char** argv) {
#if MH_WITH_BLAS
  openblas_core::start_with_best(argv);
#endif
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  const std::vector<workload> workloads = read_rows<workload>(MH_WORKLOADS_FILE);
  const std::vector<layer_size> layers = read_rows<layer_size>(MH_LAYERS_FILE);
  if (workloads.empty() || layers.empty()) {
    std::cerr << "bench: nothing in " << MH_WORKLOADS_FILE << " or " << MH_LAYERS_FILE << "\n";
    return 1;
  }
  std::vector<int> thread_counts = {1};
  if (mh_threads() > 1) thread_counts.push_back(mh_threads());

  const auto add = [](const std::string& name, auto run) {
    benchmark::RegisterBenchmark(name.c_str(), run)->UseRealTime()->Unit(benchmark::kMicrosecond);
  };
  for (const workload& w : workloads) {
    for (int32_t dtype = 0; dtype < mh_dtype_count(); ++dtype) {
      for (int32_t isa = 0; isa < mh_isa_count(); ++isa) {
        if (!mh_isa_supported(isa)) continue;
        auto r = std::make_shared<row>();
        std::string kernel;
        if (!make_row(w, dtype, mh_isa_name(isa), *r, kernel)) {
          std::cerr << "bench: no plan for " << w.name << " in " << mh_dtype_name(dtype) << " on " << mh_isa_name(isa)
                    << ": " << mh_last_error() << "\n";
          return 1;
        }
        for (int threads : thread_counts) {
          const std::string name = kernel + "/" + w.name + "/threads:" + std::to_string(threads);
          add(name, [r, threads](benchmark::State& s) { run_attention(s, *r, threads); });
        }
      }
#if MH_WITH_BLAS
      if (dtype == MH_DTYPE_F32 && w.q_len > 1) {
        add("bare/f32/openblas/" + w.name + "/threads:1", [w](benchmark::State& s) { run_bare_products(s, w); });
      }
#endif
    }
  }
  for (const layer_size& l : layers) {
    for (int32_t isa = 0; isa < mh_isa_count(); ++isa) {
      if (!mh_isa_supported(isa)) continue;
      const char* name = mh_isa_name(isa);
      for (int32_t dtype = 0; dtype < mh_dtype_count(); ++dtype) {
        for (int threads : thread_counts) {
          const std::string type = mh_dtype_name(dtype);
          add("layer/" + type + "/" + name + "/" + l.name + "/threads:" + std::to_string(threads),
              [l, dtype, name, threads](benchmark::State& s) { run_layer(s, l, dtype, name, threads); });
        }
      }
    }
#if MH_WITH_BLAS
    add("bare/f32/openblas/" + l.name + "/threads:1", [l](benchmark::State& s) { run_bare_layer(s, l); });
#endif
  }
  std::array<char, 4096> machine{};
  if (mh_machine_describe(machine.data(), machine.size(), nullptr) == MH_OK) {
    benchmark::AddCustomContext("machine", machine.data());
  }
  benchmark::AddCustomContext("manyhead", mh_version());
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
}
