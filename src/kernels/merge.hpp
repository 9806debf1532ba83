// Joins partial results over disjoint keys: lse = log(sum exp(lse_s)), out = sum out_s exp(lse_s - lse), states in
// order. States may be stored in D (mh_merge_states) or in the arithmetic type (split-KV).
#pragma once

#include "dtype.hpp"
#include "results.hpp"
#include "softmax.hpp"

namespace manyhead::MH_ISA {
namespace {

template <class From, class To>
void merge_rows(const merge_args* a, int64_t begin, int64_t end) {
  using T = typename To::real;
  constexpr int64_t block = 256;  // values of a row worked on together
  const double unit = a->partial_states != nullptr ? a->exp_scale : a->lses_base == MH_LSE_BASE2 ? 1.0 : 1.0 / ln2;
  for (int64_t row = begin; row < end; ++row) {
    const int64_t query = row % a->q_len;
    const int64_t head = row / a->q_len % a->heads;
    const int64_t batch = row / a->q_len / a->heads;
    struct row_state {
      double top, total;
    };
    // State s of the row, in its own units: an lse is a top with a total of 1.
    const auto state = [&](int64_t s) -> row_state {
      if (a->partial_states != nullptr) {
        const double* p = a->partial_states + 2 * (s * a->rows + row);
        return {p[0], p[1]};
      }
      const double lse =
          static_cast<double>(static_cast<const T*>(a->lses)[s * a->lses_strides[0] + batch * a->lses_strides[1] +
                                                             head * a->lses_strides[2] + query * a->lses_strides[3]]);
      return {lse, lse == -__builtin_inf() ? 0.0 : 1.0};
    };
    row_state merged{0, 0};
    for (int64_t s = 0; s < a->states; ++s) {
      const row_state x = state(s);
      if (x.total == 0) continue;
      if (merged.total == 0 || x.top > merged.top || x.top != x.top) merged.top = x.top;
      merged.total = 1;
    }
    merged.total = 0;
    const auto size = [&](const row_state& x) { return x.total * ::exp2((x.top - merged.top) * unit); };
    for (int64_t s = 0; s < a->states; ++s) {
      const row_state x = state(s);
      if (x.total != 0) merged.total += size(x);
    }
    const auto* outs = static_cast<const typename From::storage*>(a->outs) + batch * a->outs_strides[1] +
                       head * a->outs_strides[2] + query * a->outs_strides[3];
    auto* out = static_cast<typename To::storage*>(a->out) + batch * a->out_strides[0] + head * a->out_strides[1] +
                query * a->out_strides[2];
    for (int64_t d = 0; d < a->v_dim; d += block) {
      const int64_t n = min_of(block, a->v_dim - d);
      alignas(64) T sum[block] = {};
      alignas(64) T part[block] = {};
      const auto add_up = [&](T* to, double of_share) {
        for (int64_t s = 0; s < a->states; ++s) {
          const row_state x = state(s);
          if (x.total == 0) continue;
          const vec<T> share(static_cast<T>(size(x) / merged.total * of_share));
          widen_row<From>(outs + s * a->outs_strides[0] + d * a->outs_strides[4], a->outs_strides[4], n, part);
          for (int64_t i = 0; i < n; i += lanes<T>) store<T>(to + i, xsimd::fma(load(part + i), share, load(to + i)));
        }
      };
      add_up(sum, 1);
      finite_check<T> finite;
      for (int64_t i = 0; i < n; i += lanes<T>) finite.see(load(sum + i));
      if (!finite.passed()) {
        // Shares are rounded, and may add up to more than 1: halves of results cannot run over where no part has.
        alignas(64) T half[block] = {};
        add_up(half, 0.5);
        limit_sums<T>(half, lanes<T>, block / lanes<T>, vec<T>(T(2)));
        for (int64_t i = 0; i < n; i += lanes<T>) {
          const vec<T> x = load(sum + i), twice = load(half + i) + load(half + i);
          store<T>(sum + i, xsimd::select(xsimd::abs(x) <= vec<T>(-lowest<T>), x, twice));
        }
      }
      narrow_row<To>(sum, n, out + d * a->out_strides[3], a->out_strides[3]);
    }
    if (a->lse != nullptr) {
      static_cast<T*>(a->lse)[batch * a->lse_strides[0] + head * a->lse_strides[1] + query * a->lse_strides[2]] =
          as_real<T>(lse_of(merged.top, merged.total, unit, a->lse_base));
    }
  }
}

}  // namespace
}  // namespace manyhead::MH_ISA
