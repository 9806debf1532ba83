// The C border: every function of manyhead.h. Each reads the caller's structs, calls the core, and turns whatever is
// thrown into a status and the text of mh_last_error().
#include "manyhead/manyhead.h"

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>

#include "check.hpp"
#include "fp_state.hpp"
#include "machine.hpp"
#include "merge.hpp"
#include "mha.hpp"
#include "openmp.hpp"
#include "plan.hpp"
#include "plan_of_call.hpp"
#include "pool.hpp"
#include "probe.hpp"
#include "problem.hpp"
#include "problem_line.hpp"
#include "profile.hpp"
#include "registry.hpp"
#include "scheduler.hpp"
#include "version.hpp"

struct mh_plan {
  manyhead::plan plan;
};
struct mh_mha {
  std::unique_ptr<const manyhead::mha> layer;
};

namespace {

using manyhead::check_at_least;
using manyhead::check_zero;
using manyhead::fail;
using manyhead::invalid;
using manyhead::read_struct;

thread_local char last_error[1024];  // fixed, so that reporting "out of memory" needs none

mh_status report(mh_status status, const char* text) noexcept {
  const size_t size = std::min(std::strlen(text), sizeof last_error - 1);
  std::memcpy(last_error, text, size);
  last_error[size] = 0;
  return status;
}

template <typename Function>
mh_status guarded(Function&& function) noexcept {
  const manyhead::default_fp_state fp;
  try {
    function();
    return MH_OK;
  } catch (const manyhead::error& e) {
    return report(e.status(), e.what());
  } catch (const std::bad_alloc&) {
    return report(MH_OUT_OF_MEMORY, "out of memory");
  } catch (const std::length_error&) {  // a container asked to grow past its max_size
    return report(MH_OUT_OF_MEMORY, "out of memory");
  } catch (const std::exception& e) {
    report(MH_INTERNAL_ERROR, "exception: ");
    const size_t used = std::strlen(last_error), size = std::min(std::strlen(e.what()), sizeof last_error - 1 - used);
    std::memcpy(last_error + used, e.what(), size);
    last_error[used + size] = 0;
    return MH_INTERNAL_ERROR;
  } catch (...) {
    return report(MH_INTERNAL_ERROR, "an exception that is not a std::exception");
  }
}

mh_exec read_exec(const mh_exec* user) {
  mh_exec exec = {};
  exec.struct_size = sizeof exec;
  if (user != nullptr) exec = read_struct(user, offsetof(mh_exec, parallel_for), "exec");
  check_at_least("exec.threads", exec.threads, 0);
  // Asked once a call: the cap may change while it runs.
  exec.threads = manyhead::allowed_threads(exec.threads);
  check_zero("exec.reserved0", exec.reserved0);
  if (exec.parallel_for == nullptr && exec.parallel_ctx != nullptr) {
    invalid("exec.parallel_for is NULL, must be a function where parallel_ctx is not NULL");
  }
  manyhead::use_openmp(exec);
  const auto address = reinterpret_cast<uintptr_t>(exec.workspace);
  if (address % 64 != 0) invalid("exec.workspace is at address ", address, ", must be a multiple of 64");
  if (address == 0 && exec.workspace_size != 0) {
    invalid("exec.workspace is NULL, but workspace_size is ", exec.workspace_size);
  }
  return exec;
}

mh_merge read_merge(const mh_merge* user) { return read_struct(user, offsetof(mh_merge, outs_strides), "merge"); }

void run(const manyhead::plan& plan, const mh_tensors* tensors, const mh_exec* exec) {
  if (tensors == nullptr) invalid("tensors is NULL");
  const mh_exec checked = read_exec(exec);
  const mh_tensors t = manyhead::check_tensors(plan.p, *tensors);
  manyhead::check_workspace(plan.p, t, checked);
  manyhead::run(plan, t, checked);
}

void copy_text(const std::string& text, char* buffer, size_t size, size_t* needed) {
  if (buffer == nullptr && size != 0) invalid("buffer is NULL, but size is ", size);
  if (needed != nullptr) *needed = text.size() + 1;
  if (size == 0) return;
  const size_t copied = std::min(text.size(), size - 1);
  std::memcpy(buffer, text.data(), copied);
  buffer[copied] = 0;
}

// Fills in a struct that may be of another version of the header, as its struct_size says.
void write_problem(const mh_problem& from, mh_problem& to) {
  const size_t room = to.struct_size, least = offsetof(mh_problem, q_strides);
  if (room < least) invalid("problem.struct_size is ", room, ", must be set to sizeof(mh_problem)");
  mh_problem all = from;
  all.struct_size = std::min(room, sizeof all);
  const auto* bytes = reinterpret_cast<const unsigned char*>(&from);
  if (std::any_of(bytes + all.struct_size, bytes + sizeof all, [](unsigned char byte) { return byte != 0; })) {
    fail(MH_UNSUPPORTED, "the line needs fields that problem, of struct_size ", room, ", lacks");
  }
  std::memcpy(&to, &all, all.struct_size);
}

// The tables of a probe: NULL or "" means the one in use.
const manyhead::kernel_table& probed_isa(const char* name) {
  if (name == nullptr || *name == 0) return manyhead::current_isa();
  return manyhead::find_isa(name);
}

void check_seconds(double seconds, bool may_be_0) {
  const volatile double given = seconds;  // in memory: see fp_state.hpp
  if ((given > 0 && given <= 3600) || (may_be_0 && given == 0)) return;
  invalid("seconds is ", seconds, may_be_0 ? ", must be 0..3600" : ", must be above 0 and at most 3600");
}

void check_probe(const char* name, double seconds, const double* result) {
  if (result == nullptr) invalid(name, " is NULL");
  check_seconds(seconds, false);
}

void check_probe_threads(int32_t threads) {
  if (threads < 1 || threads > 4096) invalid("threads is ", threads, ", must be 1..4096");
}

}  // namespace

