// See projection.hpp.
#include "projection.hpp"

#include <algorithm>
#include <climits>
#include <cstring>
#include <mutex>

#include "check.hpp"
#include "scheduler.hpp"

#if MH_WITH_BLAS
#include <cblas.h>

extern "C" {
// Of the OpenMP runtime, there where OpenBLAS came with it.
int omp_get_max_threads() __attribute__((weak));
void omp_set_num_threads(int) __attribute__((weak));
}
#endif

namespace manyhead {
namespace {

#if MH_WITH_BLAS

constexpr int64_t most_size = INT_MAX - 63;  // and rounded up to an odd number of cache lines still an int

// OpenBLAS must take one thread for each of our blocks, and many blocks must be able to run at once. How that is had
// depends on its flavour, which is known at run time only: they all have the same file name.
//   pthread  A process-wide number, set to 1 while any layer runs and put back by the last one.
//   OpenMP   The calling thread's number of OpenMP threads, set to 1 around each block and put back.
//   serial   Built without locks (by Debian and Ubuntu): concurrent calls share a work buffer and return wrong numbers.
//            Blocks run one at a time, on the calling thread.
class blas_scope {  // around all blocks of a list
 public:
  blas_scope() {
    if (openblas_get_parallel() != OPENBLAS_THREAD) return;
    const std::lock_guard<std::mutex> lock(mutex());
    if (users_++ > 0) return;
    threads_ = openblas_get_num_threads();
    if (threads_ != 1) openblas_set_num_threads(1);
  }
  ~blas_scope() {
    if (openblas_get_parallel() != OPENBLAS_THREAD) return;
    const std::lock_guard<std::mutex> lock(mutex());
    if (--users_ == 0 && threads_ != 1) openblas_set_num_threads(threads_);
  }
  blas_scope(const blas_scope&) = delete;
  blas_scope& operator=(const blas_scope&) = delete;

  static bool concurrent() { return openblas_get_parallel() != OPENBLAS_SEQUENTIAL; }
  static std::mutex& mutex() {
    static std::mutex one;
    return one;
  }

 private:
  static inline int users_ = 0;
  static inline int threads_ = 1;
};

class block_scope {  // around one block
 public:
  block_scope() {
    if (!blas_scope::concurrent()) serial_ = std::unique_lock<std::mutex>(blas_scope::mutex());
    if (openblas_get_parallel() != OPENBLAS_OPENMP || omp_get_max_threads == nullptr) return;
    threads_ = omp_get_max_threads();
    omp_set_num_threads(1);
  }
  ~block_scope() {
    if (threads_ > 0) omp_set_num_threads(threads_);
  }
  block_scope(const block_scope&) = delete;
  block_scope& operator=(const block_scope&) = delete;

