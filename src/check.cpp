// See check.hpp.
#include "check.hpp"

#include <algorithm>
#include <cstdint>

#include "kernels/kernel_api.hpp"

namespace manyhead {
namespace {

constexpr int64_t max_bytes = int64_t{1} << 62;  // so that sums and differences of two of them cannot overflow

constexpr struct {
  const char* name;
  int64_t size;
} dtypes[] = {{"f32", 4}, {"f64", 8}, {"bf16", 2}, {"f16", 2}};
static_assert(std::size(dtypes) == dtype_count, "a row for each mh_dtype");

bool is_dtype(int32_t dtype) noexcept { return dtype >= 0 && dtype < dtype_count; }

std::string list(const int64_t* values, int count) {
  std::string text = "[";
  for (int i = 0; i < count; ++i) {
    if (i > 0) text += ", ";
    append(text, values[i]);
  }
  return text + "]";
}

// A summand stride * c of an address difference, with c in [least, most] and stride > 0.
struct term {
  int64_t stride, least, most;
};

int64_t floor_div(int64_t a, int64_t b) noexcept { return a / b - (a % b < 0); }  // b > 0

// Whether target is a sum of the terms, which are sorted by falling stride. What the later terms can add up to leaves
// few values for the coefficient of the first: one to three where strides are nested, as in views of ordinary arrays.
bool is_sum(const term* terms, int count, int64_t target, int& steps) noexcept {
  if (count == 0) return target == 0;
  if (--steps < 0) return true;
  int64_t rest_least = 0, rest_most = 0;
  for (int i = 1; i < count; ++i) {
    rest_least += terms[i].stride * terms[i].least;
    rest_most += terms[i].stride * terms[i].most;
  }
  const int64_t first = std::max(terms[0].least, -floor_div(rest_most - target, terms[0].stride));
  const int64_t last = std::min(terms[0].most, floor_div(target - rest_least, terms[0].stride));
  for (int64_t c = first; c <= last; ++c) {
    if (is_sum(terms + 1, count - 1, target - terms[0].stride * c, steps)) return true;
  }
  return false;
}

}  // namespace

const char* dtype_name(int32_t dtype) noexcept { return is_dtype(dtype) ? dtypes[dtype].name : nullptr; }

int64_t dtype_size(int32_t dtype) noexcept { return is_dtype(dtype) ? dtypes[dtype].size : 0; }

void check_enum(const char* name, int32_t value, int32_t last, const char* type) {
  if (value < 0 || value > last) invalid(name, " is ", value, ", must be an ", type, ", 0..", last);
}

void check_dtype(const char* name, int32_t value) { check_enum(name, value, dtype_count - 1, "mh_dtype"); }

void check_bool(const char* name, int32_t value) {
  if (value != 0 && value != 1) invalid(name, " is ", value, ", must be 0 or 1");
}

void check_bits(const char* name, uint32_t value, uint32_t known) {
  if ((value & ~known) != 0) invalid(name, " is ", value, ", has unknown bits ", value & ~known);
}

void check_zero(const char* name, int32_t value) {
  if (value != 0) invalid(name, " is ", value, ", must be 0");
}

void check_at_least(const char* name, int64_t value, int64_t least) {
  if (value < least) invalid(name, " is ", value, ", must be >= ", least);
}

void read_bytes(void* to, size_t size, size_t least, const void* from, const char* name) {
  constexpr size_t most = 4096;  // no version will be longer; protects from reading far on where struct_size is rubbish
  if (from == nullptr) invalid(name, " is NULL");
  size_t given;
  std::memcpy(&given, from, sizeof given);
  if (given < least || given > most || given % sizeof(int64_t) != 0) {
    invalid(name, ".struct_size is ", given, ", must be sizeof the struct, here ", size);
  }
  std::memset(to, 0, size);
  std::memcpy(to, from, std::min(given, size));
  for (size_t i = size; i < given; ++i) {
    if (static_cast<const unsigned char*>(from)[i] != 0) {
      fail(MH_UNSUPPORTED, name, " has byte ", i, " set, which this version of manyhead does not know (struct_size is ",
           given, ", known are ", size, ")");
    }
  }
}

array checked_array(const char* name, const void* data, int64_t element, std::initializer_list<int64_t> dims,
                    const int64_t* strides, bool taken) {
  array a = {name, data, static_cast<int>(dims.size()), element, {}, {}};
  std::copy(dims.begin(), dims.end(), a.dims);
  std::copy_n(strides, a.rank, a.strides);
  check_shape(a);
  complete_strides(a, taken);
  check_strides(a);
  check_pointer(a);
  return a;
}

bool is_empty(const array& a) noexcept { return std::count(a.dims, a.dims + a.rank, 0) != 0; }

bool is_same(const array& a, const array& b) noexcept {
  return a.data == b.data && std::equal(a.dims, a.dims + a.rank, b.dims) &&
         std::equal(a.strides, a.strides + a.rank, b.strides);
}

bool reach(const array& a, int64_t& lowest, int64_t& highest) noexcept {
  lowest = highest = 0;
  if (is_empty(a)) return true;
  for (int i = 0; i < a.rank; ++i) {
    int64_t span;
    if (__builtin_mul_overflow(a.dims[i] - 1, a.strides[i], &span)) return false;
    if (__builtin_mul_overflow(span, a.element, &span)) return false;
    int64_t& end = span < 0 ? lowest : highest;
    if (__builtin_add_overflow(end, span, &end)) return false;
  }
  return highest < max_bytes && lowest > -max_bytes && highest - lowest < max_bytes - a.element;
}

bool fits(const array& a) noexcept {
  int64_t bytes = a.element;
  for (int i = 0; i < a.rank; ++i) {
    if (__builtin_mul_overflow(bytes, std::max<int64_t>(a.dims[i], 1), &bytes) || bytes >= max_bytes) return false;
  }
  return true;
}

void check_shape(const array& a) {
  if (!fits(a)) invalid(a.name, " has shape ", list(a.dims, a.rank), ", whose size in bytes overflows");
}

void complete_strides(array& a, bool taken) {
  taken = taken || std::count(a.strides, a.strides + a.rank, 0) != a.rank;
  int64_t contiguous = 1;
  for (int i = a.rank - 1; i >= 0; --i) {
    if (!taken || a.dims[i] <= 1) a.strides[i] = contiguous;
    contiguous *= std::max<int64_t>(a.dims[i], 1);  // check_shape: fits
  }
}

void check_strides(const array& a) {
  int64_t lowest, highest;
  if (!reach(a, lowest, highest)) {
    invalid(a.name, "_strides are ", list(a.strides, a.rank), ", with shape ", list(a.dims, a.rank), " and ", a.element,
            " bytes an element ", a.name, " would reach over more than 2^62 bytes");
  }
}

// Each stride must step over everything that the smaller ones together reach. Strides of a C-ordered array do, and
// slicing, stepping, transposing and reversing keep it so: a step makes a stride larger and leaves fewer elements.
void check_distinct(const array& a) {
  if (is_empty(a)) return;
  const auto size = [&a](int i) { return a.strides[i] < 0 ? -a.strides[i] : a.strides[i]; };
  for (int i = 0; i < a.rank; ++i) {
    if (a.dims[i] == 1) continue;
    int64_t reached = 0;
    for (int j = 0; j < a.rank; ++j) {
      if (j != i && size(j) <= size(i)) reached += size(j) * (a.dims[j] - 1);
    }
    if (size(i) <= reached) {
      invalid(a.name, "_strides are ", list(a.strides, a.rank), ", elements of ", a.name, " with shape ",
              list(a.dims, a.rank), " would share memory, which those of an output must not");
    }
  }
}

void check_pointer(const array& a) {
  if (is_empty(a)) return;
  if (a.data == nullptr) invalid(a.name, " is NULL, must point to an array of shape ", list(a.dims, a.rank));
  const auto address = reinterpret_cast<uintptr_t>(a.data);
  if (address % static_cast<uintptr_t>(a.element) != 0) {
    invalid(a.name, " is at address ", address, ", must be a multiple of ", a.element);
  }
  int64_t lowest, highest;
  reach(a, lowest, highest);
  const uintptr_t below = static_cast<uintptr_t>(-lowest);
  const uintptr_t above = static_cast<uintptr_t>(highest) + static_cast<uintptr_t>(a.element) - 1;
  if (address < below || address > UINTPTR_MAX - above) {
    invalid(a.name, " is at address ", address, ", with strides ", list(a.strides, a.rank), " and shape ",
            list(a.dims, a.rank), " it would leave the address space");
  }
}

// A byte is shared where a's address + sum of a's index * stride + byte equals the same of b. With everything on one
// side that is a question about one sum of terms; strides that a and b have in common, as views of one buffer do, make
// one term.
bool share_memory(const array& a, const array& b) noexcept {
  if (is_empty(a) || is_empty(b)) return false;
  const auto address_a = reinterpret_cast<uintptr_t>(a.data), address_b = reinterpret_cast<uintptr_t>(b.data);
  int64_t lowest_a, highest_a, lowest_b, highest_b;
  reach(a, lowest_a, highest_a);
  reach(b, lowest_b, highest_b);
  const uintptr_t begin_a = address_a + static_cast<uintptr_t>(lowest_a);
  const uintptr_t begin_b = address_b + static_cast<uintptr_t>(lowest_b);
  if (begin_a < begin_b ? begin_b - begin_a >= static_cast<uintptr_t>(highest_a - lowest_a + a.element)
                        : begin_a - begin_b >= static_cast<uintptr_t>(highest_b - lowest_b + b.element)) {
    return false;
  }

  term terms[11];
  int count = 0;
  const auto add = [&](int64_t stride, int64_t least, int64_t most) {
    if (stride == 0 || least == most) return;  // a broadcast dimension of an input, or one element: nothing to choose
    if (stride < 0) {
      stride = -stride;
      std::swap(least, most);
      least = -least;
      most = -most;
    }
    int i = 0;
    while (i < count && terms[i].stride > stride) ++i;
    if (i < count && terms[i].stride == stride) {
      terms[i].least += least;
      terms[i].most += most;
      return;
    }
    std::copy_backward(terms + i, terms + count, terms + count + 1);
    terms[i] = {stride, least, most};
    ++count;
  };
  for (int i = 0; i < a.rank; ++i) add(a.strides[i] * a.element, 0, a.dims[i] - 1);
  for (int i = 0; i < b.rank; ++i) add(b.strides[i] * b.element, 1 - b.dims[i], 0);
  add(1, 1 - b.element, a.element - 1);
  int steps = 10000;
  return is_sum(terms, count, static_cast<int64_t>(address_b - address_a), steps);
}

void check_apart(const array& written, const array& other) {
  if (share_memory(written, other)) {
    invalid(written.name, " overlaps ", other.name, ", what is written must not share memory with another array");
  }
}

}  // namespace manyhead
