// The matrix products of the multi-head layer, y = x W^T + b, with weights packed once for the kernel of one ISA
// (src/kernels/linear.hpp). A row of y depends on its row of x alone, to the bit, so rows and outputs may be cut into
// tasks anywhere, rows of all batch entries may share a task, and the number of threads changes nothing.
//
// With one exception: where there is a matrix unit (src/kernels/linear_unit.hpp), batch entries of many rows go there, and
// weights are packed for it, too. Few rows, which take as long as reading W does, would be slower with the larger
// numbers of the unit. So bits depend on whether an entry has linear_unit_kernels::least_rows or more. bf16 (and f16 where AMX
// has it) goes to AMX and VDPBF16PS with any number of rows, and its weights are kept for them alone.
//
// Everything is of one dtype, whose elements are floats, doubles or, of 16 bits, uint16_t. Sums of these are kept in floats.
//
// Why not OpenBLAS: it packs the weights in every call, sums a row in another order for another number of rows (its
// Haswell and Zen kernels also for another place of the row), and its flavours differ in how, or whether, several
// threads may call it at once. docs/performance.md has the figures.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <optional>

#include "blocks.hpp"
#include "kernels/kernel_api.hpp"
#include "memory.hpp"
#include "profile.hpp"
#include "thread_memory.hpp"

namespace manyhead {

// Uninitialised memory, on a cache line. Throws std::bad_alloc.
template <class Element>
class buffer {
 public:
  buffer() = default;
  explicit buffer(int64_t size) : data_(make(size)) {}
  Element* get() const noexcept { return data_.get(); }

 private:
  struct releaser {
    void operator()(Element* p) const noexcept { release(p); }
  };
  static Element* make(int64_t size) {
    size_t bytes;
    if (size < 0 || __builtin_mul_overflow(static_cast<size_t>(size), sizeof(Element), &bytes)) throw std::bad_alloc();
    return static_cast<Element*>(allocate(bytes));
  }
  std::unique_ptr<Element, releaser> data_;
};

// W [out, in] and b [out], packed into panels of `width` outputs, [in][width] each, the last one [in][as many vectors
// as it needs]. No bias is a bias of zeros. Weights are set row by row, and finished, before the first product.
template <class Element>
class linear {
 public:
  linear() = default;
  linear(const kernel_table& table, int32_t dtype, int64_t out, int64_t in);

  int64_t out() const noexcept { return out_; }
  int64_t in() const noexcept { return in_; }
  int64_t width() const noexcept { return width_; }
  int64_t panels() const noexcept { return blocks(out_, width_); }
  int64_t panel_bytes() const noexcept { return width_ * in_ * static_cast<int64_t>(sizeof(Element)); }
  int64_t bytes(bool on_unit) const noexcept {  // that a product reads
    return on_unit ? unit_.weight_words(out_, in_) * static_cast<int64_t>(sizeof(uint32_t)) : panels() * panel_bytes();
  }

  void set_row(int64_t row, const Element* from, int64_t stride) noexcept;
  void set_bias(const Element* from) noexcept;
  void finish();
  // Whether x is computed in another type than it has: run() then reads what widen() made of it, in wide_bytes(rows).
  static constexpr bool widens = sizeof(Element) < sizeof(float);
  int64_t wide_bytes(int64_t rows) const noexcept {
    return widens ? rows * odd_lines(in_, sizeof(float)) * static_cast<int64_t>(sizeof(float)) : 0;
  }
  void widen(int64_t rows, const Element* x, int64_t x_stride, char* wide) const noexcept;
  // The outputs of one panel, for `rows` rows; y is where the panel's first output goes.
  void run(int64_t panel, int64_t rows, const Element* x, int64_t x_stride, const char* wide, Element* y,
           int64_t y_stride) const;

  // Products on the matrix unit: of panels [first, last), both multiples of unit_panels unless last is the end.
  bool on_unit(int64_t rows_of_entry) const noexcept;
  int32_t unit_speed() const noexcept { return unit_.speed; }  // beside run()
  int64_t unit_panels() const noexcept;
  int64_t unit_scratch_bytes(int64_t rows) const noexcept;
  void run_on_unit(int64_t first, int64_t last, int64_t rows, const Element* x, int64_t x_stride, Element* y,
                   int64_t y_stride, char* scratch) const;

 private:
  int64_t padded(int64_t panel) const noexcept;  // its columns in memory

  int64_t out_ = 0, in_ = 0, width_ = 1, lanes_ = 1;
  linear_fn kernel_ = nullptr;
  widen_fn widen_ = nullptr;
  linear_unit_kernels unit_ = {};
  buffer<Element> weight_, bias_;
  buffer<uint32_t> unit_weight_;  // none: not for the unit
};

// y[batch, rows, out] = x[batch, rows, in] W^T + b. The elements of a row lie next to each other; the strides of batch
// and rows are free. batch and rows may be 0.
template <class Element>
struct product {
  const linear<Element>* w;
  int64_t batch, rows;
  const Element* x;
  int64_t x_strides[2];  // [batch, rows]
  Element* y;
  int64_t y_strides[2];
};

// All products of a list, which is read again while they run, on at most exec.threads threads and no more than their size is
// worth. No y overlaps anything. All memory is there once it is made: running does not throw.
template <class Element>
class multiplication {
 public:
  multiplication(const product<Element>* products, int64_t count, const mh_exec& exec);
  void run(const mh_exec& exec, const watched_call& watched);

 private:
  int64_t count_tasks(bool shares);  // sets what depends on shares
  static void run_task(void* self, int64_t task, int64_t worker);

  const product<Element>* products_;
  int64_t count_, threads_, tasks_ = 0, workers_ = 1;
  int64_t scratch_bytes_ = 0;  // of each worker
  bool shares_ = false;
  std::optional<borrowed_memory> scratch_;
};

extern template class linear<float>;
extern template class linear<double>;
extern template class linear<uint16_t>;
extern template class multiplication<float>;
extern template class multiplication<double>;
extern template class multiplication<uint16_t>;

}  // namespace manyhead
