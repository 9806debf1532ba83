// See reading.hpp.
//
// Kernels ask for rows of K, V, Q, out, mask and bias ahead of need where these do not lie in L2: on an AVX-512 server core decode
// was 1.2 to 1.5 times as fast beyond the caches and up to 1.2 times as slow within L2, prefill 1.01 to 1.09 times as fast. A decode
// step of one f32 row has no arithmetic to hide it behind: 3 MB on two threads, within L2 together, 0.84 times as fast, 6 MB
// 1.00, 12 to 67 MB 1.02 to 1.12, 134 MB and more, from memory, 1.1 to 1.4. So that asks beyond four times L2.
//
// Decode asks for rows of V with K and of K with V, in 16 bits into L1, else into L2. Some cores want it otherwise, each of the
// functions says which, and what was measured on a Zen 5, a Zen 4 (both with 32 MB of L3) and an Intel Xeon (AMX).
#include "reading.hpp"

#include <algorithm>
#include <bit>

#include "check.hpp"
#include "layout.hpp"
#include "machine.hpp"

namespace manyhead {
namespace {

bool is_widened(const problem& p) { return dtype_size(p.dtype) == 2; }

// Whether what lies in half of L3 is better not asked for, by decode.
// Zen 5 brings what it finds there itself: 3 to 13 MB without asking, 1 to 4 rows, f32, AVX-512 0.95 to 1.27 times as fast, AVX2
//   0.91 to 1.28, one thread and two; 16 MB 0.79 to 1.16, more 0.6 to 0.9; bf16 0.92 to 1.08.
// Zen 4: AVX-512 f32 1 to 3 rows 0.97 to 1.15 (one shape 0.89), 4 and more 0.72 to 1.0, 16 bits 0.99 to 1.23; AVX2 one row 0.93 to
//   1.17, more rows 0.47 to 0.95.
// Intel: f32 and f64, one and two rows of heads that take turns 0.98 to 1.1, three rows and more 0.88 to 1.04, 16 bits 0.44 to 1.14.
//   Else one to three rows, up to twice L2 (AVX2 four times) 1.1 to 1.4, 16 bits 0.74 to 1.04.
bool comes_unasked(cpu_core core, const plan& plan, footprint of) {
  if (plan.kernel != route_decode || of.l3s() >= 0.5) return false;
  const problem& p = plan.p;
  const bool wide = plan.table->lanes >= 16;
  const int64_t rows = p.rows();
  switch (core) {
    case cpu_core::zen5:
      return !is_widened(p);
    case cpu_core::zen4:
      return rows <= (wide ? 3 : 1) || (wide && is_widened(p));
    case cpu_core::intel:
      if (is_widened(p)) return false;
      return are_side_by_side(p) ? rows <= 2 : rows <= 3 && of.l2s() <= (wide ? 2 : 4);
    default:
      return false;
  }
}

// Bytes of a row of all heads that lie side by side.
int64_t bytes_of_heads(const problem& p) { return p.kv_heads * std::max(p.head_dim, p.v_dim) * dtype_size(p.dtype); }

// Whether Zen 5 asks for rows of heads that lie side by side in the order of memory (set_turns). With gaps as large as the rows:
// one thread and two, 16 bits 1.0 to 1.7 times as fast, f32 of up to 4 KB in a row 0.98 to 1.6; f32 and f64 of 8 KB and more 0.79
// to 1.44.
bool has_heads_to_follow(const problem& p) {
  if (has_heads_in_order(p)) return true;
  return has_heads_in_order_with_gaps(p) && (is_widened(p) || bytes_of_heads(p) <= 4096);
}

// Whether kernels with AVX-512 ask for K with K and for V with V (decode.hpp: further_on. 16 bits and others never do:
// may_ask_own).
// Zen 5: heads of 16 to 256, 1 to 12 rows, 1.0 to 1.3 times as fast on one thread, 0.97 to 1.3 on two; in 16 bits 0.55 to 1.09,
//   with AVX2 0.5 to 1.3.
// Zen 4: 0.43 to 0.98, as what is asked for into L1 is late from memory. Into L2 0.9 to 1.2 from memory and 0.9 from L3: not worth a
//   way of its own.
// Intel, up to a third of L3, one thread and two: one row 1.04 to 1.08, two 1.01 to 1.13, three 1.02 to 1.16, four of heads of 64
//   1.0 to 1.09, but three and four of rows beyond 256 bytes 0.93 to 1.0; what lies further away 0.87 to 0.98 on one thread.
bool asks_for_own(cpu_core core, const problem& p, double l3s) {
  if (!has_rows_in_order(p) && !(core == cpu_core::zen5 && has_heads_to_follow(p))) return false;
  const int64_t rows = p.rows();
  const bool large = std::max(p.head_dim, p.v_dim) * dtype_size(p.dtype) > 256, as_four = rows == 3 || rows == 4;
  return core == cpu_core::zen5 || (core == cpu_core::intel && l3s <= 1 / 3.0 && !(large && as_four));
}

// Whether lines are asked for one after another, as they lie in memory. Zen 5: up to four rows, by pairs eight (more ask once a
// pass), in all types from memory 0.98 to 1.33 times as fast, from L3 0.95 to 1.07; and any number of heads that lie side by side
// (set_turns). Unmeasured elsewhere.
bool asks_in_order(cpu_core core, const plan& plan) {
  const int64_t most_at_once = plan.unit_steps ? 8 : 4;
  if (core != cpu_core::zen5) return false;
  return (plan.p.rows() <= most_at_once && has_rows_in_order(plan.p)) || has_heads_to_follow(plan.p);
}

// Whether 16 bits are asked for into L1. On Zen 4 such lines are late from memory (into L2 1.35 to 2.1 times as fast, heads of 32
// 0.9). Nor where tiles are larger than L1 (route.cpp: decode_keys), but on Zen 5 from memory: 1.15 to 1.2.
bool asks_into_l1(cpu_core core, const plan& plan, bool from_memory) {
  if (core == cpu_core::zen4) return false;
  return (core == cpu_core::zen5 && from_memory) || !(plan.unit_steps && plan.p.rows() <= 2);
}

// Whether four rows take whole rows of V in two passes of two: with own rows asked for, and on Zen 5 by pairs from memory (1.07 to
// 1.12 times as fast).
bool takes_whole_v_rows(cpu_core core, const plan& plan, bool from_memory) {
  if (!is_widened(plan.p)) return plan.asks_own;
  return core == cpu_core::zen5 && from_memory && plan.unit_steps && plan.p.rows() <= 4;
}

// Whether decode with AVX-512 does 3 rows more than whole fours as four: on Intel's in all types 1.04 to 1.25 times as fast (in cache
// 0.83 to 1.05, AVX2 0.74 to 1.04).
bool adds_rows(cpu_core core, const plan& plan) {
  if (plan.kernel != route_decode || !plan.prefetch || plan.copy_kv || plan.table->lanes < 16) return false;
  return core == cpu_core::intel || (core == cpu_core::zen5 && plan.asks_own && !is_widened(plan.p));
}

// Of so many keys are the turns of heads that lie side by side (heads_of_task): of K a block of scores of one row, of V as many as
// have a sum of their own where there are more than four rows (decode_values.hpp). Where all is asked for in the order of
// memory (by tasks of all heads, or of so many that a head's part lies in one row) and comes from there, up to four rows have
// shorter turns, nearer to that order: on Zen 5, 53 shapes of 1 to 16 rows and 2 to 64 heads of 64 to 128, f32, bf16 and f16,
// 1.35 times as fast on one thread as with own rows asked for in usual turns, 1.25 on two (0.94 to 1.86), AVX2 1.41 and 1.30;
// in the order of memory alone 1.05 to 1.45, more than four rows 0.95 to 1.46. How short: about 16 KB of all heads, but no less than
// 1 KB of a head, one and two rows: 23 shapes of 4 to 64 heads of 32 to 512, 34 to 134 MB, half as much of a head 0.78 to 1.0,
// twice as much 0.64 to 1.0 (16 KB alone, with 2 keys from 16 KB on and else 4, 0.75 to 1.0 where it is less or more). With AVX2
// 2 keys of 16 bits 0.75 to 0.79 of 4. Three and four rows 8 (4 0.7 to 1.08), but four of f32 and up to 4 KB 4 with AVX-512 (8 heads
// of 128 and 12 of 64 1.09 to 1.21, 16 of 64 0.99 to 1.06; of 5 and 8 KB 0.93 to 1.05, AVX2 0.81 to 0.93): two turns, Q and scores
// fill L1. From L3 these were 0.65 to 1.1, and turns of 64 keys, where they bring no more than 256 KB, 1.04 on one thread and two
// (19 shapes, 0.95 to 1.25; of 512 KB 0.77 to 1.0).
void set_turns(plan& plan, bool from_memory) {
  const problem& p = plan.p;
  const int64_t rows = p.rows(), element = dtype_size(p.dtype);
  plan.k_turn = usual_k_turn;
  plan.v_turn = usual_v_turn;
  if (!plan.asks_in_order || rows > 4) return;
  const int64_t bytes = bytes_of_heads(p);
  if (!from_memory) {
    if (bytes <= 4096 && has_heads_in_order(p)) plan.k_turn = plan.v_turn = 64;
    return;
  }
  if (rows > 2 && element > 4) return;  // 0.74 to 0.9
  const bool four_in_l1 = rows == 4 && element == 4 && bytes <= 4096 && plan.table->lanes >= 16;
  const int64_t keys_of_head = 1448 / (bytes / p.kv_heads);
  const auto of_head = static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(keys_of_head)));
  const int64_t few = element == 2 && plan.table->lanes < 16 ? 4 : 2;
  const int64_t least = rows <= 2 ? std::max(of_head, few) : four_in_l1 ? std::max<int64_t>(of_head, 4) : 8;
  const auto fitting = static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(16384 / bytes)));
  plan.v_turn = std::min(std::max(fitting, least), plan.v_turn);
  plan.k_turn = std::min(plan.k_turn, plan.v_turn);
}

