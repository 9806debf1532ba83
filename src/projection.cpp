// See projection.hpp.
#include "projection.hpp"

#include <algorithm>
#include <numeric>
#include <utility>

#include "blocks.hpp"
#include "machine.hpp"
#include "plan.hpp"
#include "pool.hpp"
#include "scheduler.hpp"

namespace manyhead {
namespace {

// Waking a thread costs 3 to 100 microseconds: each should find at least this much work.
constexpr double us_of_thread = 15;
// Shorter tasks cost more to hand out than they gain.
constexpr double us_of_task = 20;
// Rows of a task: few enough that their x (192 x 768 x 4 bytes) stays in L2 for all panels, enough that reading a panel
// costs nothing. A multiple of what tiles have (product.hpp): 8 rows with AVX-512 and NEON, 6 with AVX2 and SSE2.
constexpr int64_t most_rows = 192, row_step = 24;
// Panels of a task whose x is widened first, which takes a tenth of a panel's time, as long as there are enough tasks; and how
// much of x that is.
constexpr int64_t most_wide_panels = 8, wide_tasks_per_thread = 4, most_wide_bytes = 768 << 10;
// On the matrix unit, which takes outputs and rows by unit_rows, and packs x for each task: as long as so many outputs take.
constexpr int64_t least_unit_outputs = 192, unit_tasks_per_thread = 3, most_unit_bytes = 1536 << 10;

// A product whose rows are those of one entry where they follow each other at one stride through all batch entries; what it
// runs on is settled before.
template <class Element>
struct flat : product<Element> {
  bool on_unit;

  explicit flat(const product<Element>& p) : product<Element>(p), on_unit(p.w->on_unit(p.rows)) {
    if (p.rows == 1) {
      this->rows = p.batch;
      this->x_strides[1] = p.x_strides[0];
      this->y_strides[1] = p.y_strides[0];
      this->batch = 1;
    } else if (p.x_strides[0] == p.rows * p.x_strides[1] && p.y_strides[0] == p.rows * p.y_strides[1]) {
      this->rows *= p.batch;
      this->batch = 1;
    }
  }
};

// How a product is cut into tasks: blocks of rows, counted through all batch entries, times groups of panels. Groups
// run fastest: the rows of a block stay in cache, and all threads work on the same ones.
struct cut {
  int64_t block = 0, blocks_ = 0;  // rows of a task; tasks along the rows
  int64_t group = 0, groups = 0;   // panels of a task; tasks along the outputs
  double us = 0;                   // of it all

