// See plan.hpp.
#include "plan.hpp"

#include <algorithm>
#include <optional>

#include "attended.hpp"
#include "blocks.hpp"
#include "check.hpp"
#include "keeping.hpp"
#include "layout.hpp"
#include "machine.hpp"
#include "openings.hpp"
#include "reading.hpp"
#include "route.hpp"
#include "schedule.hpp"

namespace manyhead {
namespace {

// Keys are split, for problems with too few rows to keep many cores busy: up to so many rows of a kv head, into chunks of so many
// keys (whole tiles), merged in a fixed order.
constexpr int64_t split_rows = 128;
constexpr int64_t split_keys = 512;

// Sets block_q and row_blocks: as many panels as share a tile of K and V while it is in cache, in blocks of even size; Q, O and a
// tile of K and V of a task within half of L2. Each tile of K and V is read (or converted) once per task, so more rows mean less
// traffic; where there are too few tasks for the threads, schedule.cpp cuts them further. 16 panels against 4, one thread: f32
// 1.00 to 1.06 times as fast (most on gpt2_small and whisper_cross), bf16 and f16 1.02 to 1.08, AVX2 too. On the matrix route
// bringing K and V takes a tenth of a task of 16 panels: with 32, AMX, heads of 64, 1.02 to 1.07 times as fast on one thread, 1.0
// to 1.1 on two (577 tokens, one block instead of two); heads of 128 0.99 to 1.04 and 0.95 to 1.02, with a mask or bias 0.92
// to 0.98 and 0.98 to 1.03: not for them.
void choose_blocks(plan& plan, int64_t l2_bytes) {
  const problem& p = plan.p;
  const int64_t whole_rows = p.rows() - plan.last_rows, at_least = std::max<int64_t>(whole_rows, 1);
  if (plan.kernel == route_decode) {
    plan.block_q = at_least;
  } else {
    const int64_t row_bytes = (p.head_dim + p.v_dim) * real_size(p.dtype);
    const int64_t room = std::max<int64_t>(l2_bytes / 2 - plan.block_kv * row_bytes, 0);
    const int64_t panel_bytes = plan.panel_rows * row_bytes;
    // More than usual with Q and O in a quarter of it.
    const bool for_more = plan.kernel == route_matrix && !p.has_input(MH_INPUT_MASK) && !p.has_input(MH_INPUT_BIAS);
    const int64_t limit =
        for_more ? std::clamp(l2_bytes / 4 / panel_bytes, most_tile_panels, most_matrix_panels) : most_tile_panels;
    const int64_t most = std::clamp<int64_t>(room / panel_bytes, 1, limit);
    const int64_t panels = blocks(at_least, plan.panel_rows);
    const int64_t block = blocks(panels, blocks(panels, most)) * plan.panel_rows;
    plan.block_q = std::min(block, round_up(at_least, plan.lanes()));
  }
  plan.row_blocks = blocks(whole_rows, plan.block_q);
}

// p: the plan's problem, or as joined.
kernel_call make_call(const plan& plan, const problem& p) {
  kernel_call c{};
  static_cast<reading&>(c) = plan;
  c.batch = p.batch;
  c.kv_heads = p.kv_heads;
  c.group = p.group();
  c.heads = p.heads;
  c.q_len = p.q_len;
  c.kv_len = p.kv_len;
  c.head_dim = p.head_dim;
  c.v_dim = p.v_dim;
  c.rows = c.group * c.q_len;
  c.extra_keys = p.extra_keys;
  std::copy_n(p.q_strides, 4, c.q_strides);
  std::copy_n(p.k_strides, 4, c.k_strides);
  std::copy_n(p.v_strides, 4, c.v_strides);
  std::copy_n(p.out_strides, 4, c.out_strides);
  std::copy_n(p.mask_strides, 4, c.mask_strides);
  std::copy_n(p.bias_strides, 4, c.bias_strides);
  std::copy_n(p.key_mask_strides, 2, c.key_mask_strides);
  std::copy_n(p.lse_strides, 3, c.lse_strides);
  std::copy_n(p.weights_strides, 4, c.weights_strides);
  std::copy_n(p.mean_weights_strides, 3, c.mean_weights_strides);
  std::copy_n(p.scores_strides, 4, c.scores_strides);
  c.alibi_batch_stride = p.alibi_batch_stride;
  const bool natural =
      p.softcap > 0 || p.has_input(MH_INPUT_ALIBI) || p.has_input(MH_INPUT_BIAS) || p.has_output(MH_OUTPUT_SCORES);
  c.q_scale = natural ? p.scale : p.scale * log2e;
  c.exp_scale = natural ? log2e : 1.0;
  // In the exponent the scale costs nothing. The matrix route would have to multiply every score with it, the decode route would
  // copy rows of Q that it could read in place.
  const bool in_exponent = plan.kernel == route_matrix || plan.kernel == route_decode;
  if (in_exponent && !natural && p.scale > 1e-30 && p.scale < 1e30) {
    c.q_scale = 1.0;
    c.exp_scale = p.scale * log2e;
  }
  c.softcap = p.softcap;
  // Weights that are given are exact; results go with them.
  c.fast_exp = (p.flags & MH_FLAG_FAST_EXP) != 0 && !has_second_pass(p);
  c.causal = p.causal;
  c.align = p.align;
  c.q_offset = p.q_offset;
  c.may_lie_far = (p.has_input(MH_INPUT_BIAS) || p.has_input(MH_INPUT_ALIBI)) && !p.has_input(MH_INPUT_SINKS);
  c.window_left = p.window_left;
  c.window_right = p.window_right;
  c.index_type = p.index_type;
  c.bias_dtype = p.bias_dtype;
  c.alibi_mode = p.alibi_mode;
  c.lse_base = p.lse_base;
  c.scores_stage = p.scores_stage;
  c.chunks = plan.chunks;
  c.chunk_keys = plan.chunk_keys;
  c.block_kv = plan.block_kv;
  c.tile = plan.table->dtype[p.dtype].attention[route_tile];
  c.unit_keys = most_keys_on_unit(plan.p, plan.table->dtype[p.dtype]);
  c.kept_pitch = plan.keeps == keeping::nothing ? 0 : kept_pitch(p);
  c.row_blocks = plan.weighed_blocks;
  return c;
}

// Sets how much memory a run takes, of each thread and of all together.
void choose_memory(plan& plan) {
  const problem& p = plan.p;
  const dtype_kernels& kernels = plan.table->dtype[p.dtype];
  const int64_t real = real_size(p.dtype);
  constexpr int64_t most_dims = int64_t{1} << 40;  // of one row in memory; scratch has a few thousand
  const auto takes = [&](route of, const kernel_call& call, int64_t rows) {
    const bool fits = p.head_dim <= most_dims && p.v_dim <= most_dims;
    plan.scratch_bytes = std::max(plan.scratch_bytes, fits ? kernels.scratch_bytes[of](call, rows) : too_many_bytes);
  };
  takes(plan.kernel, plan.call, plan.block_q * plan.heads_at_once);
  if (plan.last_rows > 0) takes(route_decode, last_call(plan, plan.call), plan.last_rows);
  if (p.has_output(MH_OUTPUT_SCORES)) takes(route_tile, scores_call(plan, plan.call), scores_block_q(plan));
  if (plan.keeps == keeping::of_task) {
    plan.kept_at = round_up(plan.scratch_bytes, 64);
    plan.scratch_bytes = plan.kept_at + bytes_of(plan.kept_rows, kept_row_bytes(p));
  }
  constexpr int64_t state_bytes = 2 * sizeof(double);
  const int64_t all_rows = p.batch * p.heads * p.q_len;
  if (plan.chunks > 1) {
    plan.partial_out_bytes = round_up(bytes_of(plan.chunks, bytes_of(all_rows, bytes_of(p.v_dim, real))), 64);
    plan.partial_state_bytes = round_up(bytes_of(plan.chunks, bytes_of(all_rows, state_bytes)), 64);
  }
  if (plan.keeps == keeping::of_all) plan.kept_bytes = bytes_of(all_rows, kept_row_bytes(p));
  if (p.has_output(MH_OUTPUT_COLUMN_SUMS)) {
    const int64_t of_head = bytes_of(plan.weighed_blocks, bytes_of(p.kv_len, real));
    plan.column_bytes = round_up(bytes_of(p.batch * p.heads, of_head), 64);
  }
  plan.openings_bytes = choose_openings(plan);
  plan.shared_bytes =
      plan.partial_out_bytes + plan.partial_state_bytes + plan.kept_bytes + plan.column_bytes + plan.openings_bytes;
}

}  // namespace

plan make_plan(const problem& p, const kernel_table& table, int64_t l2_bytes, cpu_core core, int64_t l3_bytes) {
  plan plan{};
  plan.p = p;
  plan.table = &table;
  const int64_t rows = p.rows(), element = dtype_size(p.dtype);
  const double pairs = attended_pairs(p);
  choose_route(plan, pairs, core);

  plan.chunk_keys = round_up(split_keys, plan.block_kv);
  // Of a window the first chunk begins with a whole tile (kernels/positions.hpp: chunks_from).
  const int64_t split = std::min(p.kv_len, most_keys_between(p) + plan.block_kv - 1);
  plan.chunks = rows <= split_rows ? std::max<int64_t>(1, blocks(split, plan.chunk_keys)) : 1;
  if (plan.chunks == 1) plan.chunk_keys = round_up(std::max<int64_t>(p.kv_len, 1), plan.block_kv);

  // Heads of several entries as those of one, so that the steps of several follow each other in a task (reading.cpp: heads_of_task)
  // where each entry has few. On an Intel Xeon (AVX-512 and AVX2), one thread: 32 entries of a head and 16 keys 1.34 to 1.47 times
  // as fast, 2 to 64 entries of one and two heads and 8 to 64 keys 1.05 to 1.29, entries of many heads 0.97 to 1.04; two threads
  // 0.96 to 1.14.
  const std::optional<problem> one = plan.kernel == route_decode && !has_second_pass(p) ? joined(p) : std::nullopt;
  const problem& told = one ? *one : p;
  plan.entries = told.batch;
  plan.entry_heads = told.kv_heads;
  choose_blocks(plan, l2_bytes);
  plan.tasks = p.batch * p.kv_heads * plan.row_blocks * plan.chunks;
  choose_keeping(plan, l2_bytes);

  const double heads = static_cast<double>(p.batch * p.heads), dims = static_cast<double>(p.head_dim + p.v_dim);
  const double kv_bytes = static_cast<double>(element) * dims * static_cast<double>(p.batch * p.kv_heads) *
                          static_cast<double>(most_keys_between(p));
  double others = 0;  // of masks and biases
  if (p.has_input(MH_INPUT_MASK)) others += pair_bytes(p, p.mask_strides, 1);
  if (p.has_input(MH_INPUT_BIAS)) others += pair_bytes(p, p.bias_strides, dtype_size(p.bias_dtype));
  choose_reading(plan, core, {kv_bytes + others, l2_bytes, l3_bytes});

  plan.flops = 2.0 * dims * heads * pairs;
  plan.bytes = static_cast<double>(element) * dims * heads * static_cast<double>(p.q_len) + kv_bytes;
  plan.expected_us = expected_us(plan.flops, plan.bytes);
  plan.share_threads = share_threads_of(plan, plan.bytes + others, l2_bytes);
  plan.tiles_skipped = share_skipped(p, std::min(plan.block_q, plan.panel_rows), plan.block_kv);

  plan.call = make_call(plan, told);
  choose_memory(plan);
  plan.alone = cut_for(plan, 1);
  return plan;
}

plan with_chunks(const plan& whole, int64_t chunks) {
  plan fewer = whole;
  fewer.tasks = whole.tasks / whole.chunks * chunks;
  fewer.chunks = fewer.call.chunks = chunks;
  fewer.alone = cut_for(fewer, 1);
  return fewer;
}

plan make_plan(const problem& p, const kernel_table& table, const machine& m) {
  return make_plan(p, table, m.l2_bytes, m.core, m.l3_bytes);
}

double expected_us(double flops, double bytes) { return flops / 40e3 + bytes / 10e3; }

}  // namespace manyhead
