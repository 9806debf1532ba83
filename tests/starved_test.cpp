// A process that gets no threads, or no memory at one moment: calls still give the right bits, or say MH_OUT_OF_MEMORY
// and have written nothing, and later ones work. The functions by which all get threads and memory are replaced here.
#include <doctest/doctest.h>

#include <dlfcn.h>
#include <malloc.h>
#include <pthread.h>
#include <atomic>
#include <cerrno>

#include "calls.hpp"
#include "own_process.hpp"

namespace {

std::atomic<bool> threads_are_refused{false};

// The allocation that fails, counted from the moment this is set; 0 = none.
std::atomic<int64_t> refused_allocation{0}, allocations{0};

bool is_refused() noexcept {
  const int64_t refused = refused_allocation.load(std::memory_order_relaxed);
  if (refused == 0 || allocations.fetch_add(1) + 1 != refused) return false;
  errno = ENOMEM;
  return true;
}

}  // namespace

#define MH_REPLACED __attribute__((visibility("default")))
extern "C" {
void* __libc_malloc(size_t size) noexcept;
void* __libc_calloc(size_t count, size_t size) noexcept;
void* __libc_realloc(void* old, size_t size) noexcept;
void* __libc_memalign(size_t alignment, size_t size) noexcept;

MH_REPLACED void* malloc(size_t size) noexcept { return is_refused() ? nullptr : __libc_malloc(size); }
MH_REPLACED void* calloc(size_t count, size_t size) noexcept {
  return is_refused() ? nullptr : __libc_calloc(count, size);
}
MH_REPLACED void* realloc(void* old, size_t size) noexcept {
  return is_refused() ? nullptr : __libc_realloc(old, size);
}
MH_REPLACED void* aligned_alloc(size_t alignment, size_t size) noexcept {
  return is_refused() ? nullptr : __libc_memalign(alignment, size);
}
MH_REPLACED void* memalign(size_t alignment, size_t size) noexcept { return aligned_alloc(alignment, size); }
MH_REPLACED int posix_memalign(void** to, size_t alignment, size_t size) noexcept {
  void* const memory = aligned_alloc(alignment, size);
  if (memory == nullptr) return ENOMEM;
  *to = memory;
  return 0;
}

MH_REPLACED int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*start)(void*),
                               void* arg) noexcept {
  using function = decltype(&pthread_create);
  static const auto real = reinterpret_cast<function>(dlsym(RTLD_NEXT, "pthread_create"));
  return threads_are_refused.load() ? EAGAIN : real(thread, attributes, start, arg);
}
}

using namespace manyhead;
using namespace manyhead::test;

namespace {

constexpr char large[] = "f32 b2 h4 q64 kv256 d64";
constexpr char split_keys[] = "f32 b1 h2 q1 kv8192 d64";
constexpr char none_failed[] = "none failed";

// experiment(n), in processes of their own, with n = 1, 2 ... until it says that allocation n was never asked for. How
// many allocations failed; -1 and a message where one was not borne.
template <class Experiment>
int64_t starve(Experiment experiment) {
  for (int64_t n = 1; n < 5000; ++n) {
    const std::string said = in_child([&] { experiment(n); });
    if (said.find(none_failed) == 0) return n - 1;
    if (said.empty()) continue;
    MESSAGE("without allocation ", n, ": ", said);
    return -1;
  }
  return -1;
}

// What `function` returns while allocation n of this process, counted from here, fails.
template <class Function>
auto without(int64_t n, Function&& function) {
  allocations.store(0);
  refused_allocation.store(n);
  const auto result = function();
  refused_allocation.store(0);
  return result;
}
void tell_if_none_failed(int64_t n) { expect(allocations.load() >= n, none_failed); }

// A host's pool without threads: what runs on it allocates nothing but what the library does.
mh_exec on_host(int32_t threads) {
  mh_exec exec = with_threads(threads);
  exec.parallel_for = [](void*, int64_t n, mh_task_fn fn, void* arg) {
    for (int64_t i = 0; i < n; ++i) fn(arg, i);
  };
  return exec;
}

void starve_layer(int32_t isa, int32_t dtype, layer_call::wants what, int32_t threads) {
  CAPTURE(isa);
  CAPTURE(dtype);
  CAPTURE(what == layer_call::wants::weights);
  CAPTURE(threads);
  constexpr int64_t few = 3, many = 80;
  const auto experiment = [=](int64_t n) {
    expect(mh_isa_supported(isa) != 0, none_failed);
    check(mh_set_isa(mh_isa_name(isa)));
    const layer_call layer(dtype, many, what);
    const mh_exec exec = on_host(threads);
    layer.result(few, exec);  // has all that is made once, but memory for few rows only
    layer_call::results results = layer.untouched(many);
    const mh_status status = without(n, [&] { return layer.run(many, results, exec); });
    expect(status == MH_OK || status == MH_OUT_OF_MEMORY, mh_status_name(status));
    const layer_call::results wanted = layer.result(many, exec), untouched = layer.untouched(many);
    const layer_call::results& right = status == MH_OK ? wanted : untouched;
    expect(same_bits(results.out, right.out), std::string(mh_status_name(status)) + " and another out");
    expect(same_bits(results.weights, right.weights), std::string(mh_status_name(status)) + " and other weights");
    tell_if_none_failed(n);
  };
  REQUIRE(starve(experiment) >= 0);  // the others would only fail as well
}

}  // namespace

