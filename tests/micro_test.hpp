// What the micro tests share.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <random>
#include <vector>

#include "kernels/simd.hpp"

namespace manyhead::MH_ISA {
namespace {

template <class T>
std::vector<T> normal(size_t n, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<double> normal_distribution;
  std::vector<T> x(n);
  for (T& v : x) v = static_cast<T>(normal_distribution(random));
  return x;
}

// Memory that vectors may be stored to with alignment.
template <class T>
class aligned {
 public:
  explicit aligned(int64_t n, T value = T(0)) : memory_(static_cast<size_t>(n) + 64 / sizeof(T)) {
    void* p = memory_.data();
    size_t space = memory_.size() * sizeof(T);
    begin_ = static_cast<T*>(std::align(64, static_cast<size_t>(n) * sizeof(T), p, space));
    std::fill_n(begin_, n, value);
  }
  T* get() { return begin_; }
  T& operator[](int64_t i) { return begin_[i]; }

 private:
  std::vector<T> memory_;
  T* begin_;
};

}  // namespace
}  // namespace manyhead::MH_ISA
