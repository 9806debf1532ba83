// Times the kernels through the C interface: one row for every workload of workloads.txt, instruction set and dtype,
// on one thread and on all. A row is called attention/<dtype>/<route>@<isa>/<workload>/threads:<n>; the part before the
// workload is what the plan says it runs, so a row cannot bear the name of a kernel that it did not time. Before it is
// timed, a row's result is compared with plain attention in double. Rows bare/f32/openblas/<workload> are OpenBLAS on
// the two products of attention alone, without softmax.
#include <benchmark/benchmark.h>
#include <manyhead/manyhead.h>

#include <algorithm>
#include <array>
#include <bit>
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

#include "probes.hpp"

#if MH_WITH_BLAS
#include <cblas.h>
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

std::vector<workload> read_workloads() {
  std::ifstream file(MH_WORKLOADS_FILE);
  std::vector<workload> all;
  for (std::string line; std::getline(file, line);) {
    if (line.empty() || line[0] == '#') continue;
    workload w;
    std::istringstream words(line);
    if (words >> w.name >> w.batch >> w.heads >> w.kv_heads >> w.q_len >> w.kv_len >> w.head_dim >> w.causal) {
      all.push_back(w);
    }
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

// To 16 bits by dropping the lower bits of the fraction; an input needs no better rounding.
uint16_t to_bf16(float x) { return static_cast<uint16_t>(std::bit_cast<uint32_t>(x) >> 16); }
uint16_t to_f16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const int32_t exponent = static_cast<int32_t>((bits >> 23) & 0xff) - 112;
  if (exponent <= 0) return 0;
  return static_cast<uint16_t>((bits >> 16 & 0x8000) | static_cast<uint32_t>(exponent) << 10 | (bits >> 13 & 0x3ff));
}

void store(int32_t dtype, std::byte* array, int64_t i, float x) {
  const auto put = [&](auto value) {
    std::memcpy(array + i * static_cast<int64_t>(sizeof value), &value, sizeof value);
  };
  switch (dtype) {
    case MH_DTYPE_F64:
      return put(static_cast<double>(x));
    case MH_DTYPE_BF16:
      return put(to_bf16(x));
    case MH_DTYPE_F16:
      return put(to_f16(x));
    default:
      return put(x);
  }
}

double load(int32_t dtype, const std::byte* array, int64_t i) {
  const auto get = [&](auto value) {
    std::memcpy(&value, array + i * static_cast<int64_t>(sizeof value), sizeof value);
    return value;
  };
  switch (dtype) {
    case MH_DTYPE_F64:
      return get(double{});
    case MH_DTYPE_BF16:
      return std::bit_cast<float>(static_cast<uint32_t>(get(uint16_t{})) << 16);
    case MH_DTYPE_F16: {
      const uint16_t bits = get(uint16_t{});
      const double fraction = bits & 0x3ff;
      const int exponent = bits >> 10 & 0x1f;
      const double size = exponent ? std::ldexp(1024 + fraction, exponent - 25) : std::ldexp(fraction, -24);
      return bits & 0x8000 ? -size : size;
    }
    default:
      return get(float{});
  }
}

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
    for (int64_t i = 0; i < w.q_size(); ++i) store(dtype, q.data(), i, next());
    for (int64_t i = 0; i < w.kv_size(); ++i) store(dtype, k.data(), i, next());
    for (int64_t i = 0; i < w.kv_size(); ++i) store(dtype, v.data(), i, next());
    std::memset(out.data(), 0xff, out.size());
  }

  std::size_t bytes(int64_t elements) const { return static_cast<std::size_t>(elements) * mh_dtype_size(dtype); }

  std::string name;
  int32_t dtype;
  probes::buffer q, k, v, out;
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
        dot += load(t.dtype, t.q.data(), row + d) * load(t.dtype, t.k.data(), kv + j * w.head_dim + d);
      }
      weights[static_cast<std::size_t>(j)] = dot / std::sqrt(static_cast<double>(w.head_dim));
    }
    const double top = *std::max_element(weights.begin(), weights.end());
    double total = 0;
    for (int64_t j = 0; j < keys; ++j) {
      const double weight = std::exp(weights[static_cast<std::size_t>(j)] - top);
      total += weight;
      for (int64_t d = 0; d < w.head_dim; ++d) {
        sum[static_cast<std::size_t>(d)] += weight * load(t.dtype, t.v.data(), kv + j * w.head_dim + d);
      }
    }
    for (int64_t d = 0; d < w.head_dim; ++d) {
      const double expected = sum[static_cast<std::size_t>(d)] / total;
      const double excess =
          std::abs(load(t.dtype, t.out.data(), row + d) - expected) - tolerance(t.dtype) * (1 + std::abs(expected));
      worst = std::isnan(excess) ? 1e30 : std::max(worst, excess);
    }
  }
  return worst;
}

