// What sums of weighed values become as results: whether they are finite, and what is done where they are not.
#pragma once

#include "simd.hpp"

namespace manyhead::MH_ISA {
namespace {

// Whether all values seen are finite: 0 times each, added up, is 0, or NaN from the first that is not. In four sums, taken
// in turn: one alone is a chain of a multiply-add's latency through all values, longer than all else done with them.
template <class T>
class finite_check {
 public:
  MH_INLINE void see(vec<T> x) {
    const vec<T> sum = xsimd::fma(x, vec<T>(T(0)), a_);
    a_ = b_, b_ = c_, c_ = d_, d_ = sum;  // names, once a loop is unrolled; moves between registers where it is not
  }
  MH_INLINE vec<T> sum() const { return (a_ + b_) + (c_ + d_); }
  MH_INLINE bool passed() const { return passed(sum()); }
  static MH_INLINE bool passed(vec<T> sums) { return xsimd::all(sums == vec<T>(T(0))); }

 private:
  vec<T> a_{T(0)}, b_{T(0)}, c_{T(0)}, d_{T(0)};
};

// What sums become as results. A zero is +0: the sign of one depends on what it has been added to with a weight of 0.
template <class T>
MH_INLINE vec<T> result_of(vec<T> sums, vec<T> factors) {
  return xsimd::fma(sums, factors, vec<T>(T(0)));
}

// Of n vectors, `stride` apart: sums that times factors are beyond the largest number become such that they are not. Results are
// averages, which are beyond it only because weights are rounded; of sums, that is, which were made small enough to be finite.
template <class T>
__attribute__((noinline)) void limit_sums(T* sums, int64_t stride, int64_t n, vec<T> factors) {
  constexpr T largest = -lowest<T>;
  constexpr T below_1 = 1 - 2 * (sizeof(T) == 8 ? static_cast<T>(__DBL_EPSILON__) : static_cast<T>(__FLT_EPSILON__));
  const vec<T> most = vec<T>(largest) / xsimd::abs(factors) * vec<T>(below_1);
  for (int64_t i = 0; i < n; ++i, sums += stride) {
    const vec<T> x = vec<T>::load_aligned(sums);
    // Neither NaN nor infinite themselves.
    const auto over = (xsimd::abs(x * factors) > vec<T>(largest)) & (xsimd::abs(x) <= vec<T>(largest));
    const vec<T> limited = xsimd::select(x > vec<T>(T(0)), most, -most);
    xsimd::select(over, limited, x).store_aligned(sums);
  }
}

}  // namespace
}  // namespace manyhead::MH_ISA
