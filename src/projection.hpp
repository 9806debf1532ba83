// The matrix products of the multi-head layer, y = x W^T + b, on OpenBLAS where the build has it.
//
// A row's result depends on the rows of its own batch entry at most: OpenBLAS sums in another order for another number
// of rows, and some of its kernels (Haswell, Zen) also for another place of a row in the product, so no product spans
// two entries. The products are split into blocks by their sizes alone, and each block is one product on one thread:
// the same bits for any number of threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>

#include "manyhead/manyhead.h"

namespace manyhead {

// Uninitialised memory, on a cache line. Throws std::bad_alloc.
template <class Real>
class buffer {
 public:
  buffer() = default;
  explicit buffer(int64_t size) : data_(allocate(size)) {}
  Real* get() const noexcept { return data_.get(); }

 private:
  static constexpr std::align_val_t line{64};
  struct release {
    void operator()(Real* p) const noexcept { ::operator delete(p, line); }
  };
  static Real* allocate(int64_t size) {
    size_t bytes;
    if (size < 0 || __builtin_mul_overflow(static_cast<size_t>(size), sizeof(Real), &bytes)) throw std::bad_alloc();
    return static_cast<Real*>(::operator new(bytes, line));
  }
  std::unique_ptr<Real, release> data_;
};

// Elements from row to row of a scratch matrix: whole cache lines, an odd number of them, so that the rows of a head
// are spread over all sets of the caches. (With 1024 floats a row, all rows would meet in the same sets.)
template <class Real>
constexpr int64_t row_stride(int64_t columns) noexcept {
  constexpr int64_t line = 64 / static_cast<int64_t>(sizeof(Real));
  return ((columns + line - 1) / line | 1) * line;
}

// W and b as the products read them: [out, in] and [out], contiguous. No bias is a bias of zeros.
template <class Real>
struct linear {
  int64_t out = 0, in = 0;
  buffer<Real> weight, bias;
};

// y[batch, rows, out] = x[batch, rows, in] W^T + b, with strides that is_direct() accepts. batch and rows may be 0.
template <class Real>
struct product {
  const linear<Real>* w;
  int64_t batch, rows;
  const Real* x;
  int64_t x_strides[2];  // [batch, rows]
  Real* y;
  int64_t y_strides[2];
};

// Whether x or y with these strides [batch, rows, elements] can be given to a product as they are.
bool is_direct(const int64_t* strides, int64_t rows, int64_t columns) noexcept;

// Fails with MH_UNSUPPORTED where one of a matrix's sizes is more than the product can count.
void check_product_size(const char* name, int64_t size);

// All products of the list, on at most exec.threads threads. x, y and b do not overlap; the y of different products
// neither.
template <class Real>
void multiply(const product<Real>* products, int64_t count, const mh_exec& exec);

extern template void multiply(const product<float>*, int64_t, const mh_exec&);
extern template void multiply(const product<double>*, int64_t, const mh_exec&);

}  // namespace manyhead
