// See problem.hpp. Every tensor is one row of operand_list; the checks of shapes, strides, pointers and overlaps walk
// it.
#include "problem.hpp"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "check.hpp"
#include "kernels/kernel_api.hpp"
#include "kernels/positions.hpp"

namespace manyhead {
namespace {

// Positions are sums and differences of an offset, a window bound and indices (< 2^59, see check_arrays):
// these limits keep them below 2^63.
constexpr int64_t max_offset = (int64_t{1} << 62) - 1;
constexpr int64_t max_window = int64_t{1} << 61;

constexpr uint32_t known_flags = MH_FLAG_SCALE | MH_FLAG_STRIDES | MH_FLAG_WINDOW | MH_FLAG_FAST_EXP;
constexpr uint32_t known_inputs = MH_INPUT_MASK | MH_INPUT_BIAS | MH_INPUT_KEY_MASK | MH_INPUT_SEQUSED_K |
                                  MH_INPUT_Q_OFFSET | MH_INPUT_ALIBI | MH_INPUT_SINKS;
constexpr uint32_t known_outputs =
    MH_OUTPUT_LSE | MH_OUTPUT_WEIGHTS | MH_OUTPUT_MEAN_WEIGHTS | MH_OUTPUT_COLUMN_SUMS | MH_OUTPUT_SCORES;

struct operand {
  array a;                 // strides not filled in
  const int64_t* strides;  // a.rank of them
  bool own_strides;        // they are a field of mh_problem, zeros mean contiguous
  bool output;
  uint32_t bit;  // of inputs or outputs; 0 = always there
  const char* bit_name;

  bool present(const problem& p) const noexcept { return bit == 0 || ((output ? p.outputs : p.inputs) & bit) != 0; }
};

constexpr int operand_count = std::size(problem{}.extents);
constexpr int64_t dense[1] = {1};

// Every tensor of mh_tensors, in its order, with the dims that manyhead.h gives. Masks, biases and lengths do not describe
// the extra keys.
struct operand_list {
  int64_t slopes_strides[2];  // the only ones that mh_problem gives in another form
  operand items[operand_count];

