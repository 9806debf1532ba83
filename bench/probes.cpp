#include "probes.hpp"

#include <algorithm>
#include <barrier>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <numeric>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace probes {
namespace {

using clock = std::chrono::steady_clock;

double seconds_since(clock::time_point start) { return std::chrono::duration<double>(clock::now() - start).count(); }

volatile float float_sink;
volatile long long integer_sink;

// Twelve chains hide the latency of a fused multiply-add on every x86 CPU (4 cycles, 2 units) and leave 16 registers
// enough for the two constants. AArch64 has up to 4 units and 32 registers: sixteen chains.
#if defined(__aarch64__)
#define MH_CHAINS(STEP) \
  STEP(0)               \
  STEP(1)               \
  STEP(2) STEP(3) STEP(4) STEP(5) STEP(6) STEP(7) STEP(8) STEP(9) STEP(10) STEP(11) STEP(12) STEP(13) STEP(14) STEP(15)
constexpr int chains = 16;
#else
#define MH_CHAINS(STEP) \
  STEP(0) STEP(1) STEP(2) STEP(3) STEP(4) STEP(5) STEP(6) STEP(7) STEP(8) STEP(9) STEP(10) STEP(11)
constexpr int chains = 12;
#endif

constexpr std::size_t read_step = 8 * 64;  // bytes of one turn of the widest read loop

// The two loops, once per instruction set: written with the compiler's vectors, so that a target attribute is all that
// differs. The values stay finite, a = 0.5 a + 1 tends to 2, and start at one that the compiler cannot know.
#define MH_DECLARE(i) vec a##i = vec{} + static_cast<float>(turns + i);
#define MH_MULTIPLY_ADD(i) a##i = a##i * x + y;
#define MH_ADD_UP(i) total += a##i;
#define MH_PROBE(isa, target, vector_bytes)                                      \
  target void fma_##isa(std::int64_t turns) {                                    \
    typedef float vec __attribute__((vector_size(vector_bytes)));                \
    const vec x = vec{} + 0.5f, y = vec{} + 1.0f;                                \
    MH_CHAINS(MH_DECLARE)                                                        \
    for (std::int64_t turn = 0; turn < turns; ++turn) {                          \
      MH_CHAINS(MH_MULTIPLY_ADD)                                                 \
    }                                                                            \
    vec total = vec{};                                                           \
    MH_CHAINS(MH_ADD_UP)                                                         \
    float_sink = total[0];                                                       \
  }                                                                              \
  target void read_##isa(const std::byte* data, std::size_t bytes) {             \
    typedef long long vec __attribute__((vector_size(vector_bytes), may_alias)); \
    const vec* from = reinterpret_cast<const vec*>(data);                        \
    vec a = vec{}, b = vec{}, c = vec{}, d = vec{};                              \
    vec e = vec{}, f = vec{}, g = vec{}, h = vec{};                              \
    for (const vec* end = from + bytes / vector_bytes; from < end; from += 8) {  \
      a ^= from[0], b ^= from[1], c ^= from[2], d ^= from[3];                    \
      e ^= from[4], f ^= from[5], g ^= from[6], h ^= from[7];                    \
    }                                                                            \
    const vec all = a ^ b ^ c ^ d ^ e ^ f ^ g ^ h;                               \
    integer_sink = all[0];                                                       \
  }

#if defined(__x86_64__)
MH_PROBE(avx512, __attribute__((target("avx512f"))), 64)
MH_PROBE(avx2, __attribute__((target("avx2,fma"))), 32)
MH_PROBE(sse2, , 16)
#elif defined(__aarch64__)
MH_PROBE(neon, , 16)
#endif

struct kernel {
  std::string_view isa;
  bool supported;
  int lanes;  // floats
  void (*fma)(std::int64_t turns);
  void (*read)(const std::byte* data, std::size_t bytes);
};

// Best first.
const std::vector<kernel>& kernels() {
  static const std::vector<kernel> all = {
#if defined(__x86_64__)
      {"avx512", __builtin_cpu_supports("avx512f") != 0, 16, fma_avx512, read_avx512},
      {"avx2", __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("fma") != 0, 8, fma_avx2, read_avx2},
      {"sse2", true, 4, fma_sse2, read_sse2},
#elif defined(__aarch64__)
      {"neon", true, 4, fma_neon, read_neon},
#endif
  };
  return all;
}

const kernel* best() {
  const auto found = std::find_if(kernels().begin(), kernels().end(), [](const kernel& k) { return k.supported; });
  return found == kernels().end() ? nullptr : &*found;
}

// The sum of the rates of all threads; each does work(thread), worth `amount`, until its time is over.
template <class Work>
double total_rate(int threads, double amount, double seconds, Work work) {
  std::barrier start(threads);
  std::vector<double> rates(static_cast<std::size_t>(threads));
  const auto body = [&](int thread) {
    work(thread);  // brings code and data close
    start.arrive_and_wait();
    const auto begin = clock::now();
    double done = 0, elapsed = 0;
    do {
      work(thread);
      done += amount;
      elapsed = seconds_since(begin);
    } while (elapsed < seconds);
    rates[static_cast<std::size_t>(thread)] = done / elapsed;
  };
  std::vector<std::jthread> others;
  for (int thread = 1; thread < threads; ++thread) others.emplace_back(body, thread);
  body(0);
  others.clear();  // joins
  return std::accumulate(rates.begin(), rates.end(), 0.0);
}

}  // namespace

std::string_view best_isa() { return best() ? best()->isa : std::string_view{}; }

double fma_rate(std::string_view isa, int threads, double seconds) {
  for (const kernel& k : kernels()) {
    if (k.isa != isa || !k.supported) continue;
    constexpr std::int64_t turns = 4096;  // some 10 microseconds
    return total_rate(threads, 2.0 * chains * k.lanes * turns, seconds, [&](int) { k.fma(turns); });
  }
  return 0;
}

double read_rate(std::size_t bytes, int threads, double seconds) {
  const kernel* k = best();
  if (!k) return 0;
  const std::size_t parts = static_cast<std::size_t>(threads);
  const std::size_t part = std::max(bytes / parts / read_step, std::size_t{1}) * read_step;
  // Kept between calls: filling a large buffer takes longer than reading it.
  static std::unique_ptr<buffer> kept;
  if (!kept || kept->size() != part * parts) {
    kept.reset();
    kept = std::make_unique<buffer>(part * parts);
    std::memset(kept->data(), 1, kept->size());
  }
  // Small parts are read several times between two looks at the clock.
  const std::size_t repeats = std::max(std::size_t{1}, (std::size_t{1} << 18) / part);
  return total_rate(threads, static_cast<double>(part * repeats), seconds, [&](int thread) {
    const std::byte* from = kept->data() + static_cast<std::size_t>(thread) * part;
    for (std::size_t i = 0; i < repeats; ++i) k->read(from, part);
  });
}

buffer::buffer(std::size_t bytes) : size_(bytes) {
  constexpr std::size_t huge_page = std::size_t{1} << 21;
  const bool large = bytes >= 2 * huge_page;
  const std::size_t alignment = large ? huge_page : 64;
  data_ = static_cast<std::byte*>(::operator new(bytes, std::align_val_t{alignment}));
#if defined(__linux__)
  if (large) madvise(data_, bytes, MADV_HUGEPAGE);
#endif
}

buffer::~buffer() {
  const std::size_t huge_page = std::size_t{1} << 21;
  ::operator delete(data_, std::align_val_t{size_ >= 2 * huge_page ? huge_page : 64});
}

}  // namespace probes
