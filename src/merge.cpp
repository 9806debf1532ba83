// See merge.hpp.
#include "merge.hpp"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <initializer_list>

#include "blocks.hpp"
#include "check.hpp"
#include "plan.hpp"
#include "pool.hpp"
#include "registry.hpp"
#include "scheduler.hpp"

namespace manyhead {
namespace {

void check_sizes(const mh_merge& m) {
  check_at_least("states", m.states, 0);
  check_at_least("batch", m.batch, 0);
  check_at_least("heads", m.heads, 1);
  check_at_least("q_len", m.q_len, 0);
  check_at_least("v_dim", m.v_dim, 1);
  check_dtype("dtype", m.dtype);
  check_bits("flags", m.flags, MH_FLAG_STRIDES);
  check_enum("lse_base", m.lse_base, MH_LSE_BASE2, "mh_lse_base");
  check_zero("reserved0", m.reserved0);
}

array checked(const mh_merge& m, const char* name, const void* data, int64_t element,
              std::initializer_list<int64_t> dims, const int64_t* strides) {
  return checked_array(name, data, element, dims, strides, (m.flags & MH_FLAG_STRIDES) != 0);
}

array out_array(const mh_merge& m, const char* name, const void* data, const int64_t* strides) {
  return checked(m, name, data, dtype_size(m.dtype), {m.batch, m.heads, m.q_len, m.v_dim}, strides);
}

array lse_array(const mh_merge& m, const char* name, const void* data, const int64_t* strides) {
  return checked(m, name, data, real_size(m.dtype), {m.batch, m.heads, m.q_len}, strides);
}

struct rows_work {
  merge_fn merge;
  merge_args args;
  int64_t rows, block;
};

// args: states, outs, lses and their strides are set.
void merge_rows(const mh_merge& m, const mh_exec& exec, merge_args args, const array& out, void* out_data,
                const array& lse, void* lse_data) {
  args.heads = m.heads;
  args.q_len = m.q_len;
  args.v_dim = m.v_dim;
  args.out = out_data;
  args.lse = lse_data;
  std::copy_n(out.strides, 4, args.out_strides);
  std::copy_n(lse.strides, 3, args.lse_strides);
  args.lses_base = args.lse_base = m.lse_base;

  // Blocks of rows worth about ten microseconds; a single one is run without waking a thread.
  constexpr int64_t block_values = 1 << 16;
  rows_work work = {current_isa().dtype[m.dtype].merge, args, m.batch * m.heads * m.q_len, 0};
  work.block = std::max<int64_t>(block_values / std::max<int64_t>(m.states, 1) / m.v_dim, 1);
  const auto run_block = [](void* arg, int64_t index, int64_t) {
    const auto& w = *static_cast<const rows_work*>(arg);
    w.merge(&w.args, index * w.block, std::min(w.rows, (index + 1) * w.block));
  };
  const double values = static_cast<double>(work.rows) * static_cast<double>(m.states * m.v_dim);
  const int64_t threads = usable_threads(exec);
  const watched_call watched(threads, expected_us(0, values * static_cast<double>(dtype_size(m.dtype))),
                             [&](char* text, size_t size) {
                               std::snprintf(text, size, "merge %s states %lld b%lld h%lld q%lld v%lld",
                                             dtype_name(m.dtype), static_cast<long long>(m.states),
                                             static_cast<long long>(m.batch), static_cast<long long>(m.heads),
                                             static_cast<long long>(m.q_len), static_cast<long long>(m.v_dim));
                             });
  parallel_for(blocks(work.rows, work.block), threads, exec, watched, phase_merge, run_block, &work);
}

struct outputs {
  array out, lse;
};

outputs check_outputs(const mh_merge& m, void* out, void* lse) {
  outputs result = {out_array(m, "out", out, m.out_strides), {"lse", nullptr, 3, real_size(m.dtype), {0, 0, 0}, {}}};
  check_distinct(result.out);
  if (lse != nullptr) {
    result.lse = lse_array(m, "lse", lse, m.lse_strides);
    check_distinct(result.lse);
    check_apart(result.out, result.lse);
  }
  return result;
}

}  // namespace

void merge_states(const mh_merge& m, const mh_exec& exec, const void* outs, const void* lses, void* out, void* lse) {
  check_sizes(m);
  const outputs to = check_outputs(m, out, lse);
  const array out_states =
      checked(m, "outs", outs, dtype_size(m.dtype), {m.states, m.batch, m.heads, m.q_len, m.v_dim}, m.outs_strides);
  const array lse_states =
      checked(m, "lses", lses, real_size(m.dtype), {m.states, m.batch, m.heads, m.q_len}, m.lses_strides);
  for (const array* output : {&to.out, &to.lse}) {
    check_apart(*output, out_states);
    check_apart(*output, lse_states);
  }
  merge_args args = {};
  args.states = m.states;
  args.outs = outs;
  args.lses = lses;
  std::copy_n(out_states.strides, 5, args.outs_strides);
  std::copy_n(lse_states.strides, 4, args.lses_strides);
  merge_rows(m, exec, args, to.out, out, to.lse, lse);
}

void merge_state(const mh_merge& m, const mh_exec& exec, const void* out_a, const void* lse_a, const void* out_b,
                 const void* lse_b, void* out, void* lse) {
  check_sizes(m);
  if (m.states != 0 && m.states != 2) invalid("states is ", m.states, ", must be 0 or 2");
  const outputs to = check_outputs(m, out, lse);
  const array outs[] = {out_array(m, "out_a", out_a, m.outs_strides + 1),
                        out_array(m, "out_b", out_b, m.outs_strides + 1)};
  const array lses[] = {lse_array(m, "lse_a", lse_a, m.lses_strides + 1),
                        lse_array(m, "lse_b", lse_b, m.lses_strides + 1)};
  // State a may be updated in place: the kernel reads a row of all states before it writes that row.
  for (int i = 0; i < 2; ++i) {
    if (i != 0 || !is_same(to.out, outs[i])) check_apart(to.out, outs[i]);
    if (i != 0 || !is_same(to.lse, lses[i])) check_apart(to.lse, lses[i]);
    check_apart(to.out, lses[i]);
    check_apart(to.lse, outs[i]);
  }
  // The two states are a stride apart: both pointers are multiples of the element size, so it is a whole number.
  const auto distance = [](const array& a, const array& b) {
    return static_cast<int64_t>(reinterpret_cast<uintptr_t>(b.data) - reinterpret_cast<uintptr_t>(a.data)) / a.element;
  };
  merge_args args = {};
  args.states = 2;
  args.outs = out_a;
  args.lses = lse_a;
  args.outs_strides[0] = distance(outs[0], outs[1]);
  args.lses_strides[0] = distance(lses[0], lses[1]);
  std::copy_n(outs[0].strides, 4, args.outs_strides + 1);
  std::copy_n(lses[0].strides, 3, args.lses_strides + 1);
  merge_rows(m, exec, args, to.out, out, to.lse, lse);
}

}  // namespace manyhead
