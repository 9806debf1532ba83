// The multi-head layer. Creating it packs the weights; a run checks the call, projects x to q, k and v [batch, rows,
// heads * dim] in memory of its own, runs the ordinary plan for them, and projects the heads' results. Without an
// output projection, attention writes the caller's out itself.
#include "mha.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <initializer_list>
#include <new>

#include "blocks.hpp"
#include "check.hpp"
#include "machine.hpp"
#include "plan.hpp"
#include "pool.hpp"
#include "problem.hpp"
#include "projection.hpp"
#include "registry.hpp"
#include "scheduler.hpp"
#include "thread_memory.hpp"

namespace manyhead {

namespace {

bool all_zero(const int64_t* strides, int count) { return std::count(strides, strides + count, 0) == count; }

// ---- Weights ------------------------------------------------------------------------------------------------------

void forbid(const char* name, const void* data, const char* because) {
  if (data != nullptr) invalid(name, " is not NULL, but ", because);
}

void forbid_strides(const char* name, const int64_t* strides, int count, const char* because) {
  if (!all_zero(strides, count)) invalid(name, " are not zero, but ", because);
}

int64_t extra_keys(const mh_mha_weights& w) { return (w.bias_k != nullptr) + w.add_zero_attn; }

// Fills in the defaults; every field but pointers and strides has been checked then.
mh_mha_weights resolve(const mh_mha_weights& user) {
  mh_mha_weights w = user;
  check_dtype("dtype", w.dtype);
  check_enum("layout", w.layout, MH_WEIGHTS_PER_HEAD, "mh_weight_layout");
  check_bits("flags", w.flags, MH_FLAG_SCALE | MH_FLAG_STRIDES);
  check_bool("add_zero_attn", w.add_zero_attn);
  check_at_least("embed_dim", w.embed_dim, 1);
  check_at_least("k_embed_dim", w.k_embed_dim, 0);
  check_at_least("v_embed_dim", w.v_embed_dim, 0);
  check_at_least("out_dim", w.out_dim, 0);
  check_at_least("heads", w.heads, 1);
  if (w.k_embed_dim == 0) w.k_embed_dim = w.embed_dim;
  if (w.v_embed_dim == 0) w.v_embed_dim = w.k_embed_dim;
  if (w.head_dim == 0) {
    if (w.embed_dim % w.heads != 0) {
      invalid("heads is ", w.heads, ", must divide embed_dim = ", w.embed_dim, " where head_dim is 0");
    }
    w.head_dim = w.embed_dim / w.heads;
  }

  // What concerns attention alone is checked where every problem is.
  mh_problem p = {};
  p.struct_size = sizeof p;
  p.dtype = w.dtype;
  p.heads = w.heads;
  p.kv_heads = w.kv_heads;
  p.head_dim = w.head_dim;
  p.v_dim = w.v_dim;
  p.scale = w.scale;
  p.flags = w.flags & MH_FLAG_SCALE;
  const problem checked = validate(p);
  w.kv_heads = checked.kv_heads;
  w.v_dim = checked.v_dim;
  w.scale = checked.scale;

  check_shape({"the concatenation of the heads", nullptr, 2, dtype_size(w.dtype), {w.heads, w.v_dim}, {}});
  const int64_t concatenated = w.heads * w.v_dim;
  if (w.w_o == nullptr) {
    forbid("b_o", w.b_o, "w_o is NULL");
    forbid_strides("w_o_strides", w.w_o_strides, 2, "w_o is NULL");
    if (w.out_dim != 0 && w.out_dim != concatenated) {
      invalid("out_dim is ", w.out_dim, ", must be 0 or heads * v_dim = ", concatenated, " where w_o is NULL");
    }
    w.out_dim = concatenated;
  } else if (w.out_dim == 0) {
    w.out_dim = w.embed_dim;
  }

  if (w.in_proj != nullptr) {
    forbid("w_q", w.w_q, "in_proj is given");
    forbid("w_k", w.w_k, "in_proj is given");
    forbid("w_v", w.w_v, "in_proj is given");
    forbid_strides("w_q_strides", w.w_q_strides, 3, "in_proj is given");
    forbid_strides("w_k_strides", w.w_k_strides, 3, "in_proj is given");
    forbid_strides("w_v_strides", w.w_v_strides, 3, "in_proj is given");
    if (w.layout != MH_WEIGHTS_OUT_IN) invalid("layout is ", w.layout, ", must be MH_WEIGHTS_OUT_IN with in_proj");
  }
  if (w.in_proj_bias != nullptr) {
    forbid("b_q", w.b_q, "in_proj_bias is given");
    forbid("b_k", w.b_k, "in_proj_bias is given");
    forbid("b_v", w.b_v, "in_proj_bias is given");
  }
  if ((w.bias_k == nullptr) != (w.bias_v == nullptr)) {
    const bool k = w.bias_k != nullptr;
    invalid(k ? "bias_k" : "bias_v", " is not NULL, but ", k ? "bias_v" : "bias_k", " is: they go together");
  }
  const int64_t element = dtype_size(w.dtype);
  check_shape({"w_q", nullptr, 3, element, {w.heads, w.head_dim, w.embed_dim}, {}});
  check_shape({"w_k", nullptr, 3, element, {w.kv_heads, w.head_dim, w.k_embed_dim}, {}});
  check_shape({"w_v", nullptr, 3, element, {w.kv_heads, w.v_dim, w.v_embed_dim}, {}});
  if (w.w_o != nullptr) check_shape({"w_o", nullptr, 2, element, {w.out_dim, concatenated}, {}});
  return w;
}

// A projection's weights as [heads, dim, in], whatever their layout.
array in_matrix(const mh_mha_weights& w, const char* name, const void* data, int64_t heads, int64_t dim, int64_t in,
                const int64_t* strides) {
  const int64_t by_layout[3][3] = {{dim * in, in, 1}, {dim, 1, heads * dim}, {dim * in, 1, dim}};
  const bool taken = (w.flags & MH_FLAG_STRIDES) != 0 || !all_zero(strides, 3);
  return checked_array(name, data, dtype_size(w.dtype), {heads, dim, in}, taken ? strides : by_layout[w.layout], true);
}

array out_matrix(const mh_mha_weights& w) {
  const int64_t in = w.heads * w.v_dim;
  const bool taken = (w.flags & MH_FLAG_STRIDES) != 0 || !all_zero(w.w_o_strides, 2);
  const int64_t out_in[3] = {0, in, 1}, in_out[3] = {0, 1, w.out_dim};
  const int64_t given[3] = {0, w.w_o_strides[0], w.w_o_strides[1]};
  return checked_array("w_o", w.w_o, dtype_size(w.dtype), {1, w.out_dim, in},
                       taken                           ? given
                       : w.layout == MH_WEIGHTS_OUT_IN ? out_in
                                                       : in_out,
                       true);
}

template <class Element>
buffer<Element> copy_vector(const char* name, const void* data, int64_t size) {
  const int64_t dense[1] = {1};
  const array a = checked_array(name, data, sizeof(Element), {size}, dense, true);
  buffer<Element> copy(size);
  std::copy_n(static_cast<const Element*>(a.data), size, copy.get());
  return copy;
}

// matrix is [heads, dim, in].
template <class Element>
linear<Element> pack_linear(const kernel_table& table, int32_t dtype, const array& matrix, const char* bias_name,
                            const void* bias) {
  const int64_t dim = matrix.dims[1];
  linear<Element> to(table, dtype, matrix.dims[0] * dim, matrix.dims[2]);
  if (bias != nullptr) to.set_bias(copy_vector<Element>(bias_name, bias, to.out()).get());
  const Element* from = static_cast<const Element*>(matrix.data);
  for (int64_t row = 0; row < to.out(); ++row) {
    to.set_row(row, from + row / dim * matrix.strides[0] + row % dim * matrix.strides[1], matrix.strides[2]);
  }
  to.finish();
  return to;
}

// ---- Calls --------------------------------------------------------------------------------------------------------

// A matrix for each batch entry, [batch, rows, columns] with the elements of a row next to each other.
template <class Element>
struct rows_view {
  Element* data = nullptr;
  int64_t strides[2] = {};
};

template <class Element>
rows_view<const Element> read_only(const rows_view<Element>& v) {
  return {v.data, {v.strides[0], v.strides[1]}};
}

template <class Element>
product<Element> make_product(const linear<Element>& w, int64_t batch, int64_t rows, const rows_view<const Element>& x,
                              const rows_view<Element>& y) {
  return {&w, batch, rows, x.data, {x.strides[0], x.strides[1]}, y.data, {y.strides[0], y.strides[1]}};
}

// Lays out the matrices of one call in one piece of scratch memory.
template <class Element>
class scratch_layout {
 public:
  // Room for [batch, rows, columns]; sets view's strides, and place() its data.
  void add(rows_view<Element>& view, const char* name, int64_t batch, int64_t rows, int64_t columns) {
    const int64_t stride = odd_lines(columns, sizeof(Element));
    check_shape({name, nullptr, 3, sizeof(Element), {batch, rows, stride}, {}});
    view.strides[0] = rows * stride;
    view.strides[1] = stride;
    items_[count_++] = {&view, bytes_};
    if (__builtin_add_overflow(bytes_, batch * rows * stride * int64_t{sizeof(Element)}, &bytes_))
      throw std::bad_alloc();
  }
  int64_t bytes() const noexcept { return bytes_; }
  void place(char* memory) const noexcept {
    for (int i = 0; i < count_; ++i) items_[i].view->data = reinterpret_cast<Element*>(memory + items_[i].offset);
  }