TEST_CASE("no thread is to be had") {
  for (const bool from_the_first_call : {true, false}) {
    for (const int32_t threads : {2, 0}) {
      CAPTURE(from_the_first_call);
      CAPTURE(threads);
      const auto experiment = [&] {
        attention_call whole(large), split(split_keys);
        const layer_call layer(MH_DTYPE_F32, 96);
        const std::vector<char> wanted = whole.result(with_threads(1)), wanted_split = split.result(with_threads(1));
        const std::vector<char> wanted_layer = layer.result(96, with_threads(1)).out;
        const mh_exec exec = with_threads(threads);
        const auto call = [&](const char* when) {
          for (int i = 0; i < 20; ++i) {
            expect(same_bits(whole.result(exec), wanted), std::string("another result ") + when);
            expect(same_bits(split.result(exec), wanted_split), std::string("another result of split keys ") + when);
            expect(same_bits(layer.result(96, exec).out, wanted_layer),
                   std::string("another result of a layer ") + when);
          }
        };
        if (!from_the_first_call) call("before");
        threads_are_refused.store(true);
        call("without threads");
        threads_are_refused.store(false);
        call("after");
      };
      CHECK(in_child(experiment) == "");
    }
  }
}

TEST_CASE("no memory in the first call of a process") {
  const auto later_calls = [] {
    attention_call call(large);
    const std::vector<char> serial = call.result(with_threads(1));
    expect(same_bits(call.result(), serial), "another result on two threads");
  };
  const auto name = [&](int64_t n) {
    const char* const first = without(n, [] { return mh_isa_name(0); });
    const char* const later = mh_isa_name(0);
    expect(later != nullptr && (first == nullptr || first == std::string(later)), "another name later");
    later_calls();
    tell_if_none_failed(n);
  };
  const auto supported = [&](int64_t n) {
    const int32_t last = mh_isa_count() - 1;  // any CPU's
    const int32_t first = without(n, [last] { return mh_isa_supported(last); });
    expect(first == 0 || first == 1, "neither 0 nor 1");
    expect(mh_isa_supported(last) == 1, "it is not supported later");
    later_calls();
    tell_if_none_failed(n);
  };
  CHECK(starve(name) > 0);
  CHECK(starve(supported) > 0);
}

TEST_CASE("no memory for a probe's threads") {
  for (const bool reads : {false, true}) {
    CAPTURE(reads);
    const auto experiment = [reads](int64_t n) {
      double rate = 0;
      const auto probe = [&] {
        return reads ? mh_probe_read(nullptr, 1 << 16, 3, 1e-4, &rate)
                     : mh_probe_arithmetic(nullptr, MH_DTYPE_F32, 3, 1e-4, &rate);
      };
      expect(mh_isa_current() != nullptr, "there is no instruction set");
      const mh_status status = without(n, probe);
      expect(status == MH_OK || status == MH_OUT_OF_MEMORY, mh_status_name(status));
      check(probe());
      expect(rate > 0, "no rate");
      tell_if_none_failed(n);
    };
    CHECK(starve(experiment) > 0);
  }
}

TEST_CASE("no memory in a call of the layer: it is refused before anything is written") {
  for (int32_t isa = 0; isa < mh_isa_count(); ++isa) {
    for (const int32_t dtype : {MH_DTYPE_F32, MH_DTYPE_BF16, MH_DTYPE_F16}) {
      for (const int32_t threads : {1, 2}) {
        starve_layer(isa, dtype, layer_call::wants::weights, threads);
        starve_layer(isa, dtype, layer_call::wants::mean_weights, threads);
      }
    }
  }
}

#if __GLIBC_PREREQ(2, 33)
TEST_CASE("calls that are refused again and again, as MH_PROFILE cannot be written, keep no memory") {
  const auto experiment = [] {
    setenv("MH_PROFILE", "/no such folder/profile", 1);
    attention_call call("f32 b1 h1 q4 kv16 d16");
    const auto refused = [&](int times) {
      for (int i = 0; i < times; ++i) {
        expect(call.run() == MH_INVALID_ARGUMENT && std::strstr(mh_last_error(), "MH_PROFILE") != nullptr,
               "it was not refused");
      }
      const struct mallinfo2 info = mallinfo2();
      return info.uordblks + info.hblkhd;
    };
    const size_t before = refused(100), after = refused(20000);
    expect(after < before + 100'000, std::to_string(after - before) + " bytes more");
  };
  CHECK(in_child(experiment) == "");
}
#endif