extern "C" {

const char* mh_status_name(int32_t status) {
  switch (status) {
    case MH_OK:
      return "MH_OK";
    case MH_INVALID_ARGUMENT:
      return "MH_INVALID_ARGUMENT";
    case MH_UNSUPPORTED:
      return "MH_UNSUPPORTED";
    case MH_OUT_OF_MEMORY:
      return "MH_OUT_OF_MEMORY";
    case MH_INTERNAL_ERROR:
      return "MH_INTERNAL_ERROR";
    default:
      return "unknown";
  }
}

const char* mh_last_error(void) { return last_error; }

const char* mh_version(void) { return manyhead::version_text; }
int32_t mh_version_number(void) { return manyhead::version_number; }

int32_t mh_dtype_count(void) { return manyhead::dtype_count; }
const char* mh_dtype_name(int32_t dtype) { return manyhead::dtype_name(dtype); }
size_t mh_dtype_size(int32_t dtype) { return static_cast<size_t>(manyhead::dtype_size(dtype)); }

int32_t mh_isa_count(void) { return manyhead::isa_count(); }

const char* mh_isa_name(int32_t isa) {
  const manyhead::kernel_table* table = nullptr;
  guarded([&] { table = manyhead::isa_table(isa); });
  return table != nullptr ? table->isa : nullptr;
}

int32_t mh_isa_supported(int32_t isa) {
  int32_t supported = 0;
  guarded([&] { supported = manyhead::isa_supported(isa) ? 1 : 0; });
  return supported;
}

const char* mh_isa_current(void) {
  const char* name = nullptr;
  guarded([&] { name = manyhead::current_isa().isa; });
  return name;
}

mh_status mh_set_isa(const char* name) {
  return guarded([&] { manyhead::set_isa(name); });
}

int32_t mh_threads(void) {
  int32_t threads = 1;
  guarded([&] { threads = manyhead::max_threads(); });
  return threads;
}

mh_status mh_set_threads(int32_t threads) {
  return guarded([&] {
    check_at_least("threads", threads, 0);
    manyhead::set_max_threads(threads);
  });
}

mh_status mh_machine_describe(char* buffer, size_t size, size_t* needed) {
  return guarded([&] { copy_text(manyhead::describe_machine(), buffer, size, needed); });
}

mh_status mh_plan_create(const mh_problem* problem, mh_plan** plan) {
  return guarded([&] {
    if (plan == nullptr) invalid("plan is NULL");
    *plan = nullptr;
    if (problem == nullptr) invalid("problem is NULL");
    *plan = new mh_plan{manyhead::new_plan(*problem, manyhead::isa_of_new_plans())};
  });
}

void mh_plan_destroy(mh_plan* plan) { delete plan; }

size_t mh_plan_workspace_size(const mh_plan* plan, int32_t threads) {
  size_t bytes = 0;
  guarded([&] {
    if (plan == nullptr) invalid("plan is NULL");
    check_at_least("threads", threads, 0);
    bytes = static_cast<size_t>(manyhead::workspace_bytes(plan->plan, threads));
  });
  return bytes;
}

mh_status mh_plan_run(const mh_plan* plan, const mh_tensors* tensors, const mh_exec* exec) {
  return guarded([&] {
    if (plan == nullptr) invalid("plan is NULL");
    run(plan->plan, tensors, exec);
  });
}

mh_status mh_attention(const mh_problem* problem, const mh_tensors* tensors, const mh_exec* exec) {
  return guarded([&] { run(manyhead::plan_of_call(problem).get(), tensors, exec); });
}

mh_status mh_plan_describe(const mh_plan* plan, int32_t format, char* buffer, size_t size, size_t* needed) {
  return guarded([&] {
    if (plan == nullptr) invalid("plan is NULL");
    manyhead::check_enum("format", format, MH_FORMAT_JSON, "mh_format");
    const int32_t threads = manyhead::thread_count(plan->plan, 0);
    copy_text(manyhead::describe(plan->plan, format == MH_FORMAT_JSON, threads), buffer, size, needed);
  });
}

mh_status mh_problem_parse(const char* line, mh_problem* problem, size_t* column) {
  return guarded([&] {
    if (line == nullptr) invalid("line is NULL");
    if (problem == nullptr) invalid("problem is NULL");
    try {
      write_problem(manyhead::parse_problem(line), *problem);
    } catch (const manyhead::line_error& e) {
      if (column != nullptr) *column = e.column();
      throw;
    }
  });
}

mh_status mh_probe_arithmetic(const char* isa, int32_t dtype, int32_t threads, double seconds, double* flops) {
  return guarded([&] {
    check_probe("flops", seconds, flops);
    check_probe_threads(threads);
    manyhead::check_dtype("dtype", dtype);
    *flops = manyhead::arithmetic_rate(probed_isa(isa), dtype, threads, seconds);
  });
}

mh_status mh_probe_read(const char* isa, size_t bytes, int32_t threads, double seconds, double* bytes_per_second) {
  return guarded([&] {
    check_probe("bytes_per_second", seconds, bytes_per_second);
    check_probe_threads(threads);
    if (bytes == 0 || bytes > SIZE_MAX / 4) invalid("bytes is ", bytes, ", must be at least 1 and fit in memory");
    *bytes_per_second = manyhead::read_rate(probed_isa(isa), static_cast<int64_t>(bytes), threads, seconds);
  });
}

mh_status mh_probe_clock(double seconds, double* hertz) {
  return guarded([&] {
    check_probe("hertz", seconds, hertz);
    *hertz = manyhead::clock_rate(seconds);
  });
}

mh_status mh_plan_measure(const mh_plan* plan, const mh_tensors* tensors, const mh_exec* exec, double seconds,
                          int64_t most, double* times, int64_t* runs) {
  return guarded([&] {
    if (plan == nullptr) invalid("plan is NULL");
    if (times == nullptr) invalid("times is NULL");
    if (runs == nullptr) invalid("runs is NULL");
    check_at_least("most", most, 1);
    check_seconds(seconds, true);
    int64_t n = 0;
    for (double total = 0; n == 0 || (n < most && total < seconds);) {
      const auto start = std::chrono::steady_clock::now();
      run(plan->plan, tensors, exec);
      times[n] = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
      total += times[n];
      *runs = ++n;
    }
  });
}

mh_status mh_profile_begin(const mh_profile_options* options) {
  return guarded([&] {
    manyhead::watch_as_environment_says();
    mh_profile_options read = {};
    if (options != nullptr) read = read_struct(options, offsetof(mh_profile_options, calls), "options");
    manyhead::begin_profile(read);
  });
}

mh_status mh_profile_end(void) {
  return guarded([&] { manyhead::end_profile(); });
}

mh_status mh_profile_describe(int32_t format, char* buffer, size_t size, size_t* needed) {
  return guarded([&] { copy_text(manyhead::profile_text(format), buffer, size, needed); });
}

mh_status mh_merge_states(const mh_merge* merge, const void* outs, const void* lses, void* out, void* lse) {
  return guarded([&] {
    const mh_merge m = read_merge(merge);
    manyhead::watch_as_environment_says();
    manyhead::merge_states(m, read_exec(m.exec), outs, lses, out, lse);
  });
}

mh_status mh_merge_state(const mh_merge* merge, const void* out_a, const void* lse_a, const void* out_b,
                         const void* lse_b, void* out, void* lse) {
  return guarded([&] {
    const mh_merge m = read_merge(merge);
    manyhead::watch_as_environment_says();
    manyhead::merge_state(m, read_exec(m.exec), out_a, lse_a, out_b, lse_b, out, lse);
  });
}

mh_status mh_mha_create(const mh_mha_weights* weights, mh_mha** mha) {
  return guarded([&] {
    if (mha == nullptr) invalid("mha is NULL");
    *mha = nullptr;
    const mh_mha_weights read = read_struct(weights, offsetof(mh_mha_weights, b_q), "weights");
    manyhead::isa_of_new_plans();
    *mha = new mh_mha{manyhead::make_mha(read)};
  });
}

void mh_mha_destroy(mh_mha* mha) { delete mha; }

mh_status mh_mha_run(const mh_mha* mha, const mh_mha_call* call, const mh_exec* exec) {
  return guarded([&] {
    if (mha == nullptr) invalid("mha is NULL");
    const mh_mha_call read = read_struct(call, offsetof(mh_mha_call, mask), "call");
    mh_exec threads = read_exec(exec);
    threads.workspace = nullptr;  // documented: the layer keeps its own
    threads.workspace_size = 0;
    mha->layer->run(read, threads);
  });
}

}  // extern "C"