// --- measuring -------------------------------------------------------------------------------------------------------

// Runs the benchmark loop between two looks at what the machine can do now, and reports the rates and their shares.
template <class Run>
void measure(benchmark::State& state, const workload& w, std::string_view isa, int32_t dtype, int threads, double flops,
             Run run) {
  const double kv_bytes = 2.0 * static_cast<double>(w.kv_size()) * static_cast<double>(mh_dtype_size(dtype));
  const auto fma_now = [&] {  // half as many doubles as floats fit a vector
    return probes::fma_rate(isa, threads, probe_seconds) / (dtype == MH_DTYPE_F64 ? 2 : 1);
  };
  const auto read_now = [&] { return probes::read_rate(static_cast<std::size_t>(kv_bytes), threads, probe_seconds); };
  double fma = fma_now(), read = read_now();
  const auto start = std::chrono::steady_clock::now();
  for (auto _ : state) run();
  const double elapsed = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  fma = std::max(fma, fma_now());
  read = std::max(read, read_now());

  const double calls_per_second = static_cast<double>(state.iterations()) / elapsed;
  state.counters["FLOP/s"] = flops * calls_per_second;
  state.counters["bytes/s"] = kv_bytes * calls_per_second;  // of K and V, each read once
  state.counters["FMA_peak"] = fma;
  state.counters["read_peak"] = read;
  if (fma > 0) state.counters["of_FMA"] = flops * calls_per_second / fma;
  if (read > 0) state.counters["of_read"] = kv_bytes * calls_per_second / read;
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
  measure(state, r.w, r.isa, r.dtype, threads, r.w.flops(),
          [&] { benchmark::DoNotOptimize(mh_plan_run(r.plan.get(), &pointers, &exec)); });
}

#if MH_WITH_BLAS
void run_bare_products(benchmark::State& state, const workload& w) {
  openblas_set_num_threads(1);
  tensors& t = tensors_of(w, MH_DTYPE_F32);
  probes::buffer scores(static_cast<std::size_t>(w.q_len * w.kv_len) * sizeof(float));
  const auto floats = [](const probes::buffer& b) { return reinterpret_cast<float*>(b.data()); };
  const int rows = static_cast<int>(w.q_len), keys = static_cast<int>(w.kv_len), dim = static_cast<int>(w.head_dim);
  // Causal rows compute the whole products, so all of it counts.
  const double flops = 4.0 * static_cast<double>(w.q_size()) * static_cast<double>(w.kv_len);
  measure(state, w, probes::best_isa(), MH_DTYPE_F32, 1, flops, [&] {
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
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  const std::vector<workload> workloads = read_workloads();
  if (workloads.empty()) {
    std::cerr << "bench: no workloads in " << MH_WORKLOADS_FILE << "\n";
    return 1;
  }
  std::vector<int> thread_counts = {1};
  if (mh_threads() > 1) thread_counts.push_back(mh_threads());

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
          benchmark::RegisterBenchmark(name.c_str(),
                                       [r, threads](benchmark::State& s) { run_attention(s, *r, threads); })
              ->UseRealTime()
              ->Unit(benchmark::kMicrosecond);
        }
      }
#if MH_WITH_BLAS
      if (dtype == MH_DTYPE_F32 && w.q_len > 1) {
        benchmark::RegisterBenchmark(("bare/f32/openblas/" + w.name + "/threads:1").c_str(),
                                     [w](benchmark::State& s) { run_bare_products(s, w); })
            ->UseRealTime()
            ->Unit(benchmark::kMicrosecond);
      }
#endif
    }
  }
  std::array<char, 4096> machine{};
  if (mh_machine_describe(machine.data(), machine.size(), nullptr) == MH_OK) {
    benchmark::AddCustomContext("machine", machine.data());
  }
  benchmark::AddCustomContext("manyhead", mh_version());
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
}