  template <class Element>
  cut(const flat<Element>& p, int64_t threads, bool for_all = false) {  // for_all: some for each thread
    const int64_t rows = p.batch * p.rows, panels = p.w->panels();
    if (rows == 0) return;
    const auto cut_rows = [&](int64_t most, int64_t step) {
      block = round_up(blocks(rows, blocks(rows, most)), rows <= most ? 1 : step);
      blocks_ = blocks(rows, block);
    };
    const double bytes = static_cast<double>(p.w->panel_bytes()), flops = 2 * bytes / sizeof(Element);
    double of_panel;
    if (p.on_unit) {
      const int64_t step = p.w->unit_panels();
      // For many threads less is enough for a task, so that there is one for each.
      const auto too_few = [&](int64_t of_rows, int64_t of_panels) {
        return blocks(rows, of_rows) * blocks(panels, of_panels) < threads;
      };
      int64_t most = too_few(most_unit_rows, step) ? most_unit_rows / 2 : most_unit_rows;
      while (most > unit_rows && p.w->unit_scratch_bytes(most) > most_unit_bytes) most /= 2;
      cut_rows(most, unit_rows);
      of_panel = expected_us(flops * static_cast<double>(block) / p.w->unit_speed(), bytes);
      int64_t least = round_up(blocks(least_unit_outputs, p.w->width()), step);
      if (too_few(block, least)) least = step;
      const int64_t wanted = blocks(unit_tasks_per_thread * threads, blocks_);
      group = std::min(std::max(round_up(blocks(panels, wanted), step), least), panels);
      if (for_all) group = std::min(group, std::max(panels / threads / step * step, step));
    } else {
      cut_rows(linear<Element>::widens
                   ? std::clamp(most_wide_bytes / p.w->wide_bytes(row_step) * row_step, row_step, most_rows)
                   : most_rows,
               row_step);
      of_panel = expected_us(flops * static_cast<double>(block), bytes);
      group = std::min(static_cast<int64_t>(us_of_task / of_panel) + 1, panels);
      if (linear<Element>::widens && rows > 1) {
        const int64_t wanted = blocks(wide_tasks_per_thread * threads, blocks_);
        group = std::max(group, std::min(most_wide_panels, blocks(panels, wanted)));
      }
      if (for_all) group = std::min(group, std::max<int64_t>(panels / threads, 1));
    }
    groups = blocks(panels, group);
    us = of_panel * static_cast<double>(panels * blocks_);
  }
  int64_t tasks() const noexcept { return blocks_ * groups; }
};

// The order of n groups in which threads that take them in turn find each its own stretch: CPUs fetch lines in pairs,
// so threads that write panels beside each other take lines from each other. Two were 1.05 to 1.1 times as fast this
// way.
int64_t spread_out(int64_t i, int64_t n, int64_t threads) {
  const int64_t thread = i % threads;
  return thread * (n / threads) + std::min(thread, n % threads) + i / threads;
}

// `scratch`: see scratch_bytes().
template <class Element>
void run_part(const flat<Element>& p, const cut& c, int64_t task, int64_t turns, char* scratch) {
  const int64_t begin = task / c.groups * c.block, end = std::min(begin + c.block, p.batch * p.rows);
  const int64_t first = spread_out(task % c.groups, c.groups, turns) * c.group,
                last = std::min(first + c.group, p.w->panels());
  const auto for_entries = [&](const auto& run) {
    int64_t rows;
    for (int64_t row = begin; row < end; row += rows) {
      const int64_t entry = row / p.rows, i = row % p.rows;
      rows = std::min(end - row, p.rows - i);
      run(rows, p.x + entry * p.x_strides[0] + i * p.x_strides[1], p.y + entry * p.y_strides[0] + i * p.y_strides[1]);
    }
  };
  if (p.on_unit) {
    return for_entries([&](int64_t rows, const Element* x, Element* y) {
      p.w->run_on_unit(first, last, rows, x, p.x_strides[1], y, p.y_strides[1], scratch);
    });
  }
  for (int64_t panel = first; panel < last; ++panel) {
    char* wide = scratch;
    for_entries([&](int64_t rows, const Element* x, Element* y) {
      if (panel == first) p.w->widen(rows, x, p.x_strides[1], wide);
      p.w->run(panel, rows, x, p.x_strides[1], wide, y + panel * p.w->width(), p.y_strides[1]);
      wide += p.w->wide_bytes(rows);
    });
  }
}

// What run_part needs: the unit's x, or x widened.
template <class Element>
int64_t scratch_bytes(const flat<Element>& p, const cut& c) {
  return p.on_unit ? p.w->unit_scratch_bytes(c.block) : p.w->wide_bytes(c.block);
}

}  // namespace

template <class Element>
linear<Element>::linear(const kernel_table& table, int32_t dtype, int64_t out, int64_t in)
    : out_(out),
      in_(in),
      kernel_(table.dtype[dtype].linear),
      widen_(table.dtype[dtype].widen),
      unit_(table.dtype[dtype].linear_unit) {
  constexpr bool f64 = sizeof(Element) == 8;
  width_ = table.linear_width[f64];
  lanes_ = f64 ? table.lanes / 2 : table.lanes;
  const int64_t columns = round_up(out, lanes_);
  int64_t size;
  if (__builtin_mul_overflow(columns, in, &size)) throw std::bad_alloc();
  weight_ = buffer<Element>(size);
  bias_ = buffer<Element>(columns);
  std::fill_n(bias_.get(), columns, Element(0));
  // The columns that pad the last panel.
  const int64_t last = panels() - 1, pad = padded(last), used = out - last * width_;
  for (int64_t k = 0; k < in && used < pad; ++k) {
    std::fill_n(weight_.get() + last * width_ * in + k * pad + used, pad - used, Element(0));
  }
}

template <class Element>
int64_t linear<Element>::padded(int64_t panel) const noexcept {
  return std::min(width_, round_up(out_ - panel * width_, lanes_));
}

template <class Element>
void linear<Element>::set_row(int64_t row, const Element* from, int64_t stride) noexcept {
  const int64_t panel = row / width_, columns = padded(panel);
  Element* to = weight_.get() + panel * width_ * in_ + row % width_;
  for (int64_t k = 0; k < in_; ++k) to[k * columns] = from[k * stride];
}

template <class Element>
void linear<Element>::set_bias(const Element* from) noexcept {
  std::copy_n(from, out_, bias_.get());
}

template <class Element>
void linear<Element>::finish() {
  if (unit_.run == nullptr || std::min(in_, out_) < unit_.least_size) return;
  buffer<uint32_t> packed(unit_.weight_words(out_, in_));
  if (!unit_.pack_weights(weight_.get(), out_, in_, packed.get())) return;
  unit_weight_ = std::move(packed);
  if (unit_.alone) weight_ = {};
}

template <class Element>
bool linear<Element>::on_unit(int64_t rows_of_entry) const noexcept {
  return unit_weight_.get() != nullptr && rows_of_entry >= unit_.least_rows;
}

template <class Element>
int64_t linear<Element>::unit_panels() const noexcept {
  return std::lcm(width_, unit_rows) / width_;
}

template <class Element>
int64_t linear<Element>::unit_scratch_bytes(int64_t rows) const noexcept {
  return unit_.row_bytes(rows, in_) + round_up(rows, 64);
}

template <class Element>
void linear<Element>::run_on_unit(int64_t first, int64_t last, int64_t rows, const Element* x, int64_t x_stride,
                                  Element* y, int64_t y_stride, char* scratch) const {
  const int64_t column = first * width_;
  linear_unit_args a = {};
  a.x = x;
  a.x_stride = x_stride;
  a.rows = rows;
  a.in = in_;
  a.weights = unit_weight_.get() + unit_.weight_words(column, in_);
  a.bias = bias_.get() + column;
  a.y = y + column;
  a.y_stride = y_stride;
  a.columns = std::min(last * width_, out_) - column;
  a.scratch = scratch;
  a.left = reinterpret_cast<uint8_t*>(scratch + unit_.row_bytes(rows, in_));
  unit_.run(&a);
  // Rows that it left are widened where its x was, which is done with.
  const int64_t most = widens ? unit_.row_bytes(rows, in_) / wide_bytes(1) : rows;
  for (int64_t row = 0, end; row < rows; row = end) {
    for (end = row + 1; end < rows && end - row < most && a.left[end] == a.left[row];) ++end;
    if (a.left[row] == 0) continue;
    const Element* const from = x + row * x_stride;
    Element* const to = y + row * y_stride;
    widen(end - row, from, x_stride, scratch);
    for (int64_t panel = first; panel < last; ++panel)
      run(panel, end - row, from, x_stride, scratch, to + panel * width_, y_stride);
  }
}

template <class Element>
void linear<Element>::widen(int64_t rows, const Element* x, int64_t x_stride, char* wide) const noexcept {
  if (widens) widen_(x, x_stride, rows, in_, wide, odd_lines(in_, sizeof(float)));
}

template <class Element>
void linear<Element>::run(int64_t panel, int64_t rows, const Element* x, int64_t x_stride, const char* wide, Element* y,
                          int64_t y_stride) const {
  linear_args a = {};
  a.x = widens ? static_cast<const void*>(wide) : x;
  a.x_stride = widens ? odd_lines(in_, sizeof(float)) : x_stride;
  a.rows = rows;
  a.in = in_;
  a.weights = weight_.get() + panel * width_ * in_;
  a.bias = bias_.get() + panel * width_;
  a.y = y;
  a.y_stride = y_stride;
  a.columns = std::min(width_, out_ - panel * width_);
  kernel_(&a);
}

template <class Element>
int64_t multiplication<Element>::count_tasks(bool shares) {
  shares_ = shares;
  scratch_bytes_ = 0;
  int64_t tasks = 0;
  for (int64_t i = 0; i < count_; ++i) {
    const flat<Element> p(products_[i]);
    const cut c(p, threads_, shares);
    tasks += c.tasks();
    scratch_bytes_ = std::max(scratch_bytes_, scratch_bytes(p, c));
  }
  return tasks;
}

template <class Element>
multiplication<Element>::multiplication(const product<Element>* products, int64_t count, const mh_exec& exec)
    : products_(products), count_(count), threads_(usable_threads(exec)) {
  double us = 0, bytes = 0;
  bool few_rows = true;
  for (int64_t i = 0; i < count; ++i) {
    const flat<Element> p(products[i]);
    const cut c(p, threads_);
    us += c.us;
    bytes += static_cast<double>(p.w->bytes(p.on_unit));
    few_rows = few_rows && c.blocks_ <= 1 && (!p.on_unit || p.batch * p.rows <= unit_rows);
  }
  const double worth = std::max(1.0, us / us_of_thread), threads = static_cast<double>(threads_);

  // Weights that stay in L2, with room for those of the product that follows, are each read by the same core every time, if
  // there is enough for all threads. On 16 cores with 2 MB each 1.2 to 1.6 times as fast, on 8 1.2 to 1.7; on 4, where they
  // do not stay, 0.95 to 1.02. On as many threads as the work is worth, where that is fewer, 0.97 to 1.0.
  if (few_rows && threads_ > 1 && worth >= threads &&
      bytes <= 0.75 * threads * static_cast<double>(this_machine().l2_bytes)) {
    tasks_ = count_tasks(true);
  }
  if (tasks_ < threads_) {
    threads_ = static_cast<int64_t>(std::min(worth, threads));
    tasks_ = count_tasks(false);
  }
  workers_ = std::clamp<int64_t>(tasks_, 1, threads_);
  scratch_.emplace(thread_memory::of<class all_multiplications>(), scratch_bytes_ * workers_);
}

template <class Element>
void multiplication<Element>::run_task(void* self, int64_t task, int64_t worker) {
  const multiplication& m = *static_cast<const multiplication*>(self);
  for (const product<Element>* user = m.products_;; ++user) {
    const flat<Element> p(*user);
    const cut c(p, m.threads_, m.shares_);
    // In shares neighbours are one thread's as they are.
    if (task < c.tasks())
      return run_part(p, c, task, m.shares_ ? 1 : m.threads_, m.scratch_->get() + worker * m.scratch_bytes_);
    task -= c.tasks();
  }
}

template <class Element>
void multiplication<Element>::run(const mh_exec& exec, const watched_call& watched) {
  parallel_for(tasks_, workers_, exec, watched, phase_project, run_task, this, shares_);
}

template class linear<float>;
template class linear<double>;
template class linear<uint16_t>;
template class multiplication<float>;
template class multiplication<double>;
template class multiplication<uint16_t>;

}  // namespace manyhead
