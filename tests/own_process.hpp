// For tests that end, fork or starve a process: each experiment in a process of its own, whose first call of the
// library is the experiment's, with a limit to its time; and calls whose results are compared to the bit. Experiments,
// and the checks in them, throw what went wrong. The process that forks them makes no calls itself, so has no threads.
#pragma once

#include "manyhead/manyhead.hpp"

#include <sys/wait.h>
#include <unistd.h>
#include <algorithm>
#include <bit>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <stdexcept>
#include <string>
#include <vector>

#include "random_numbers.hpp"

namespace manyhead::test {

// Seconds for what takes milliseconds: what is not over by then waits for something that never comes.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr unsigned patience = 60;
#else
constexpr unsigned patience = 20;
#endif

inline void expect(bool good, const std::string& what) {
  if (!good) throw std::runtime_error(what);
}

// "" where `function` has thrown nothing.
template <class Function>
std::string thrown(Function&& function) noexcept {
  try {
    function();
  } catch (const std::exception& e) {
    return std::string(e.what()) + " (thrown)";
  }
  return "";
}

// "" where the child has ended well.
inline std::string end_of(pid_t child) {
  int status = 0;
  if (child < 0 || waitpid(child, &status, 0) != child) return "there is no child";
  if (WIFSIGNALED(status)) {
    const int signal = WTERMSIG(status);
    return signal == SIGALRM ? "waited for ever" : "ended by signal " + std::to_string(signal);
  }
  return WEXITSTATUS(status) == 0 ? "" : "ended with " + std::to_string(WEXITSTATUS(status));
}

// "" where `experiment` has ended well in a child of this process, in time; else what went wrong.
template <class Experiment>
std::string in_child(Experiment&& experiment) {
  int ends[2];
  if (pipe(ends) != 0) return "no pipe";
  std::fflush(nullptr);
  const pid_t child = fork();
  if (child == 0) {
    std::signal(SIGABRT, SIG_DFL);  // doctest's would report another test case that failed
    std::signal(SIGSEGV, SIG_DFL);
    alarm(patience);
    close(ends[0]);
    const std::string said = thrown(experiment);
    const bool told = write(ends[1], said.data(), said.size()) == static_cast<ssize_t>(said.size());
    _exit(told ? 0 : 1);
  }
  close(ends[1]);
  const std::string end = end_of(child);  // before the pipe is read: a pipe holds more than is ever said
  char said[4096];
  const ssize_t size = end.empty() ? read(ends[0], said, sizeof said) : 0;
  close(ends[0]);
  return end + std::string(said, static_cast<size_t>(std::max<ssize_t>(size, 0)));
}

// numbers() as f32 or bf16; as f16, where they are easier made, 1/16 to 1/4 of either sign.
inline std::vector<char> numbers_of(int32_t dtype, int64_t count, uint32_t seed) {
  std::vector<char> result(static_cast<size_t>(count) * mh_dtype_size(dtype));
  const std::vector<float> wide = numbers(count, seed);
  for (size_t i = 0; i < wide.size(); ++i) {
    const auto bits = std::bit_cast<uint32_t>(wide[i]);
    const uint32_t half = dtype == MH_DTYPE_BF16 ? bits >> 16 : (bits >> 16 & 0x8000) + 0x2c00 + (bits >> 12 & 0x7ff);
    const auto narrow = static_cast<uint16_t>(half);
    if (dtype == MH_DTYPE_F32) {
      std::memcpy(&result[4 * i], &bits, sizeof bits);
    } else {
      std::memcpy(&result[2 * i], &narrow, sizeof narrow);
    }
  }
  return result;
}

template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

// mh_attention of a line's problem, in f32.
class attention_call {
 public:
  explicit attention_call(const char* line)
      : p_(parse_problem(line)),
        q_(numbers(p_.batch * p_.heads * p_.q_len * p_.head_dim, 1)),
        k_(numbers(p_.batch * p_.heads * p_.kv_len * p_.head_dim, 2)),
        v_(numbers(p_.batch * p_.heads * p_.kv_len * p_.head_dim, 3)),
        out_(q_.size()) {}

  mh_status run(const mh_exec& exec = with_threads(2)) {
    std::fill(out_.begin(), out_.end(), NAN);
    mh_tensors t = make<mh_tensors>();
    t.q = q_.data(), t.k = k_.data(), t.v = v_.data(), t.out = out_.data();
    return mh_attention(&p_, &t, &exec);
  }
  const std::vector<float>& result(const mh_exec& exec = with_threads(2)) {
    check(run(exec));
    return out_;
  }

 private:
  mh_problem p_;
  std::vector<float> q_, k_, v_, out_;
};

// mh_mha_run of a layer of 4 heads for self-attention of up to `most` rows, with weights of its attention if so wanted.
// Its heads are together larger than its rows, so that each of its steps may need more memory than the one before.
class layer_call {
 public:
  enum class wants { out, weights, mean_weights };
  struct results {
    std::vector<char> out;
    std::vector<float> weights;
  };

  layer_call(int32_t dtype, int64_t most, wants what = wants::out)
      : dtype_(dtype),
        what_(what),
        w_(numbers_of(dtype, 4 * embed_dim * heads * head_dim, 4)),
        x_(numbers_of(dtype, most * embed_dim, 5)),
        layer_(weights()) {}

  // Before they are written, results are all the same.
  results untouched(int64_t rows) const {
    const size_t averaged = what_ == wants::out       ? 0
                            : what_ == wants::weights ? heads
                                                      : 1,
                 n = static_cast<size_t>(rows);
    return {std::vector<char>(n * embed_dim * mh_dtype_size(dtype_), 1), std::vector<float>(averaged * n * n, 1.0f)};
  }
  mh_status run(int64_t rows, results& r, const mh_exec& exec = with_threads(2)) const {
    mh_mha_call c = make<mh_mha_call>();
    c.batch = 1, c.q_len = c.kv_len = rows;
    c.x_q = x_.data(), c.out = r.out.data();
    if (what_ == wants::weights) c.weights = r.weights.data();
    if (what_ == wants::mean_weights) c.mean_weights = r.weights.data();
    return mh_mha_run(layer_.get(), &c, &exec);
  }
  results result(int64_t rows, const mh_exec& exec = with_threads(2)) const {
    results r = untouched(rows);
    check(run(rows, r, exec));
    return r;
  }

 private:
  static constexpr int64_t embed_dim = 32, heads = 4, head_dim = 64;

  mh_mha_weights weights() const {
    mh_mha_weights w = make<mh_mha_weights>();
    w.dtype = dtype_;
    w.embed_dim = embed_dim, w.heads = heads, w.head_dim = head_dim;
    const char* const first = w_.data();
    const size_t size = w_.size() / 4;
    w.w_q = first, w.w_k = first + size, w.w_v = first + 2 * size, w.w_o = first + 3 * size;
    return w;
  }

  int32_t dtype_;
  wants what_;
  std::vector<char> w_, x_;
  layer layer_;
};

}  // namespace manyhead::test
