// Joins partial results over disjoint keys: lse = log(sum exp(lse_s)), out = sum out_s exp(lse_s - lse), states in
// order. States may be stored in D (mh_merge_states) or in the arithmetic type (split-KV).
#pragma once

#include "dtype.hpp"

namespace manyhead::MH_ISA {
namespace {

template <class From, class To>
void merge_rows(const merge_args* a, int64_t begin, int64_t end) {
  using T = typename To::real;
  constexpr int64_t block = 64;  // values of a row worked on together
  const double ln2 = 0.69314718055994530942;
  const double none = -__builtin_inf();
  const double in_unit = a->lses_base == MH_LSE_BASE2 ? 1.0 : 1.0 / ln2;
  const double out_unit = a->lse_base == MH_LSE_BASE2 ? 1.0 : ln2;
  for (int64_t row = begin; row < end; ++row) {
    const int64_t query = row % a->q_len;
    const int64_t head = row / a->q_len % a->heads;
    const int64_t batch = row / a->q_len / a->heads;
    const T* lses = static_cast<const T*>(a->lses) + batch * a->lses_strides[1] + head * a->lses_strides[2] +
                    query * a->lses_strides[3];
    const auto lse_of = [&](int64_t s) { return static_cast<double>(lses[s * a->lses_strides[0]]) * in_unit; };
    double top = none;
    for (int64_t s = 0; s < a->states; ++s) {
      const double x = lse_of(s);
      if (x > top || x != x) top = x;
      if (x != x) break;
    }
    double total = 0;
    for (int64_t s = 0; s < a->states && top != none; ++s) total += lse_of(s) == none ? 0 : ::exp2(lse_of(s) - top);
    const double lse = top == none ? none : top + ::log2(total);
    const auto* outs = static_cast<const typename From::storage*>(a->outs) + batch * a->outs_strides[1] +
                       head * a->outs_strides[2] + query * a->outs_strides[3];
    auto* out = static_cast<typename To::storage*>(a->out) + batch * a->out_strides[0] + head * a->out_strides[1] +
                query * a->out_strides[2];
    for (int64_t d = 0; d < a->v_dim; d += block) {
      const int64_t n = min_of(block, a->v_dim - d);
      alignas(64) T sum[block] = {};
      alignas(64) T part[block] = {};
      for (int64_t s = 0; s < a->states; ++s) {
        if (lse_of(s) == none) continue;
        const vec<T> share(static_cast<T>(::exp2(lse_of(s) - lse)));
        widen_row<From>(outs + s * a->outs_strides[0] + d * a->outs_strides[4], a->outs_strides[4], n, part);
        for (int64_t i = 0; i < n; i += lanes<T>) store<T>(sum + i, xsimd::fma(load(part + i), share, load(sum + i)));
      }
      narrow_row<To>(sum, n, out + d * a->out_strides[3], a->out_strides[3]);
    }
    if (a->lse != nullptr) {
      static_cast<T*>(a->lse)[batch * a->lse_strides[0] + head * a->lse_strides[1] + query * a->lse_strides[2]] =
          static_cast<T>(lse * out_unit);
    }
    if (a->row_lse != nullptr) static_cast<T*>(a->row_lse)[row] = static_cast<T>(lse);
  }
}

}  // namespace
}  // namespace manyhead::MH_ISA
