// See probe.hpp. Probes have threads of their own: those of a host's pool need not run at the same time.
#include "probe.hpp"

#include <algorithm>
#include <atomic>
#include <barrier>
#include <chrono>
#include <cstring>
#include <memory>
#include <numeric>
#include <system_error>
#include <thread>
#include <vector>

#include "check.hpp"
#include "memory.hpp"

namespace manyhead {
namespace {

using steady = std::chrono::steady_clock;

double seconds_since(steady::time_point start) { return std::chrono::duration<double>(steady::now() - start).count(); }

// Results go here, so that no compiler leaves out what computes them.
std::atomic<double> number_sink;
std::atomic<uint64_t> word_sink;

// The sum of the rates of all threads; each does make_work(thread)(), worth `amount`, until its time is over.
template <class MakeWork>
double total_rate(int32_t threads, double amount, double seconds, MakeWork make_work) {
  std::barrier start(threads);
  std::vector<double> rates(static_cast<size_t>(threads));
  const auto body = [&](int32_t thread) {
    const auto work = make_work(thread);
    work();  // brings code and data close
    start.arrive_and_wait();
    const auto begin = steady::now();
    double done = 0, elapsed = 0;
    do {
      work();
      done += amount;
      elapsed = seconds_since(begin);
    } while (elapsed < seconds);
    rates[static_cast<size_t>(thread)] = done / elapsed;
  };
  std::vector<std::jthread> others;
  others.reserve(static_cast<size_t>(threads));
  try {
    for (int32_t thread = 1; thread < threads; ++thread) others.emplace_back(body, thread);
  } catch (const std::exception&) {  // of the system, or for want of memory; those that have begun wait for the others
    for (auto missing = static_cast<size_t>(threads) - others.size(); missing > 0; --missing) start.arrive_and_drop();
    fail(MH_OUT_OF_MEMORY, "the system gives no more than ", others.size() + 1, " of ", threads, " threads");
  }
  body(0);
  others.clear();  // joins
  return std::accumulate(rates.begin(), rates.end(), 0.0);
}

}  // namespace

double arithmetic_rate(const kernel_table& table, int32_t dtype, int32_t threads, double seconds) {
  const dtype_kernels& kernels = table.dtype[dtype];
  // As many turns as take some 10 microseconds: what a call does besides, and a look at the clock, count for nothing then.
  int64_t turns = 64;
  for (double elapsed = 0; elapsed < 1e-5; turns *= 2) {
    const auto begin = steady::now();
    number_sink.store(kernels.arithmetic(turns), std::memory_order_relaxed);
    elapsed = seconds_since(begin);
  }
  return total_rate(threads, static_cast<double>(turns * kernels.flops_of_turn), seconds, [&](int32_t) {
    return [&kernels, turns] { number_sink.store(kernels.arithmetic(turns), std::memory_order_relaxed); };
  });
}

double read_rate(const kernel_table& table, int64_t bytes, int32_t threads, double seconds) {
  constexpr int64_t step = 512;  // kernel_api.hpp: read_fn
  const int64_t part = std::max<int64_t>(bytes / threads / step, 1) * step;
  // Small parts are read several times between two looks at the clock.
  const int64_t repeats = std::max<int64_t>(1, (int64_t{1} << 18) / part);
  std::vector<std::unique_ptr<void, void (*)(void*)>> parts;
  parts.reserve(static_cast<size_t>(threads));
  for (int32_t thread = 0; thread < threads; ++thread) parts.emplace_back(allocate(static_cast<size_t>(part)), release);
  return total_rate(threads, static_cast<double>(part * repeats), seconds, [&](int32_t thread) {
    const void* memory = parts[static_cast<size_t>(thread)].get();
    // First touched by the thread that reads it: so it lies in that thread's memory where there are several.
    std::memset(parts[static_cast<size_t>(thread)].get(), 1, static_cast<size_t>(part));
    return [&table, part, repeats, memory] {
      for (int64_t i = 0; i < repeats; ++i) word_sink.store(table.read(memory, part), std::memory_order_relaxed);
    };
  });
}

double clock_rate(double seconds) {
  // Each addition waits for the one before, and takes a cycle on every CPU that the library has kernels for. Of a register:
  // some CPUs add several constants at once.
  constexpr int64_t turns = 1000, additions = 16;
  return total_rate(1, static_cast<double>(turns * additions), seconds, [](int32_t) {
    return [] {
      uint64_t sum = 1, one = 1;
      for (int64_t i = 0; i < turns; ++i) {
#if defined(__x86_64__)
#define MH_ADD "addq %1, %0\n\t"
#elif defined(__aarch64__)
#define MH_ADD "add %0, %0, %1\n\t"
#endif
        asm volatile(MH_ADD MH_ADD MH_ADD MH_ADD MH_ADD MH_ADD MH_ADD MH_ADD MH_ADD MH_ADD MH_ADD MH_ADD MH_ADD MH_ADD
                         MH_ADD MH_ADD
                     : "+r"(sum)
                     : "r"(one));
#undef MH_ADD
      }
      word_sink.store(sum, std::memory_order_relaxed);
    };
  });
}

}  // namespace manyhead