// Whether rows of K or V lie whole 4096 bytes apart, so that all of them are for the same few sets of L1, which has 12 (or 8) lines
// for each: of 16 rows the first is gone before the next line of it, or the next pass over it, is due.
bool share_sets(const problem& p) {
  const int64_t element = dtype_size(p.dtype);
  return p.k_strides[2] * element % 4096 == 0 || p.v_strides[2] * element % 4096 == 0;
}

// Where heads lie side by side in the caches of a Zen 5, turns that stay in L1 for what comes again: all but whole fours of rows take
// several passes over K and V (odd rows: one of a single row, which waits longest), and one row a block of 16 keys. Side by side in
// rows of whole 4096 bytes, in L2 and L3, f32: 1 row 1.02 to 1.36 times as fast, 2 rows 0.96 to 1.49, 3 rows 1.1 to 1.45, 5 to
// 11 rows 1.0 to 1.22, AVX2 1.0 to 1.3; of other sizes, in L2, 3 rows 1.2 to 1.3 (577 keys 1.0 to 1.27), 5 to 11 rows 0.98 to 1.15. Whole
// fours 0.87 to 1.0. In 16 bits usual turns, rows of whole 4096 bytes in L2: 1 row 1.0 to 1.26, 3 rows 1.04 to 1.26, 5 rows 0.98
// to 1.23.
void set_turns_in_caches(plan& plan, bool in_l2) {
  const int64_t rows = plan.p.rows();
  const bool shares = share_sets(plan.p), odd = rows % 2 != 0;
  if (!is_widened(plan.p) && shares && rows % 4 != 0) {
    plan.k_turn = usual_k_turn / 2;
    plan.v_turn = usual_v_turn / 2;
  } else if (in_l2 && odd && (is_widened(plan.p) ? shares : rows > 1)) {
    plan.k_turn = usual_k_turn;
    plan.v_turn = usual_v_turn;
  }
}

