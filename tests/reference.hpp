// The specification: attention in double, as manyhead.h reads, three loops and a scalar predicate. Slow and plain on
// purpose; when a kernel and this file disagree, this file is right. Takes any dtype, any strides, any option.
#pragma once

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <vector>

#include "numbers.hpp"
#include "problem.hpp"

namespace manyhead::test {

struct attention_result {  // contiguous, dimensions as in manyhead.h
  std::vector<double> out, lse, weights, mean_weights, column_sums, scores;
};

inline double element(const void* array, int32_t dtype, int64_t i) {
  switch (dtype) {
    case MH_DTYPE_F32:
      return static_cast<const float*>(array)[i];
    case MH_DTYPE_F64:
      return static_cast<const double*>(array)[i];
    case MH_DTYPE_BF16:
      return bf16_value(static_cast<const uint16_t*>(array)[i]);
    default:
      return f16_value(static_cast<const uint16_t*>(array)[i]);
  }
}

inline int64_t index_of(const void* array, int32_t type, int64_t i) {
  return type == MH_INDEX_I32 ? static_cast<const int32_t*>(array)[i] : static_cast<const int64_t*>(array)[i];
}

inline int64_t at(const int64_t* strides, int64_t b, int64_t h, int64_t i, int64_t j) {
  return b * strides[0] + h * strides[1] + i * strides[2] + j * strides[3];
}

inline int64_t keys_used(const problem& p, const mh_tensors& t, int64_t b) {
  return p.has_input(MH_INPUT_SEQUSED_K) ? index_of(t.seqused_k, p.index_type, b) : p.kv_len - p.extra_keys;
}

inline int64_t position(const problem& p, const mh_tensors& t, int64_t b, int64_t i) {
  if (p.align == MH_ALIGN_BOTTOM_RIGHT) return i + keys_used(p, t, b) - p.q_len;
  if (p.align != MH_ALIGN_OFFSET) return i;
  return i + (p.has_input(MH_INPUT_Q_OFFSET) ? index_of(t.q_offset, p.index_type, b) : p.q_offset);
}

// All elements of [batch][heads][rows][dim], each read once.
inline std::vector<double> elements(const void* array, int32_t dtype, const int64_t* strides, int64_t batch,
                                    int64_t heads, int64_t rows, int64_t dim) {
  std::vector<double> all;
  all.reserve(static_cast<size_t>(batch * heads * rows * dim));
  for (int64_t b = 0; b < batch; ++b)
    for (int64_t h = 0; h < heads; ++h)
      for (int64_t i = 0; i < rows; ++i)
        for (int64_t d = 0; d < dim; ++d) all.push_back(element(array, dtype, at(strides, b, h, i, d)));
  return all;
}

// May query i of head h attend key j?
inline bool attends(const problem& p, const mh_tensors& t, int64_t b, int64_t h, int64_t i, int64_t j) {
  if (j >= p.kv_len - p.extra_keys) return true;
  const int64_t pos = position(p, t, b, i);
  if (j >= keys_used(p, t, b)) return false;
  if (p.causal && j > pos) return false;
  if (p.window_left >= 0 && j < pos - p.window_left) return false;
  if (p.window_right >= 0 && j > pos + p.window_right) return false;
  if (p.has_input(MH_INPUT_MASK) && !t.mask[at(p.mask_strides, b, h, i, j)]) return false;
  if (p.has_input(MH_INPUT_KEY_MASK) && !t.key_mask[b * p.key_mask_strides[0] + j * p.key_mask_strides[1]])
    return false;
  if (p.has_input(MH_INPUT_BIAS) && element(t.bias, p.bias_dtype, at(p.bias_strides, b, h, i, j)) == -HUGE_VAL)
    return false;
  return true;
}

inline attention_result reference(const problem& p, const mh_tensors& t) {
  const auto zeros = [](int64_t a, int64_t b, int64_t c, int64_t d) {
    return std::vector<double>(static_cast<size_t>(a * b * c * d));
  };
  const int32_t real = p.is_f64() ? MH_DTYPE_F64 : MH_DTYPE_F32;
  const double none = -HUGE_VAL;
  attention_result r = {zeros(p.batch, p.heads, p.q_len, p.v_dim),  zeros(p.batch, p.heads, p.q_len, 1),
                        zeros(p.batch, p.heads, p.q_len, p.kv_len), zeros(p.batch, p.q_len, p.kv_len, 1),
                        zeros(p.batch, p.heads, p.kv_len, 1),       zeros(p.batch, p.heads, p.q_len, p.kv_len)};
  const std::vector<double> q = elements(t.q, p.dtype, p.q_strides, p.batch, p.heads, p.q_len, p.head_dim),
                            k = elements(t.k, p.dtype, p.k_strides, p.batch, p.kv_heads, p.kv_len, p.head_dim),
                            v = elements(t.v, p.dtype, p.v_strides, p.batch, p.kv_heads, p.kv_len, p.v_dim);
  std::vector<double> s = zeros(p.kv_len, 1, 1, 1);
  for (int64_t row = 0; row < p.batch * p.heads * p.q_len; ++row) {
    const int64_t b = row / p.q_len / p.heads, h = row / p.q_len % p.heads, i = row % p.q_len,
                  first_key = (b * p.kv_heads + h / p.group()) * p.kv_len;
    double* const out = r.out.data() + row * p.v_dim;
    const double sink = p.has_input(MH_INPUT_SINKS) ? element(t.sinks, real, h) : none;
    double top = sink, sum = 0;
    std::vector<int64_t> keys;  // that the row attends
    for (int64_t j = 0; j < p.kv_len; ++j) {
      double x = 0;
      const double *const q_row = q.data() + row * p.head_dim, *const k_row = k.data() + (first_key + j) * p.head_dim;
      for (int64_t d = 0; d < p.head_dim; ++d) x += q_row[d] * k_row[d];
      x *= p.scale;
      double& shown = r.scores[static_cast<size_t>(row * p.kv_len + j)] = x;
      if (p.softcap > 0) x = p.softcap * std::tanh(x / p.softcap);
      if (p.scores_stage >= MH_SCORES_CAPPED) shown = x;
      if (p.has_input(MH_INPUT_ALIBI)) {
        const double slope = element(t.alibi_slopes, real, b * p.alibi_batch_stride + h);
        const double distance = static_cast<double>(j - position(p, t, b, i));
        x += slope * (p.alibi_mode == MH_ALIBI_SIGNED ? distance : -std::fabs(distance));
      }
      if (p.has_input(MH_INPUT_BIAS) && j < p.kv_len - p.extra_keys)
        x += element(t.bias, p.bias_dtype, at(p.bias_strides, b, h, i, j));
      const bool seen = attends(p, t, b, h, i, j);
      if (p.scores_stage >= MH_SCORES_BIASED) shown = seen ? x : none;
      if (!seen) continue;
      s[static_cast<size_t>(j)] = x;
      keys.push_back(j);
      top = x > top ? x : top;
    }
    for (const int64_t j : keys) sum += std::exp(s[static_cast<size_t>(j)] - top);
    if (p.has_input(MH_INPUT_SINKS)) sum += std::exp(sink - top);
    const double lse = keys.empty() ? sink : top + std::log(sum);
    const double in_base = p.lse_base == MH_LSE_BASE2 ? lse / std::log(2.0) : lse;
    const double most = p.is_f64() ? DBL_MAX : static_cast<double>(FLT_MAX);
    r.lse[static_cast<size_t>(row)] = std::isfinite(lse) ? std::clamp(in_base, -most, most) : in_base;
    for (const int64_t j : keys) {
      const double w = std::exp(s[static_cast<size_t>(j)] - top) / sum;
      r.weights[static_cast<size_t>(row * p.kv_len + j)] = w;
      r.mean_weights[static_cast<size_t>((b * p.q_len + i) * p.kv_len + j)] += w / static_cast<double>(p.heads);
      r.column_sums[static_cast<size_t>((b * p.heads + h) * p.kv_len + j)] += w;
      const double* const v_row = v.data() + (first_key + j) * p.v_dim;
      for (int64_t d = 0; d < p.v_dim; ++d) out[d] += w * (v_row[d] / 2);
    }
    // Averages of numbers are no larger than those, whatever rounding does. Halves, which only in f64 may lose a bit.
    for (int64_t d = 0; d < p.v_dim; ++d) {
      const bool finite = std::isfinite(out[d]);
      out[d] *= 2;
      if (finite) out[d] = std::min(std::max(out[d], -DBL_MAX), DBL_MAX);
    }
  }
  return r;
}

}  // namespace manyhead::test
