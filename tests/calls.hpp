// Calls of the library with arrays of their own, whose results are compared to the bit.
#pragma once

#include "manyhead/manyhead.hpp"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "random_numbers.hpp"

namespace manyhead::test {

// Random numbers of either sign as the type's bits: of 1/4 to 1/2, or denormal.
inline std::vector<char> random_bits(int32_t dtype, int64_t count, uint32_t seed, bool denormal = false) {
  const size_t size = mh_dtype_size(dtype);
  const uint64_t quarters[] = {0x3e800000, 0x3fd0000000000000, 0x3e80, 0x3400}, fractions[] = {23, 52, 7, 10};
  std::vector<char> bytes(static_cast<size_t>(count) * size);
  for (size_t at = 0; at < bytes.size(); at += size) {
    const uint64_t random = uint64_t{next_random(seed)} * 0x9e3779b97f4a7c15u;
    const uint64_t bits = (random & ((uint64_t{1} << fractions[dtype]) - 1)) | (denormal ? 0 : quarters[dtype]) |
                          uint64_t{seed >> 31} << (8 * size - 1);
    std::memcpy(&bytes[at], &bits, size);
  }
  return bytes;
}

template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

// mh_attention of a line's problem.
class attention_call {
 public:
  explicit attention_call(const char* line, bool denormal = false) : problem(parse_problem(line)) {
    const mh_problem& p = problem;
    const int64_t kv_heads = p.kv_heads > 0 ? p.kv_heads : p.heads, pairs = p.batch * p.heads * p.q_len * p.kv_len;
    q_ = random_bits(p.dtype, p.batch * p.heads * p.q_len * p.head_dim, 1);
    k_ = random_bits(p.dtype, p.batch * kv_heads * p.kv_len * p.head_dim, 2);
    v_ = random_bits(p.dtype, p.batch * kv_heads * p.kv_len * p.head_dim, 3, denormal);
    out.resize(q_.size());
    mask_.assign(static_cast<size_t>(pairs), 1);
    bias_.resize(mask_.size());
    weights_.resize(mask_.size());
    lse_.resize(static_cast<size_t>(p.batch * p.heads * p.q_len));
  }

  mh_status run(const mh_exec& exec = with_threads(2)) {
    const mh_tensors t = tensors();
    return mh_attention(&problem, &t, &exec);
  }
  const std::vector<char>& result(const mh_exec& exec = with_threads(2)) {
    check(run(exec));
    return out;
  }

  const mh_problem problem;
  std::vector<char> out;

 protected:
  // With an out that is to be written.
  mh_tensors tensors() {
    std::fill(out.begin(), out.end(), '\xff');
    mh_tensors t = make<mh_tensors>();
    t.q = q_.data(), t.k = k_.data(), t.v = v_.data(), t.out = out.data();
    if ((problem.inputs & MH_INPUT_MASK) != 0) t.mask = mask_.data();
    if ((problem.inputs & MH_INPUT_BIAS) != 0) t.bias = bias_.data();
    if ((problem.outputs & MH_OUTPUT_LSE) != 0) t.lse = lse_.data();
    if ((problem.outputs & MH_OUTPUT_WEIGHTS) != 0) t.weights = weights_.data();
    return t;
  }

 private:
  std::vector<char> q_, k_, v_;
  std::vector<uint8_t> mask_;
  std::vector<double> bias_, lse_, weights_;  // room for any type
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
        w_(random_bits(dtype, 4 * embed_dim * heads * head_dim, 4)),
        x_(random_bits(dtype, most * embed_dim, 5)),
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