  operand_list(const problem& p, const mh_tensors& t) noexcept : slopes_strides{p.alibi_batch_stride, 1} {
    const int64_t io = dtype_size(p.dtype), real = real_size(p.dtype), bias = dtype_size(p.bias_dtype);
    const int64_t index = p.index_type == MH_INDEX_I64 ? 8 : 4;
    const int64_t b = p.batch, h = p.heads, g = p.kv_heads, m = p.q_len, n = p.kv_len, own = n - p.extra_keys;
    const auto in = [](array a, const int64_t* strides, uint32_t bit = 0, const char* bit_name = "") {
      return operand{a, strides, true, false, bit, bit_name};
    };
    const auto fixed = [](array a, const int64_t* strides, uint32_t bit, const char* bit_name) {
      return operand{a, strides, false, false, bit, bit_name};
    };
    const auto out = [](array a, const int64_t* strides, uint32_t bit = 0, const char* bit_name = "") {
      return operand{a, strides, true, true, bit, bit_name};
    };
    const operand all[] = {
        in({"q", t.q, 4, io, {b, h, m, p.head_dim}, {}}, p.q_strides),
        in({"k", t.k, 4, io, {b, g, n, p.head_dim}, {}}, p.k_strides),
        in({"v", t.v, 4, io, {b, g, n, p.v_dim}, {}}, p.v_strides),
        out({"out", t.out, 4, io, {b, h, m, p.v_dim}, {}}, p.out_strides),
        in({"mask", t.mask, 4, 1, {b, h, m, own}, {}}, p.mask_strides, MH_INPUT_MASK, "MH_INPUT_MASK"),
        in({"bias", t.bias, 4, bias, {b, h, m, own}, {}}, p.bias_strides, MH_INPUT_BIAS, "MH_INPUT_BIAS"),
        in({"key_mask", t.key_mask, 2, 1, {b, own}, {}}, p.key_mask_strides, MH_INPUT_KEY_MASK, "MH_INPUT_KEY_MASK"),
        fixed({"seqused_k", t.seqused_k, 1, index, {b}, {}}, dense, MH_INPUT_SEQUSED_K, "MH_INPUT_SEQUSED_K"),
        fixed({"q_offset", t.q_offset, 1, index, {b}, {}}, dense, MH_INPUT_Q_OFFSET, "MH_INPUT_Q_OFFSET"),
        fixed({"alibi_slopes", t.alibi_slopes, 2, real, {b, h}, {}}, slopes_strides, MH_INPUT_ALIBI, "MH_INPUT_ALIBI"),
        fixed({"sinks", t.sinks, 1, real, {h}, {}}, dense, MH_INPUT_SINKS, "MH_INPUT_SINKS"),
        out({"lse", t.lse, 3, real, {b, h, m}, {}}, p.lse_strides, MH_OUTPUT_LSE, "MH_OUTPUT_LSE"),
        out({"weights", t.weights, 4, real, {b, h, m, n}, {}}, p.weights_strides, MH_OUTPUT_WEIGHTS,
            "MH_OUTPUT_WEIGHTS"),
        out({"mean_weights", t.mean_weights, 3, real, {b, m, n}, {}}, p.mean_weights_strides, MH_OUTPUT_MEAN_WEIGHTS,
            "MH_OUTPUT_MEAN_WEIGHTS"),
        out({"column_sums", t.column_sums, 3, real, {b, h, n}, {}}, p.column_sums_strides, MH_OUTPUT_COLUMN_SUMS,
            "MH_OUTPUT_COLUMN_SUMS"),
        out({"scores", t.scores, 4, real, {b, h, m, n}, {}}, p.scores_strides, MH_OUTPUT_SCORES, "MH_OUTPUT_SCORES"),
    };
    static_assert(std::size(all) == operand_count);
    std::copy(std::begin(all), std::end(all), items);
    for (operand& o : items) std::copy_n(o.strides, o.a.rank, o.a.strides);
  }
};

void check_dims(problem& p) {
  check_at_least("batch", p.batch, 0);
  check_at_least("heads", p.heads, 1);
  check_at_least("kv_heads", p.kv_heads, 0);
  check_at_least("q_len", p.q_len, 0);
  check_at_least("kv_len", p.kv_len, 0);
  check_at_least("head_dim", p.head_dim, 1);
  check_at_least("v_dim", p.v_dim, 0);
  if (p.kv_heads == 0) p.kv_heads = p.heads;
  if (p.v_dim == 0) p.v_dim = p.head_dim;
  if (p.heads % p.kv_heads != 0) invalid("kv_heads is ", p.kv_heads, ", must divide heads = ", p.heads);
  if (p.extra_keys < 0 || p.extra_keys > p.kv_len) {
    invalid("extra_keys is ", p.extra_keys, ", must be 0..kv_len = ", p.kv_len);
  }
}

void check_enums(problem& p) {
  check_dtype("dtype", p.dtype);
  check_bits("flags", p.flags, known_flags);
  check_bits("inputs", p.inputs, known_inputs);
  check_bits("outputs", p.outputs, known_outputs);
  check_bool("causal", p.causal);
  check_enum("align", p.align, MH_ALIGN_OFFSET, "mh_align");
  check_enum("alibi_mode", p.alibi_mode, MH_ALIBI_SIGNED, "mh_alibi_mode");
  check_enum("lse_base", p.lse_base, MH_LSE_BASE2, "mh_lse_base");
  check_enum("scores_stage", p.scores_stage, MH_SCORES_BIASED, "mh_score_stage");
  check_dtype("bias_dtype", p.bias_dtype);
  check_enum("index_type", p.index_type, MH_INDEX_I64, "mh_index_type");
  check_zero("reserved0", p.reserved0);
  if (p.alibi_mode != MH_ALIBI_ABS && !p.has_input(MH_INPUT_ALIBI)) {
    invalid("alibi_mode is ", p.alibi_mode, ", but inputs lacks MH_INPUT_ALIBI");
  }
  if (p.scores_stage != MH_SCORES_RAW && !p.has_output(MH_OUTPUT_SCORES)) {
    invalid("scores_stage is ", p.scores_stage, ", but outputs lacks MH_OUTPUT_SCORES");
  }
  if (p.lse_base != MH_LSE_NATURAL && !p.has_output(MH_OUTPUT_LSE)) {
    invalid("lse_base is ", p.lse_base, ", but outputs lacks MH_OUTPUT_LSE");
  }
  if (p.alibi_batch_stride != 0 && !p.has_input(MH_INPUT_ALIBI)) {
    invalid("alibi_batch_stride is ", p.alibi_batch_stride, ", but inputs lacks MH_INPUT_ALIBI");
  }
}

// Both numbers reach the kernels as float, or double for f64: what would become infinite there is refused, and a softcap that
// would become 0.
void check_numbers(problem& p) {
  const double largest = p.is_f64() ? DBL_MAX : FLT_MAX, smallest = p.is_f64() ? DBL_MIN : FLT_MIN;
  if (!(std::fabs(p.scale) <= largest / log2e)) {
    invalid("scale is ", p.scale, ", must be a finite number of the arithmetic (f64 for f64, else f32)");
  }
  if (p.softcap != 0 && !(p.softcap >= smallest && p.softcap <= largest)) {
    invalid("softcap is ", p.softcap, ", must be 0 (off) or a positive finite number");
  }
  if (p.scale == 0 && (p.flags & MH_FLAG_SCALE) == 0) p.scale = default_scale(p.head_dim);
  p.flags |= MH_FLAG_SCALE;
}

void check_window_bound(const char* name, int64_t bound) {
  if (bound < -1 || bound > max_window) invalid(name, " is ", bound, ", must be -1 (no bound) or 0..2^61");
}

// Windows, causal, ALiBi: what makes the position of a row matter, and then where row 0 stands.
void check_positions(problem& p) {
  check_window_bound("window_left", p.window_left);
  check_window_bound("window_right", p.window_right);
  if ((p.flags & MH_FLAG_WINDOW) == 0) {
    const bool unset = p.window_left == 0 && p.window_right == 0;
    const bool unbounded = p.window_left == -1 && p.window_right == -1;
    if (!unset && !unbounded) {
      invalid("window_left is ", p.window_left, " and window_right is ", p.window_right,
              ", but flags lacks MH_FLAG_WINDOW");
    }
    p.window_left = p.window_right = -1;
  }
  const bool window = p.has_window();
  p.flags = window ? p.flags | MH_FLAG_WINDOW : p.flags & ~MH_FLAG_WINDOW;

  const bool array = p.has_input(MH_INPUT_Q_OFFSET);
  if (array && p.align != MH_ALIGN_OFFSET) {
    invalid("align is ", p.align, ", must be MH_ALIGN_OFFSET with MH_INPUT_Q_OFFSET");
  }
  if (p.q_offset != 0 && (array || p.align != MH_ALIGN_OFFSET)) {
    invalid("q_offset is ", p.q_offset, ", must be 0 ",
            array ? "with MH_INPUT_Q_OFFSET" : "where align is not MH_ALIGN_OFFSET");
  }
  if (p.q_offset < -max_offset || p.q_offset > max_offset) {
    invalid("q_offset is ", p.q_offset, ", must be between -2^62 and 2^62");
  }

  if (p.align == MH_ALIGN_UNSET) {
    const char* user = p.causal ? "causal" : window ? "a window" : p.has_input(MH_INPUT_ALIBI) ? "ALiBi" : nullptr;
    if (user != nullptr && p.q_len != p.kv_len - p.extra_keys) {
      invalid("align is MH_ALIGN_UNSET, but with ", user, " and q_len = ", p.q_len,
              " unequal kv_len = ", p.kv_len - p.extra_keys,
              " it must be MH_ALIGN_TOP_LEFT or MH_ALIGN_BOTTOM_RIGHT (or MH_ALIGN_OFFSET with q_offset)");
    }
    p.align = MH_ALIGN_TOP_LEFT;
  }
}

// The extents of outputs, or of inputs, which check_strides has found to be without overflow.
void add_extents(problem& p, const operand_list& list, bool outputs) {
  for (const operand& o : list.items) {
    if (o.output != outputs || !o.present(p) || is_empty(o.a)) continue;
    problem::extent& x = p.extents[p.extent_count++];
    x = {0, 0, static_cast<int32_t>(&o - list.items), static_cast<int32_t>(o.a.element)};
    reach(o.a, x.begin, x.end);
    x.end += o.a.element;
  }
}

void check_arrays(problem& p) {
  // Even where no array of scores is written: so that sums over rows and keys cannot overflow anywhere.
  if (!fits({"", nullptr, 4, 8, {p.batch, p.heads, p.q_len, p.kv_len}, {}})) {
    invalid("batch = ", p.batch, " x heads = ", p.heads, " x q_len = ", p.q_len, " x kv_len = ", p.kv_len,
            " overflows");
  }
  const bool taken = (p.flags & MH_FLAG_STRIDES) != 0;
  const mh_tensors none = {};
  operand_list list(p, none);
  for (operand& o : list.items) {
    int64_t* own = const_cast<int64_t*>(o.strides);  // a field of p, or not written
    if (!o.present(p)) {
      if (o.own_strides) std::fill_n(own, o.a.rank, 0);
      continue;
    }
    check_shape(o.a);
    if (o.own_strides) {
      complete_strides(o.a, taken);
      std::copy_n(o.a.strides, o.a.rank, own);
    }
    check_strides(o.a);
    if (o.output) check_distinct(o.a);
  }
  add_extents(p, list, true);
  p.output_count = p.extent_count;
  add_extents(p, list, false);
  p.flags |= MH_FLAG_STRIDES;
}

void check_indices(const problem& p, const mh_tensors& t) {
  const int64_t most = p.kv_len - p.extra_keys;
  for (int64_t b = 0; p.has_input(MH_INPUT_SEQUSED_K) && b < p.batch; ++b) {
    const int64_t used = index_at(t.seqused_k, p.index_type, b);
    if (used < 0 || used > most) invalid("seqused_k[", b, "] is ", used, ", must be 0..", most);
  }
  for (int64_t b = 0; p.has_input(MH_INPUT_Q_OFFSET) && b < p.batch; ++b) {
    const int64_t offset = index_at(t.q_offset, p.index_type, b);
    if (offset < -max_offset || offset > max_offset) {
      invalid("q_offset[", b, "] is ", offset, ", must be between -2^62 and 2^62");
    }
  }
}

// Every pointer, one by one.
void check_pointers(const problem& p, const mh_tensors& t) {
  const operand_list list(p, t);
  for (const operand& o : list.items) {
    if (o.present(p)) {
      check_pointer(o.a);
    } else if (o.a.data != nullptr) {
      invalid(o.a.name, " is not NULL, but the problem's ", o.output ? "outputs" : "inputs", " lacks ", o.bit_name);
    }
  }
  for (const operand& o : list.items) {
    if (!o.output || !o.present(p)) continue;
    for (const operand& other : list.items) {
      if (other.present(p) && (!other.output || &other < &o)) check_apart(o.a, other.a);
    }
  }
}

// Whether the pointers are so plainly good that nothing else need be looked at, as in nearly every call: in place and
// aligned where there are bytes, NULL elsewhere, and outputs whose range of addresses is no other's. The checks that
// say what is wrong, and find holes in ranges, take most of a microsecond.
bool plainly_good(const problem& p, const mh_tensors& t) noexcept {
  static_assert(sizeof t == sizeof t.struct_size + operand_count * sizeof(void*));
  // One by one: t was just written by vectors, from which a load of parts of two would wait.
  const auto address_at = [&t](int place) {
    uintptr_t address;
    std::memcpy(&address,
                reinterpret_cast<const char*>(&t) + sizeof t.struct_size + static_cast<size_t>(place) * sizeof address,
                sizeof address);
    return address;
  };
  int given = 0;
#pragma GCC unroll 16
  for (int i = 0; i < operand_count; ++i) given += address_at(i) != 0;
  if (given != p.extent_count) return false;
  struct {
    uintptr_t begin, end;
  } range[operand_count];
  for (int i = 0; i < p.extent_count; ++i) {
    const problem::extent& x = p.extents[i];
    const uintptr_t address = address_at(x.place);
    if (address == 0 || (address & (static_cast<uintptr_t>(x.element) - 1)) != 0) return false;
    range[i] = {address + static_cast<uintptr_t>(x.begin), address + static_cast<uintptr_t>(x.end)};
    if (range[i].begin > address || range[i].end <= address) return false;  // leaves the address space
  }
  for (int i = 0; i < p.output_count; ++i) {
    for (int j = i + 1; j < p.extent_count; ++j) {
      if (range[i].begin < range[j].end && range[j].begin < range[i].end) return false;
    }
  }
  return true;
}

}  // namespace

double default_scale(int64_t head_dim) noexcept { return 1 / std::sqrt(static_cast<double>(head_dim)); }

problem validate(const mh_problem& user, int64_t extra_keys) {
  problem p;
  static_cast<mh_problem&>(p) = read_struct(&user, offsetof(mh_problem, q_strides), "problem");
  p.extra_keys = extra_keys;
  check_dims(p);
  check_enums(p);
  check_numbers(p);
  check_positions(p);
  check_arrays(p);
  return p;
}

mh_tensors check_tensors(const problem& p, const mh_tensors& user) {
  const mh_tensors t = read_struct(&user, offsetof(mh_tensors, mask), "tensors");
  if (!plainly_good(p, t)) check_pointers(p, t);
  check_indices(p, t);
  return t;
}

void check_workspace(const problem& p, const mh_tensors& tensors, const mh_exec& exec) {
  if (exec.workspace == nullptr) return;
  const auto size = static_cast<int64_t>(std::min<size_t>(exec.workspace_size, INT64_MAX));
  const array workspace = {"workspace", exec.workspace, 1, 1, {size}, {1}};
  check_shape(workspace);
  check_pointer(workspace);
  check_apart_from_all(workspace, p, tensors);
}

void check_apart_from_all(const array& written, const problem& p, const mh_tensors& tensors) {
  const operand_list list(p, tensors);
  for (const operand& o : list.items) {
    if (o.present(p)) check_apart(written, o.a);
  }
}

void check_apart_from_outputs(const array& read, const problem& p, const mh_tensors& tensors) {
  const operand_list list(p, tensors);
  for (const operand& o : list.items) {
    if (o.output && o.present(p)) check_apart(o.a, read);
  }
}

}  // namespace manyhead