 private:
  struct item {
    rows_view<Element>* view;
    int64_t offset;  // whole cache lines, as all strides are
  };
  item items_[8];
  int count_ = 0;
  int64_t bytes_ = 0;
};

// [batch, rows, columns] from one place to another, for arrays that products do not take as they are.
template <class Element>
void copy_rows(const Element* from, const int64_t* from_strides, Element* to, const int64_t* to_strides,
               const int64_t* dims, const mh_exec& exec, const watched_call& watched) {
  struct copy_work {
    const Element* from;
    Element* to;
    const int64_t *from_strides, *to_strides, *dims;
    int64_t blocks;
  };
  constexpr int64_t block = 64;
  copy_work work{from, to, from_strides, to_strides, dims, blocks(dims[1], block)};
  parallel_for(
      dims[0] * work.blocks, usable_threads(exec), exec, watched, phase_pack,
      [](void* arg, int64_t task, int64_t) {
        const copy_work& w = *static_cast<const copy_work*>(arg);
        const int64_t b = task / w.blocks, begin = task % w.blocks * block;
        for (int64_t r = begin; r < std::min(begin + block, w.dims[1]); ++r) {
          const Element* source = w.from + b * w.from_strides[0] + r * w.from_strides[1];
          Element* target = w.to + b * w.to_strides[0] + r * w.to_strides[1];
          for (int64_t c = 0; c < w.dims[2]; ++c) target[c * w.to_strides[2]] = source[c * w.from_strides[2]];
        }
      },
      &work);
}

// The arrays of a call, checked; strides filled in.
struct call_arrays {
  array x_q, x_k, x_v, out;
};

call_arrays check_call(const mh_mha_weights& w, const mh_mha_call& c) {
  check_at_least("batch", c.batch, 0);
  check_at_least("q_len", c.q_len, 0);
  check_at_least("kv_len", c.kv_len, 0);
  check_bits("flags", c.flags, MH_FLAG_STRIDES | MH_FLAG_WINDOW | MH_FLAG_FAST_EXP);
  check_zero("reserved0", c.reserved0);
  if (c.x_k == nullptr) {
    if (w.k_embed_dim != w.embed_dim) {
      invalid("x_k is NULL (self-attention), but k_embed_dim = ", w.k_embed_dim, " is not embed_dim = ", w.embed_dim);
    }
    if (c.kv_len != c.q_len) {
      invalid("kv_len is ", c.kv_len, ", must equal q_len = ", c.q_len, " where x_k is NULL (self-attention)");
    }
  }
  if (c.x_v == nullptr && w.v_embed_dim != w.k_embed_dim) {
    invalid("x_v is NULL (values from x_k), but v_embed_dim = ", w.v_embed_dim,
            " is not k_embed_dim = ", w.k_embed_dim);
  }
  const bool taken = (c.flags & MH_FLAG_STRIDES) != 0;
  const auto make = [&](const char* name, const void* data, int64_t rows, int64_t columns, const int64_t* strides) {
    return checked_array(name, data, dtype_size(w.dtype), {c.batch, rows, columns}, strides, taken);
  };
  call_arrays a;
  a.x_q = make("x_q", c.x_q, c.q_len, w.embed_dim, c.x_q_strides);
  a.x_k = c.x_k == nullptr ? a.x_q : make("x_k", c.x_k, c.kv_len, w.k_embed_dim, c.x_k_strides);
  a.x_v = c.x_v == nullptr ? a.x_k : make("x_v", c.x_v, c.kv_len, w.v_embed_dim, c.x_v_strides);
  a.out = make("out", c.out, c.q_len, w.out_dim, c.out_strides);
  check_distinct(a.out);
  return a;
}

// The outputs against what check_tensors did not see: the layer's own inputs and, where attention writes to scratch,
// the layer's out.
void check_overlaps(const call_arrays& a, const problem& p, const mh_tensors& t) {
  for (const array* x : {&a.x_q, &a.x_k, &a.x_v}) {
    check_apart(a.out, *x);
    check_apart_from_outputs(*x, p, t);
  }
  if (t.out != a.out.data) check_apart_from_all(a.out, p, t);
}

// Strides of [batch, heads, rows, dim] where heads lie next to each other in a row.
template <class Element>
void set_strides(int64_t* strides, const rows_view<Element>& view, int64_t dim) {
  strides[0] = view.strides[0];
  strides[1] = dim;
  strides[2] = view.strides[1];
  strides[3] = 1;
}

template <class Element>
class layer final : public mha {
 public:
  explicit layer(const mh_mha_weights& w) : sizes_(w), table_(current_isa()) {
    const int64_t q_out = w.heads * w.head_dim, k_out = w.kv_heads * w.head_dim, v_out = w.kv_heads * w.v_dim;
    const void *w_q = w.w_q, *w_k = w.w_k, *w_v = w.w_v;
    if (w.in_proj != nullptr) {
      const int64_t q_size = q_out * w.embed_dim, k_size = k_out * w.k_embed_dim, v_size = v_out * w.v_embed_dim;
      const int64_t dense[1] = {1};
      checked_array("in_proj", w.in_proj, sizeof(Element), {q_size + k_size + v_size}, dense, true);
      w_q = w.in_proj;
      w_k = static_cast<const Element*>(w_q) + q_size;
      w_v = static_cast<const Element*>(w_k) + k_size;
    }
    const void *b_q = w.b_q, *b_k = w.b_k, *b_v = w.b_v;
    if (w.in_proj_bias != nullptr) {
      const int64_t dense[1] = {1};
      checked_array("in_proj_bias", w.in_proj_bias, sizeof(Element), {q_out + k_out + v_out}, dense, true);
      b_q = w.in_proj_bias;
      b_k = static_cast<const Element*>(b_q) + q_out;
      b_v = static_cast<const Element*>(b_k) + k_out;
    }
    const array q = in_matrix(w, "w_q", w_q, w.heads, w.head_dim, w.embed_dim, w.w_q_strides);
    const array k = in_matrix(w, "w_k", w_k, w.kv_heads, w.head_dim, w.k_embed_dim, w.w_k_strides);
    const array v = in_matrix(w, "w_v", w_v, w.kv_heads, w.v_dim, w.v_embed_dim, w.w_v_strides);
    q_ = pack_linear<Element>(table_, w.dtype, q, "b_q", b_q);
    k_ = pack_linear<Element>(table_, w.dtype, k, "b_k", b_k);
    v_ = pack_linear<Element>(table_, w.dtype, v, "b_v", b_v);
    if (w.w_o != nullptr) out_ = pack_linear<Element>(table_, w.dtype, out_matrix(w), "b_o", w.b_o);
    if (w.bias_k != nullptr) {
      bias_k_ = copy_vector<Element>("bias_k", w.bias_k, k_out);
      bias_v_ = copy_vector<Element>("bias_v", w.bias_v, v_out);
    }
    forget(sizes_);
  }