 private:
  std::unique_lock<std::mutex> serial_;
  int threads_ = 0;
};

void gemm(int rows, int out, int in, const float* x, int x_stride, const float* w, float* y, int y_stride) {
  cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, rows, out, in, 1, x, x_stride, w, in, 1, y, y_stride);
}
void gemm(int rows, int out, int in, const double* x, int x_stride, const double* w, double* y, int y_stride) {
  cblas_dgemm(CblasRowMajor, CblasNoTrans, CblasTrans, rows, out, in, 1, x, x_stride, w, in, 1, y, y_stride);
}
void gemv(int out, int in, const float* w, const float* x, float* y) {
  cblas_sgemv(CblasRowMajor, CblasNoTrans, out, in, 1, w, in, x, 1, 1, y, 1);
}
void gemv(int out, int in, const double* w, const double* x, double* y) {
  cblas_dgemv(CblasRowMajor, CblasNoTrans, out, in, 1, w, in, x, 1, 1, y, 1);
}

// Up to this many rows a gemv for each is faster than a gemm, which packs W in every call: 35 against 6 to 24 GFLOP/s
// for 1 to 4 rows of 768 with the Haswell kernels, W in L2.
constexpr int64_t few_rows = 4;

// y += x W^T
template <class Real>
void add_block(const Real* x, int64_t x_stride, const Real* w, int64_t in, int64_t rows, int64_t out, Real* y,
               int64_t y_stride) {
  const block_scope one_thread;
  const auto number = [](int64_t n) { return static_cast<int>(n); };  // fits: check_product_size, is_direct
  if (rows > few_rows) {
    gemm(number(rows), number(out), number(in), x, number(x_stride), w, y, number(y_stride));
  } else {
    for (int64_t i = 0; i < rows; ++i) gemv(number(out), number(in), w, x + i * x_stride, y + i * y_stride);
  }
}

#else

constexpr int64_t most_size = INT64_MAX;

struct blas_scope {
  blas_scope() {}  // not trivial: a variable of this type is not an unused one
  static bool concurrent() { return true; }
};

template <class Real>
struct pack {
  typedef Real type __attribute__((vector_size(16)));
  static constexpr int64_t lanes = 16 / sizeof(Real);
};

// Rows x outs dot products at once: with 4 x 2 the sums, 4 vectors of x and 2 of W fit 16 registers. Sums are added in
// one order, whatever the place of a row in its block.
template <int rows, int outs, class Real>
void add_dots(const Real* x, int64_t x_stride, const Real* w, int64_t in, Real* y, int64_t y_stride) {
  using vector = typename pack<Real>::type;
  constexpr int64_t lanes = pack<Real>::lanes;
  const auto load = [](const Real* p) {
    vector v;
    std::memcpy(&v, p, sizeof v);
    return v;
  };
  vector sums[rows][outs] = {};
  int64_t k = 0;
  for (; k + lanes <= in; k += lanes) {
    vector columns[outs];
    for (int j = 0; j < outs; ++j) columns[j] = load(w + j * in + k);
    for (int i = 0; i < rows; ++i) {
      const vector row = load(x + i * x_stride + k);
      for (int j = 0; j < outs; ++j) sums[i][j] += row * columns[j];
    }
  }
  for (int i = 0; i < rows; ++i) {
    for (int j = 0; j < outs; ++j) {
      Real sum = 0;
      for (int64_t l = 0; l < lanes; ++l) sum += sums[i][j][l];
      for (int64_t rest = k; rest < in; ++rest) sum += x[i * x_stride + rest] * w[j * in + rest];
      y[i * y_stride + j] += sum;
    }
  }
}

template <class Real>
void add_block(const Real* x, int64_t x_stride, const Real* w, int64_t in, int64_t rows, int64_t out, Real* y,
               int64_t y_stride) {
  for (int64_t j = 0; j < out; j += 2) {
    const bool pair = j + 2 <= out;
    int64_t i = 0;
    for (; i + 4 <= rows; i += 4) {
      (pair ? add_dots<4, 2, Real> : add_dots<4, 1, Real>)(x + i * x_stride, x_stride, w + j * in, in,
                                                           y + i * y_stride + j, y_stride);
    }
    for (; i < rows; ++i) {
      (pair ? add_dots<1, 2, Real> : add_dots<1, 1, Real>)(x + i * x_stride, x_stride, w + j * in, in,
                                                           y + i * y_stride + j, y_stride);
    }
  }
}

#endif

int64_t blocks(int64_t n, int64_t size) { return (n + size - 1) / size; }
// n in equal parts of at most `most`, but for rounding up to a multiple of `step`.
int64_t even_part(int64_t n, int64_t most, int64_t step) { return blocks(blocks(n, blocks(n, most)), step) * step; }

// How a product is cut into tasks: panels of outputs times blocks of rows. A task is at most one block of rows of one
// batch entry, or, where entries are short, whole entries, one after another, so that they find the panel's weights in
// cache.
struct cut {
  int64_t panel;  // outputs of a task
  int64_t panels;
  int64_t block;    // rows of a task
  int64_t blocks_;  // of an entry
  int64_t entries;  // batch entries of a task
  int64_t groups;   // of entries