// A head's rows as decode works on them (decode.hpp: padded_rows): on tiles more than 16 are two blocks of the same size; by pairs one
// of zeros joins 7 of 8, or 3 of 4.
int64_t padded_rows(const plan& plan, int64_t rows) {
  const int32_t how = plan.unit_steps ? plan.table->dtype[plan.p.dtype].unit_steps : no_unit_steps;
  const bool more = how == steps_of_tiles ? rows > 16 : how == steps_of_pairs && rows % 4 == 3;
  return more ? rows + rows % 2 : rows;
}

// How many kv heads a task of the decode route takes. What a step makes of a few rows is little and waits for the step
// before, so the steps of several heads follow each other: on Zen 5, K and V in L2, heads of 64, 1.2 to 1.5 times as fast
// with 8 keys, 1.05 to 1.45 with 16 and 32, 1.0 to 1.2 with 64 and 128. Their tiles of K and V take up to half of L2: an
// eighth is 0.97 to 0.99 as fast.
// From further away whole heads are read 0.7 to 1.0 times as fast where others come between: only those of one tile that
// fit into L1.
// But where heads lie side by side in rows, all of them go through a few keys of K, and of V, in turn (set_turns), so that lines
// that two of them share, rows that the hardware fetches together and pages are wanted once. On an Intel Xeon (AMX), 2 to 32
// heads of 40 to 128, 1 to 8 rows each, from L3 and memory, 19 shapes, one thread and two: f32 0.96 to 2.2 times as fast
// (mean 1.31 and 1.34), bf16 0.98 to 2.3 (1.47 and 1.41), AVX2 0.92 to 2.2 (1.31 to 1.41). With whole tiles of each head in
// turn 0.86 to 1.22; with 12 of 20 to 64 heads a task 0.73 to 1.12 of it, with 32 keys of K a turn 0.91 and 0.97, with 64 of
// both 0.83.
int64_t heads_of_task(const plan& plan, bool in_l2, int64_t l2_bytes) {
  constexpr int64_t l1_bytes = 32 << 10;
  const problem& p = plan.p;
  if (takes_turns(plan))
    return std::clamp<int64_t>(most_rows_at_once / padded_rows(plan, plan.block_q), 1, plan.entry_heads);
  const int64_t tile_bytes = std::min(p.kv_len, plan.block_kv) * (p.head_dim + p.v_dim) * dtype_size(p.dtype);
  const int64_t room = in_l2 ? l2_bytes / 2 : p.kv_len <= plan.block_kv ? l1_bytes : 0;
  const int64_t most = std::min(most_decode_rows / plan.block_q, room / std::max<int64_t>(tile_bytes, 1));
  return std::clamp<int64_t>(most, 1, plan.entry_heads);
}

}  // namespace

void choose_reading(plan& plan, cpu_core core, footprint of) {
  const problem& p = plan.p;
  const bool arithmetic = p.rows() > 1 || is_widened(p);
  const bool in_l2 = of.l2s() <= 1, from_memory = of.l3s() > 0.5;
  plan.prefetch = !comes_unasked(core, plan, of) && of.l2s() > (arithmetic ? 1 : 4);
  plan.asks_own = asks_for_own(core, p, of.l3s());
  plan.asks_in_order = asks_in_order(core, plan);
  plan.asks_l1 = asks_into_l1(core, plan, from_memory);
  plan.whole_v_rows = takes_whole_v_rows(core, plan, from_memory);
  plan.adds_rows = adds_rows(core, plan);
  plan.heads_at_once = 1;
  if (plan.kernel != route_decode) return;
  if (are_side_by_side(p)) {
    const bool zen5 = core == cpu_core::zen5;
    if (!in_l2) set_turns(plan, zen5 && from_memory);
    if (zen5 && !from_memory) set_turns_in_caches(plan, in_l2);
  }
  plan.heads_at_once = heads_of_task(plan, in_l2, of.l2_bytes);
}

}  // namespace manyhead