  void run(const mh_mha_call& c, const mh_exec& exec) const override {
    const call_arrays a = check_call(sizes_, c);
    const int64_t keys = c.kv_len + extra_keys_;
    const bool projects = out_.out() > 0;

    rows_view<Element> q, k, v, heads, x_q_copy, x_k_copy, x_v_copy, out_copy;
    scratch_layout<Element> layout;
    layout.add(q, "the projection of x_q", c.batch, c.q_len, q_.out());
    layout.add(k, "the projection of x_k", c.batch, keys, k_.out());
    layout.add(v, "the projection of x_v", c.batch, keys, v_.out());
    if (projects) layout.add(heads, "the heads' results", c.batch, c.q_len, out_.in());
    const bool k_is_q = is_same(a.x_k, a.x_q), v_is_k = is_same(a.x_v, a.x_k), v_is_q = is_same(a.x_v, a.x_q);
    const auto add_copy = [&layout](rows_view<Element>& copy, const array& x) {
      if (!direct(x)) layout.add(copy, x.name, x.dims[0], x.dims[1], x.dims[2]);
    };
    add_copy(x_q_copy, a.x_q);
    if (!k_is_q) add_copy(x_k_copy, a.x_k);
    if (!v_is_q && !v_is_k) add_copy(x_v_copy, a.x_v);
    if (projects) add_copy(out_copy, a.out);
    const problem p = validate(attention_of(c, a, q, k, v, heads), extra_keys_);
    const borrowed_memory memory(thread_memory::of<mha>(), layout.bytes());
    layout.place(memory.get());
    mh_tensors t = {};
    t.struct_size = sizeof t;
    t.q = q.data;
    t.k = k.data;
    t.v = v.data;
    t.out = projects ? heads.data : c.out;
    t.mask = c.mask;
    t.bias = c.bias;
    t.key_mask = c.key_mask;
    t.seqused_k = c.seqused_k;
    t.q_offset = c.q_offsets;
    t.weights = c.weights;
    t.mean_weights = c.mean_weights;
    check_tensors(p, t);
    check_overlaps(a, p, t);
    if (c.batch == 0 || c.q_len == 0) return;
    const plan attention = make_plan(p, table_, this_machine());

    const double wide = static_cast<double>(sizes_.heads) * static_cast<double>(sizes_.head_dim + sizes_.v_dim);
    const double projected = 2.0 * static_cast<double>(sizes_.embed_dim) * wide * static_cast<double>(c.batch) *
                             static_cast<double>(c.q_len + c.kv_len) / (q_.on_unit(c.q_len) ? q_.unit_speed() : 1);
    const watched_call watched(
        usable_threads(exec), attention.expected_us + expected_us(projected, 0), [&](char* text, size_t size) {
          std::snprintf(text, size, "layer %s b%lld q%lld kv%lld embed_dim %lld heads %lld", dtype_name(sizes_.dtype),
                        static_cast<long long>(c.batch), static_cast<long long>(c.q_len),
                        static_cast<long long>(c.kv_len), static_cast<long long>(sizes_.embed_dim),
                        static_cast<long long>(sizes_.heads));
        });
    const rows_view<const Element> x_q = readable(a.x_q, x_q_copy, exec, watched);
    const rows_view<const Element> x_k = k_is_q ? x_q : readable(a.x_k, x_k_copy, exec, watched);
    const rows_view<const Element> x_v = v_is_q ? x_q : v_is_k ? x_k : readable(a.x_v, x_v_copy, exec, watched);
    const product<Element> in_products[] = {
        make_product(q_, c.batch, c.q_len, x_q, q),
        make_product(k_, c.batch, c.kv_len, x_k, k),
        make_product(v_, c.batch, c.kv_len, x_v, v),
    };
    multiplication<Element>(in_products, 3, exec).run(exec, watched);
    write_extra_keys(c, k, v);
    if (!projects) return manyhead::run(attention, t, exec, &watched);
    const bool copies = out_copy.data != nullptr;
    const rows_view<Element> out =
        copies ? out_copy : rows_view<Element>{static_cast<Element*>(c.out), {a.out.strides[0], a.out.strides[1]}};
    const product<Element> out_product = make_product(out_, c.batch, c.q_len, read_only(heads), out);
    multiplication<Element> last(&out_product, 1,
                                 exec);  // now: attention writes outputs, after which nothing may fail
    manyhead::run(attention, t, exec, &watched);
    last.run(exec, watched);
    if (copies) {
      const int64_t from[3] = {out.strides[0], out.strides[1], 1};
      copy_rows(static_cast<const Element*>(out.data), from, static_cast<Element*>(c.out), a.out.strides, a.out.dims,
                exec, watched);
    }
  }