  int64_t tasks() const noexcept { return panels * blocks_ * groups; }
};

template <class Real>
cut cut_of(const product<Real>& p) {
  if (p.batch == 0 || p.rows == 0) return {};
  const int64_t out = p.w->out;
  cut c;
  // Few rows: as fast as W can be read, so panels stay in L2 (256 KB) for the next entry. Many rows: large enough that
  // OpenBLAS's packing costs little (512 outputs: 5 % less than all at once), small enough to have work for many
  // threads.
  const int64_t in_cache = (256 << 10) / (p.w->in * static_cast<int64_t>(sizeof(Real)));
  c.panel = even_part(out, p.rows <= 16 ? std::clamp<int64_t>(in_cache, 16, 256) : 512, 16);
  c.panels = blocks(out, c.panel);
  c.block = even_part(p.rows, p.rows >= 2048 ? 512 : 256, 16);
  c.blocks_ = blocks(p.rows, c.block);
  c.entries = std::min(p.batch, std::max<int64_t>(1, 256 / p.rows));
  c.groups = blocks(p.batch, c.entries);
  return c;
}

template <class Real>
void run_task(const product<Real>& p, const cut& c, int64_t task) {
  const int64_t row = task % c.blocks_ * c.block;
  task /= c.blocks_;
  const int64_t entry = task % c.groups * c.entries;
  const int64_t column = task / c.groups * c.panel;
  const int64_t rows = std::min(c.block, p.rows - row);
  const int64_t columns = std::min(c.panel, p.w->out - column);
  const int64_t in = p.w->in;
  for (int64_t b = entry; b < std::min(entry + c.entries, p.batch); ++b) {
    const Real* x = p.x + b * p.x_strides[0] + row * p.x_strides[1];
    Real* y = p.y + b * p.y_strides[0] + row * p.y_strides[1] + column;
    // The bias first, the product added: costs no more than the zeros that gemm would write otherwise.
    for (int64_t i = 0; i < rows; ++i) std::copy_n(p.w->bias.get() + column, columns, y + i * p.y_strides[1]);
    add_block(x, p.x_strides[1], p.w->weight.get() + column * in, in, rows, columns, y, p.y_strides[1]);
  }
}

template <class Real>
struct work {
  const product<Real>* products;

  static void run(void* self, int64_t task) {
    for (const product<Real>* p = static_cast<const work*>(self)->products;; ++p) {
      const cut c = cut_of(*p);
      if (task < c.tasks()) return run_task(*p, c, task);
      task -= c.tasks();
    }
  }
};

}  // namespace

bool is_direct(const int64_t* strides, int64_t rows, int64_t columns) noexcept {
  return strides[2] == 1 && (rows == 1 || (strides[1] >= columns && strides[1] <= most_size));
}

void check_product_size(const char* name, int64_t size) {
  if (size > most_size) fail(MH_UNSUPPORTED, name, " is ", size, ", OpenBLAS takes at most ", most_size);
}

template <class Real>
void multiply(const product<Real>* products, int64_t count, const mh_exec& exec) {
  int64_t tasks = 0;
  double flops = 0, bytes = 0;
  for (const product<Real>* p = products; p != products + count; ++p) {
    const int64_t own = cut_of(*p).tasks();
    if (own == 0) continue;
    tasks += own;
    const double weights = static_cast<double>(p->w->out) * static_cast<double>(p->w->in);
    flops += 2 * weights * static_cast<double>(p->batch) * static_cast<double>(p->rows);
    bytes += weights * sizeof(Real);
  }
  // Less than 30 microseconds at 40 GFLOP/s and 10 GB/s: sooner done than a second thread is awake.
  mh_exec limited = exec;
  if (flops / 40e3 + bytes / 10e3 < 30 || !blas_scope::concurrent()) limited.threads = 1;
  const blas_scope scope;
  work<Real> all{products};
  parallel_for(tasks, limited, work<Real>::run, &all);
}

template void multiply(const product<float>*, int64_t, const mh_exec&);
template void multiply(const product<double>*, int64_t, const mh_exec&);

}  // namespace manyhead