 private:
  // The caller's arrays are not needed after packing, and not to be used.
  void forget(mh_mha_weights& w) {
    extra_keys_ = extra_keys(w);
    w.w_q = w.w_k = w.w_v = w.w_o = w.in_proj = nullptr;
    w.b_q = w.b_k = w.b_v = w.b_o = w.in_proj_bias = w.bias_k = w.bias_v = nullptr;
  }

  mh_problem attention_of(const mh_mha_call& c, const call_arrays& a, const rows_view<Element>& q,
                          const rows_view<Element>& k, const rows_view<Element>& v,
                          const rows_view<Element>& heads) const {
    mh_problem p = {};
    p.struct_size = sizeof p;
    p.batch = c.batch;
    p.heads = sizes_.heads;
    p.kv_heads = sizes_.kv_heads;
    p.q_len = c.q_len;
    p.kv_len = c.kv_len + extra_keys_;
    p.head_dim = sizes_.head_dim;
    p.v_dim = sizes_.v_dim;
    p.dtype = sizes_.dtype;
    p.flags = c.flags | MH_FLAG_SCALE;
    if (c.mask != nullptr) p.inputs |= MH_INPUT_MASK;
    if (c.bias != nullptr) p.inputs |= MH_INPUT_BIAS;
    if (c.key_mask != nullptr) p.inputs |= MH_INPUT_KEY_MASK;
    if (c.seqused_k != nullptr) p.inputs |= MH_INPUT_SEQUSED_K;
    if (c.q_offsets != nullptr) p.inputs |= MH_INPUT_Q_OFFSET;
    if (c.weights != nullptr) p.outputs |= MH_OUTPUT_WEIGHTS;
    if (c.mean_weights != nullptr) p.outputs |= MH_OUTPUT_MEAN_WEIGHTS;
    set_strides(p.q_strides, q, p.head_dim);
    set_strides(p.k_strides, k, p.head_dim);
    set_strides(p.v_strides, v, p.v_dim);
    set_strides(p.out_strides, heads, p.v_dim);
    if (out_.out() == 0) {
      const int64_t element = a.out.strides[2];
      const int64_t strides[4] = {a.out.strides[0], p.v_dim * element, a.out.strides[1], element};
      std::copy_n(strides, 4, p.out_strides);
    }
    p.scale = sizes_.scale;
    p.softcap = c.softcap;
    p.causal = c.causal;
    p.align = c.align;
    p.q_offset = c.q_offset;
    p.window_left = c.window_left;
    p.window_right = c.window_right;
    p.bias_dtype = c.bias_dtype;
    p.index_type = c.index_type;
    std::copy_n(c.mask_strides, 4, p.mask_strides);
    std::copy_n(c.bias_strides, 4, p.bias_strides);
    std::copy_n(c.key_mask_strides, 2, p.key_mask_strides);
    std::copy_n(c.weights_strides, 4, p.weights_strides);
    std::copy_n(c.mean_weights_strides, 3, p.mean_weights_strides);
    return p;
  }

  static bool direct(const array& x) { return x.strides[2] == 1; }

  // x as products take it: where it lies, or in the copy that there is room for.
  static rows_view<const Element> readable(const array& x, const rows_view<Element>& copy, const mh_exec& exec,
                                           const watched_call& watched) {
    const Element* data = static_cast<const Element*>(x.data);
    if (copy.data == nullptr) return {data, {x.strides[0], x.strides[1]}};
    const int64_t to[3] = {copy.strides[0], copy.strides[1], 1};
    copy_rows(data, x.strides, copy.data, to, x.dims, exec, watched);
    return read_only(copy);
  }

  void write_extra_keys(const mh_mha_call& c, const rows_view<Element>& k, const rows_view<Element>& v) const {
    for (int64_t extra = 0; extra < extra_keys_; ++extra) {
      const bool learned = extra == 0 && bias_k_.get() != nullptr;
      for (int64_t b = 0; b < c.batch; ++b) {
        const auto write = [&](const rows_view<Element>& to, const Element* from, int64_t size) {
          Element* row = to.data + b * to.strides[0] + (c.kv_len + extra) * to.strides[1];
          learned ? std::copy_n(from, size, row) : std::fill_n(row, size, Element(0));
        };
        write(k, bias_k_.get(), k_.out());
        write(v, bias_v_.get(), v_.out());
      }
    }
  }

  mh_mha_weights sizes_;       // and scale; no arrays
  const kernel_table& table_;  // of when the layer was made, as for a plan: the weights are packed for it
  int64_t extra_keys_;
  linear<Element> q_, k_, v_, out_;
  buffer<Element> bias_k_, bias_v_;
};

}  // namespace

std::unique_ptr<const mha> make_mha(const mh_mha_weights& weights) {
  const mh_mha_weights w = resolve(weights);
  const int64_t element = dtype_size(w.dtype);
  if (element == sizeof(double)) return std::make_unique<layer<double>>(w);
  if (element == sizeof(float)) return std::make_unique<layer<float>>(w);
  return std::make_unique<layer<uint16_t>>(w);
}

}  // namespace manyhead
