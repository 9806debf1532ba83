// See plan.hpp. The choices, and why:
//
// block_kv: keys of a tile, of the route, and in decode of rows and head size: tile borders lie at its multiples, and the
//   same borders mean the same bits, so never a function of the machine's caches or of numbers of keys. What the product
//   with V reads again and again should stay in the smallest L1, 32 KB: the weights of a panel (96 x 48 x 4 bytes = 18
//   KB) and a column of lines of the tile (96 x 64 = 6 KB). More keys mean fewer passes over the results: 96 was 1.00 to
//   1.01 times as fast as 64, 48 0.99, 32 0.98; 128 gave another 0.01 with heads of 64 on a CPU with 48 KB, and took it
//   away on AVX2.
// block_q: rows of a task, up to 16 panels. Each tile of K and V is read (or converted) once per task, so more rows mean
//   less traffic; where there are too few tasks for the threads, schedule.cpp cuts them further. Against 4 panels, one
//   thread: f32 1.00 to 1.06 times as fast (most on gpt2_small and whisper_cross), bf16 and f16 1.02 to 1.08, AVX2 too. On the
//   matrix route bringing K and V takes a tenth of a task of 16 panels: with 32, AMX, heads of 64, 1.02 to 1.07 times as fast on
//   one thread, 1.0 to 1.1 on two (577 tokens, one block instead of two); heads of 128 0.99 to 1.04 and 0.95 to 1.02, with
//   a mask or bias 0.92 to 0.98 and 0.98 to 1.03: not for them.
// chunks: splits along the keys, for problems with too few rows to keep many cores busy. Fixed size, fixed order of
//   merging.
// prefetch: kernels ask for rows of K, V, Q, out, mask and bias ahead of need, where these do not lie in L2. Measured
//   on an AVX-512 server core: decode 1.2 to 1.5 times faster beyond the caches and up to 1.2 times slower within L2,
//   prefill 1.01 to 1.09 times faster. A decode step of one f32 row has no arithmetic to hide it behind: 3 MB on two
//   threads, within L2 together, 0.84 times as fast, 6 MB 1.00, 12 to 67 MB 1.02 to 1.12, 134 MB and more, from memory, 1.1
//   to 1.4. So that asks beyond four times L2.
//   Decode asks for rows of V with K and of K with V, in 16 bits into L1, else into L2. Some cores want it otherwise:
//   Zen 5: f32 and f64 with AVX-512 ask each for its own (decode.hpp: further_on): heads of 16 to 256, 1 to 12 rows,
//   1.0 to 1.3 times as fast on one thread, 0.97 to 1.3 on two. In 16 bits 0.55 to 1.09, with AVX2 0.5 to 1.3: not there.
//   What it finds in half of L3 it brings itself: 3 to 13 MB without asking, 1 to 4 rows, f32, AVX-512 0.95 to 1.27 times
//   as fast, AVX2 0.91 to 1.28, one thread and two; 16 MB 0.79 to 1.16, more 0.6 to 0.9; bf16 0.92 to 1.08. Up to four
//   rows, by pairs eight, ask line after line, in all types: from memory 0.98 to 1.33, from L3 0.95 to 1.07; and any
//   number of heads that lie side by side (set_turns). One and two rows of bf16 by pairs from memory into L1 (1.15 to
//   1.2), four of them with whole rows of V in twos (1.07 to 1.12).
//   Zen 4: what is asked for into L1 is late from memory. Each for its own 0.43 to 0.98 times as fast there, 16 bits into
//   L2 instead of L1 1.35 to 2.1 (heads of 32 0.9). Own into L2 is 0.9 to 1.2 of the usual way from memory and 0.9 from L3:
//   not worth a way of its own. In half of L3 nothing asked for: AVX-512 f32 1 to 3 rows 0.97 to 1.15 (one shape 0.89), 4
//   and more 0.72 to 1.0, 16 bits 0.99 to 1.23; AVX2 one row 0.93 to 1.17, more rows 0.47 to 0.95.
//   Intel Xeon (AMX): f32 and f64, one and two rows, heads side by side, in half of L3, nothing asked for: 0.98 to 1.1 times as fast
//   where heads take turns (heads_of_task), three rows and more 0.88 to 1.04, 16 bits 0.44 to 1.14. Else two and three rows, up to
//   twice L2 (AVX2 four times) 1.1 to 1.4 without asking, 16 bits 0.74 to 1.04. f32 with AVX-512 up to a third of L3, one thread and
//   two, each asked for with its own: one row 1.04 to 1.08, two 1.01 to 1.13, three 1.02 to 1.16, four of heads of 64 1.0 to
//   1.09, but three and four of rows beyond 256 bytes 0.93 to 1.0 of the usual way; what lies further away 0.87 to 0.98 on one thread.
//   Three rows more than whole fours as four, in all types: 1.04 to 1.25 (in cache 0.83 to 1.05, AVX2 0.74 to 1.04).
#include "plan.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <numeric>
#include <optional>

#include "blocks.hpp"
#include "check.hpp"
#include "fp_state.hpp"
#include "json.hpp"
#include "machine.hpp"
#include "problem_line.hpp"
#include "schedule.hpp"

namespace manyhead {
namespace {

constexpr int64_t keys_of_tile[] = {96, 64, 128};  // by route: tile, decode (of many rows), matrix
constexpr int64_t keys_of_unit_step = 32;          // of a tile of decode with the unit's products: what one takes
constexpr int64_t matrix_rows = 32;                // of a panel
constexpr int64_t most_panels = 16, most_matrix_panels = 32;  // of a task; kernels have room for so many
constexpr int64_t split_rows = 128;  // at most this many rows per kv head and batch entry: split long keys
constexpr int64_t split_keys = 512;  // of a chunk, up to whole tiles

constexpr uint32_t of_kept_scores = MH_OUTPUT_WEIGHTS | MH_OUTPUT_MEAN_WEIGHTS | MH_OUTPUT_COLUMN_SUMS;

int64_t dtype_bytes(int32_t dtype) { return dtype == MH_DTYPE_F64 ? 8 : dtype == MH_DTYPE_F32 ? 4 : 2; }

// So many rows take the decode route as long as a vector of rows alone takes the tile route. Decode takes a row's time for
// each row, a part of which does not grow with the head: sums of dot products' lanes. Where the two are even, measured in
// f32 with 2 to 24 rows, 4 to 512 keys and heads of 8 to 256 on AVX-512 and AVX2: heads of 16 5 rows of 16 lanes and 4 of
// 8, of 32 9 and 5, of 64 13 and 7, of 128 15 and 8; the rule is within one row of that. Up to 128 keys their number changes
// little, with 512 heads of 96 and more are even at 12 of 16 lanes. Vectors of 4 are unmeasured.
double even_rows(const problem& p, int64_t lanes) {
  const double dims = static_cast<double>(p.head_dim + p.v_dim) / 2, width = static_cast<double>(lanes);
  return 1.21 * width * dims / (dims + 2.4 * width);
}

// With few keys more rows do: the decode route then neither copies Q nor keeps results, which the tile route transposes.
// Measured in f32 with 4 to 16 rows, 8 to 32 keys and heads of 32 to 256 on Zen 4: with 8 keys vectors of 16 lanes and heads of
// 64 are even at 14 rows, of 128 and 256 beyond 16; of 8 lanes all at more than 8.
double decode_gain(const problem& p, int64_t lanes) {
  if (p.dtype != MH_DTYPE_F32 || lanes < 8 || p.kv_len > 32) return 1;
  return 1 + (p.kv_len > 16 ? 1.12 : 2.8) / static_cast<double>(lanes);
}

// Whether the decode route is the faster one. A second vector of rows takes the tile route half as long as the first. Of more
// than 16 rows those that fill no vector are left to decode (last_rows_of), which in f32 is faster than all of them: on Zen 4,
// heads of 64 to 256, 17 to 24 rows 0.94 to 1.23, geometric mean 1.04 (bf16, whose K and V the tile route copies, 0.87 to 1.01).
bool goes_to_decode(const problem& p, int64_t lanes) {
  const int64_t rows = p.group() * p.q_len;
  const double even = even_rows(p, lanes) * decode_gain(p, lanes);
  if (rows > most_decode_rows) return false;
  if (rows <= lanes) return static_cast<double>(rows) <= even;
  const bool second = lanes == 8 || (lanes == 16 && dtype_bytes(p.dtype) == 2);
  return second && static_cast<double>(rows) <= 1.55 * even;
}

// The unit takes denormal numbers for 0, products too: with Q of up to 2^80 and K of which it is not known (matrix_operands.hpp:
// is_usual) up to 2^-46 of a score is lost before it is scaled. Nor may a score run over that a tiny scale brings back, or be
// denormal over the cap.
bool unit_takes_scores(const problem& p) {
  const double scale = std::abs(p.scale);
  if (scale > 1e5 || (scale > 0 && scale < 1e-30)) return false;
  return !(p.softcap > 0 && (p.softcap > 1e30 || scale < p.softcap * 1e-36));
}

// Whether the matrix route is the faster one (kernel_api.hpp: matrix_rows). Of f32 the unit does six products for one, so
// that what it does besides counts: it works on 32 rows, keys and dims at a time, the tile route on 16 rows, and packs Q, K
// and V. In the time that the tile route takes for a pair of row and key: a pair 0.52 + 14.6 / dims, a key 22.7, a row
// 15.9. Fitted to 220 shapes of 96 to 300 rows, 64 to 512 keys and heads of 32 to 256, on one thread beside AVX-512: it
// predicts what the unit gains within 4 % (one standard deviation), and where it errs costs 0.2 % on average. So
// most prompts of heads of 64 run on it from 128 x 128 on and of heads of 32 from 256 x 256; lengths a little above a
// multiple of 32 need more (144 x 144 does not, 300 x 300 does), and heads of 40 never do.
bool goes_to_unit(const problem& p, const dtype_kernels& kernels, double pairs_of_head) {
  const int64_t rows = p.group() * p.q_len, dims = p.head_dim + p.v_dim;
  if (rows < kernels.matrix_rows || p.kv_len < kernels.matrix_keys) return false;
  if (!unit_takes_scores(p)) return false;
  if (p.dtype != MH_DTYPE_F32) return true;
  const double pairs = pairs_of_head * static_cast<double>(p.group());
  const auto whole = [](int64_t n, int64_t step = 32) { return static_cast<double>(round_up(n, step)); };
  const double filled = static_cast<double>(rows * p.kv_len) / (whole(rows) * whole(p.kv_len));
  const double used = static_cast<double>(dims) / (whole(p.head_dim) + whole(p.v_dim));
  const double of_pairs = (0.52 + 14.6 / static_cast<double>(dims)) * pairs / filled;
  const double of_tile_route = pairs * whole(rows, 16) / static_cast<double>(rows);
  return used * of_tile_route > of_pairs + 22.7 * whole(p.kv_len) + 15.9 * whole(rows);
}

// Heads that the unit's products of steps take.
bool has_whole_steps(const problem& p) { return p.head_dim % 32 == 0 && p.v_dim % 32 == 0; }
bool has_heads_for(how_unit_steps how, const problem& p) {
  if (how == steps_of_tiles) return has_whole_steps(p);
  return how == steps_of_pairs && p.head_dim >= 32 && p.v_dim >= 32;
}

// Whether steps go by pairs (decode_pairs.hpp). On Zen 4, heads of 32 to 256, one thread, speed beside multiply-adds: 16 to 512
// keys in cache 1 row 1.0 to 1.25, 2 rows 1.1 to 1.4, 4 rows 1.15 to 1.6, 8 rows 1.2 to 1.84, 16 rows 0.91 to 1.8; 8 keys 0.93
// to 1.15 up to 8 rows, 12 and 16 rows of heads of 32 and 64 0.7 to 0.95. Beside the matrix route, 32 to 4096 keys: 17 rows
// 1.36 to 1.72, 24 rows 1.19 to 1.28, 28 rows 1.02 to 1.08, 32 rows 0.91 to 0.98. From memory 3 rows and more 1.0 to 1.8, but 1
// and 2 rows 0.8 to 1.0, from L3 1.05 to 1.2: lines asked for come too late then (docs/experiments.md). Heads that are not a
// multiple of 32, of which some is multiplied with zeros (40 to 112): 1 to 8 rows and 24 keys and more 1.0 to 1.6, 16 keys 0.94
// to 1.17, 8 and 12 keys 0.84 to 1.1; beside the matrix route 12 and 20 rows 1.0 (40) to 1.3, 24 rows 0.84 to 1.1. On
// Zen 5 one row 0.9 to 1.25, two 0.87 to 1.05, three and four 1.05 to 1.35, six to 12 1.3 to 1.5, 16 to 28 1.6 to 1.95.
bool steps_by_pairs(const problem& p) {
  constexpr int64_t few_keys = 16;
  const bool whole = has_whole_steps(p);
  const int64_t most_rows = whole ? 28 : 20, most_rows_of_few_keys = whole ? 8 : 0;
  return p.group() * p.q_len <= (p.kv_len < few_keys ? most_rows_of_few_keys : most_rows);
}

// So one and two rows do so up to half of L3 as it was there, 32 MB. The kernel asks how many keys an entry has in use: bits
// may depend neither on the batch nor, from 16 keys on, on how far its entries are padded.
int64_t most_keys_on_unit(const problem& p, const dtype_kernels& kernels) {
  constexpr int64_t most_bytes = 16 << 20;
  if (kernels.unit_steps != steps_of_pairs || p.group() * p.q_len > 2) return std::numeric_limits<int64_t>::max();
  return most_bytes / (p.kv_heads * (p.head_dim + p.v_dim) * dtype_bytes(p.dtype));
}

// Whether a step of few rows is the decode route's with the unit's products (decode_unit.hpp). Measured on one thread of an
// Intel Xeon (AMX), bf16, in the time that decode by multiply-adds takes (up to 10 rows) or the matrix route (from 11 on): 32 to
// 512 keys in cache, heads of 64 and 128, 2 rows 1.0 to 1.45, 3 and 4 rows 0.63 to 1.02 (48 keys of 64 take as long), 6 and 8
// rows 0.41 to 0.77, 12 and 16 rows 0.47 to 0.73, 20 rows 0.7 to 1.0, 24 rows 0.82 to 1.12, 28 rows 0.88 to 1.13; 16 keys 0.85 to
// 1.15, 24 keys 0.71 to 0.98. From L3, 3 rows 0.8, 4 rows 0.94 to 0.97, 6 rows 0.66. Heads of 256 from L3: 3 rows 1.06, 4 rows
// 1.15 to 1.27, 6 rows 0.87, 12 rows 0.94, 20 rows 1.08. f16 on a unit that has it: unmeasured, taken as bf16.
bool steps_on_unit(const problem& p, const dtype_kernels& kernels) {
  if (!has_heads_for(static_cast<how_unit_steps>(kernels.unit_steps), p) || !unit_takes_scores(p)) return false;
  if (kernels.unit_steps == steps_of_pairs) return steps_by_pairs(p);
  const int64_t rows = p.group() * p.q_len;
  const bool large = p.head_dim + p.v_dim > 256;
  return rows >= (large ? 6 : 3) && rows <= (large ? 16 : 24) && p.kv_len >= kernels.matrix_keys;
}

// Keys of a tile of the decode route, by rows. Scores, softmax and values of one or two rows of 64 keys are so short that each
// waits for the one before; twice to four times as many keys are worth it as long as a tile of K or V is no larger than
// the smallest L2 (in 16 bits, asked for into L1, than half of the smallest L1). f32, 256 keys: Zen 5 with AVX-512 1.06 to
// 1.09 times as fast (512 keys 1.12), Zen 4 1.0 to 1.04 (512 the same), where nothing is asked for 1.05 to 1.1; AVX2 1.03
// to 1.05. bf16, heads of 64, 128 keys: Zen 5 1.02 to 1.28. Three rows and more: 0.70 to 1.02. By pairs, which take less time,
// Zen 4 64 KB instead of 16 1.03 to 1.1.
int64_t decode_keys(const problem& p, int64_t rows, bool by_pairs = false) {
  int64_t keys = keys_of_tile[route_decode];
  if (rows > 2) return keys;
  const int64_t size = dtype_bytes(p.dtype), row_bytes = std::max(p.head_dim, p.v_dim) * size;
  const int64_t most_bytes = size > 2 ? 256 << 10 : by_pairs ? 64 << 10 : 16 << 10;
  while (2 * keys <= most_tile_keys && 2 * keys * row_bytes <= most_bytes) keys *= 2;
  return keys;
}

// Of a mask or bias, one number a pair of query and key unless broadcast.
double pair_bytes(const problem& p, const int64_t* strides, int64_t size) {
  const int64_t n[] = {p.batch, p.heads, p.q_len, p.kv_len};
  double bytes = static_cast<double>(size);
  for (int i = 0; i < 4; ++i) bytes *= strides[i] == 0 ? 1.0 : static_cast<double>(n[i]);
  return bytes;
}

// Whether rows of `dim` elements of `size` bytes are so many bytes apart, or a multiple of it, with others between them: as heads
// lie in [batch, length, heads, head_dim].
bool are_apart(int64_t bytes, int64_t stride, int64_t dim, int64_t size) {
  return stride * size % bytes == 0 && dim * size % bytes != 0;
}

// Whether rows of neighbouring heads lie next to each other, as in [batch, length, heads, head_dim].
bool are_side_by_side(const problem& p) {
  return p.kv_heads > 1 && p.k_strides[1] == p.head_dim && p.v_strides[1] == p.v_dim && p.k_strides[3] == 1 &&
         p.v_strides[3] == 1;
}

bool writes_side_by_side(const problem& p) {
  return p.kv_heads > 1 && p.out_strides[1] == p.v_dim && p.out_strides[3] == 1;
}

// The problem with all heads of a batch as those of one entry, or nothing: where nothing tells an entry's heads from more heads of the entry
// before: so that the steps of several follow each other in a task (heads_of_task) where each entry has few. On an Intel Xeon
// (AVX-512 and AVX2), one thread: 32 entries of a head and 16 keys 1.34 to 1.47 times as fast, 2 to 64 entries of one and two
// heads and 8 to 64 keys 1.05 to 1.29, entries of many heads 0.97 to 1.04; two threads 0.96 to 1.14.
std::optional<problem> joined(const problem& p) {
  constexpr uint32_t tells_apart =
      MH_INPUT_KEY_MASK | MH_INPUT_SEQUSED_K | MH_INPUT_Q_OFFSET | MH_INPUT_ALIBI | MH_INPUT_SINKS;
  if (p.batch <= 1 || p.has_input(tells_apart)) return {};
  problem one = p;
  one.batch = 1;
  one.heads = p.batch * p.heads;
  one.kv_heads = p.batch * p.kv_heads;
  // Entry after entry heads have to lie as far apart as in one. Strides of what is empty may be any, of what is not there are 0.
  const auto join = [](int64_t* strides, int64_t heads) {
    if (heads == 1) strides[1] = strides[0];
    int64_t next = 0;
    return heads == 1 || (!__builtin_mul_overflow(heads, strides[1], &next) && strides[0] == next);
  };
  for (int64_t* strides : {one.q_strides, one.out_strides, one.mask_strides, one.bias_strides, one.lse_strides}) {
    if (!join(strides, p.heads)) return {};
  }
  for (int64_t* strides : {one.k_strides, one.v_strides}) {
    if (!join(strides, p.kv_heads)) return {};
  }
  return one;
}

// Shares pay where cores find their own in L2 in the next call, if but half of it, where reading takes time beside the
// arithmetic, and where tasks cost about the same, as what is left of a share comes no longer longest first. On 16 cores with 2 MB
// of L2 each, against all tasks in order: one row and 1024 keys 1.25 to 1.5 times as fast, 16 x 16 1.3 to 1.5, sentences of
// 32 tokens 1.1 to 1.5, of 128 1.03 to 1.2, 384 tokens 1.0 to 1.4. Not so: of four times what the caches hold 0.86 to 0.91,
// 448 x 1500 0.88 to 1.0, causal prompts 0.81 to 1.0. On two cores 0.97 to 1.04.
// Where heads lie side by side, a core that asks ahead brings lines of another one's, and takes those that it writes: there
// from any memory, causal too if each thread gets several heads (schedule.cpp). On two cores, 16 x 64 to 256 x 256, 8 to 137
// MB, 1.04 to 1.4 (results alone side by side 1.15 to 1.41, the rest alone 1.07 to 1.15), 384 and more 0.94 to 1.05, steps
// 0.99 to 1.0.
constexpr double most_flops_per_number = 512;  // of all that is read and written
int64_t share_threads_of(const plan& plan, double bytes, int64_t l2_bytes) {
  const double numbers = bytes / static_cast<double>(dtype_bytes(plan.p.dtype));
  if (plan.flops > most_flops_per_number * numbers) return INT64_MAX;
  if (plan.kernel != route_decode && (are_side_by_side(plan.p) || writes_side_by_side(plan.p)) &&
      plan.flops <= most_flops_per_number / 2 * numbers) {
    return 1;
  }
  if (!has_even_rows(plan.p)) return INT64_MAX;
  return static_cast<int64_t>(bytes / (2 * static_cast<double>(l2_bytes))) + 1;
}

// Whether what lies in half of L3 is better not asked for, by decode.
bool comes_unasked(cpu_core core, const problem& p, int64_t lanes_of_f32, double l2s) {
  const bool widened = dtype_bytes(p.dtype) == 2, wide = lanes_of_f32 >= 16;
  const int64_t rows = p.group() * p.q_len;
  switch (core) {
    case cpu_core::zen5:
      return !widened;
    case cpu_core::zen4:
      return rows <= (wide ? 3 : 1) || (wide && widened);
    case cpu_core::intel:
      if (widened) return false;
      return are_side_by_side(p) ? rows <= 2 : rows <= 3 && l2s <= (wide ? 2 : 4);
    default:
      return false;
  }
}

// Whether rows of K and of V follow each other without gaps: those of a head, or of all heads of an entry, which lie side by side.
bool has_rows_in_order(const problem& p) { return p.k_strides[2] == p.head_dim && p.v_strides[2] == p.v_dim; }
bool has_heads_in_order(const problem& p) {
  return are_side_by_side(p) && p.k_strides[2] == p.kv_heads * p.head_dim && p.v_strides[2] == p.kv_heads * p.v_dim;
}

// Whether kernels with AVX-512 ask for K with K and for V with V. (16 bits and others never do: decode.hpp, may_ask_own.)
bool asks_for_own(cpu_core core, const problem& p, double l3s) {
  if (!has_rows_in_order(p) && !(core == cpu_core::zen5 && has_heads_in_order(p))) return false;
  const int64_t rows = p.group() * p.q_len;
  const bool large = std::max(p.head_dim, p.v_dim) * dtype_bytes(p.dtype) > 256, as_four = rows == 3 || rows == 4;
  return core == cpu_core::zen5 || (core == cpu_core::intel && l3s <= 1 / 3.0 && !(large && as_four));
}

// Whether decode with AVX-512 does 3 rows more than whole fours as four.
bool adds_rows(cpu_core core, const plan& plan) {
  if (plan.kernel != route_decode || !plan.prefetch || plan.copy_kv || plan.table->lanes < 16) return false;
  const bool widened = dtype_bytes(plan.p.dtype) == 2;
  return core == cpu_core::intel || (core == cpu_core::zen5 && plan.asks_own && !widened);
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
  const int64_t taken =
      rows_on_unit(plan.unit_steps ? plan.table->dtype[p.dtype].unit_steps : no_unit_steps, plan.block_q);
  if (takes_turns(plan)) return std::clamp<int64_t>(most_rows_at_once / taken, 1, plan.entry_heads);
  const int64_t tile_bytes = std::min(p.kv_len, plan.block_kv) * (p.head_dim + p.v_dim) * dtype_bytes(p.dtype);
  const int64_t room = in_l2 ? l2_bytes / 2 : p.kv_len <= plan.block_kv ? l1_bytes : 0;
  const int64_t most = std::min(most_decode_rows / plan.block_q, room / std::max<int64_t>(tile_bytes, 1));
  return std::clamp<int64_t>(most, 1, plan.entry_heads);
}

// Of so many keys are the turns of heads that lie side by side (heads_of_task): of K a block of scores of one row, of V as many as
// have a sum of their own where there are more than four rows (decode_values.hpp). Where all is asked for in the order of
// memory (by tasks of all heads, or of so many that a head's part lies in one row) and comes from there, up to four rows have
// shorter turns, nearer to that order: on Zen 5, 53 shapes of 1 to 16 rows and 2 to 64 heads of 64 to 128, f32, bf16 and f16,
// 1.35 times as fast on one thread as with own rows asked for in usual turns, 1.25 on two (0.94 to 1.86), AVX2 1.41 and 1.30;
// in the order of memory alone 1.05 to 1.45, more than four rows 0.95 to 1.46. Of 16 bits and 2 KB in rows of all heads 8 keys
// are best (with 16 0.85 to 1.0 times as fast, 4 0.95 to 1.0), of 512 bytes 32 (8 0.84), of f32 and 4 KB 4 (8 0.85, 2 1.0), of
// 16 KB 2 (4 0.75); three and four rows 8 (4 0.7 to 1.08). From L3 these were 0.65 to 1.1, and turns of 64 keys, where they
// bring no more than 256 KB, 1.04 on one thread and two (19 shapes, 0.95 to 1.25; of 512 KB 0.77 to 1.0).
void set_turns(plan& plan, bool from_memory) {
  const problem& p = plan.p;
  const int64_t rows = p.group() * p.q_len, element = dtype_bytes(p.dtype);
  plan.k_turn = usual_k_turn;
  plan.v_turn = usual_v_turn;
  if (!plan.asks_in_order || rows > 4) return;
  const int64_t bytes = p.kv_heads * std::max(p.head_dim, p.v_dim) * element;
  if (!from_memory) {
    if (bytes <= 4096) plan.k_turn = plan.v_turn = 64;
    return;
  }
  if (rows > 2 && element > 4) return;  // 0.74 to 0.9
  const int64_t least = rows > 2 ? 8 : bytes > 8192 ? 2 : 4;
  const auto fitting = static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(16384 / bytes)));
  plan.v_turn = std::clamp(fitting, least, plan.v_turn);
  plan.k_turn = std::min(plan.k_turn, plan.v_turn);
}

// Rows of V this many bytes apart, or a multiple of it, fall into so few sets of a usual L1 cache (64 sets of 64 bytes)
// that the 64 rows of a tile push each other out.
constexpr int64_t crowding_bytes = 1024;
// From this many rows on it pays to copy them first (heads of 64, AVX-512: 48 rows 0.92 times as fast, 128 1.02, 384 1.07,
// 1024 1.05; AVX2: 48 0.98, 128 0.98, 384 1.06, 1024 1.05).
constexpr int64_t copying_rows = 192;

bool shorter_than(const problem& p, int64_t lanes) { return p.head_dim < lanes || p.v_dim < lanes; }

// Whether kernels read copies of K and V: where elements of the arithmetic type do not lie next to each other, for the
// decode route at least a vector of them, and where a tile would crowd L1 and there are rows enough to pay for copying.
bool needs_copy(const problem& p, route kernel, int64_t lanes) {
  if (kernel != route_decode && (p.dtype == MH_DTYPE_BF16 || p.dtype == MH_DTYPE_F16)) return true;
  if ((p.k_strides[3] != 1 && p.head_dim > 1) || (p.v_strides[3] != 1 && p.v_dim > 1)) return true;
  if (kernel == route_decode) return shorter_than(p, lanes);
  const int64_t size = dtype_bytes(p.dtype);
  return p.group() * p.q_len >= copying_rows && (are_apart(crowding_bytes, p.k_strides[2], p.head_dim, size) ||
                                                 are_apart(crowding_bytes, p.v_strides[2], p.v_dim, size));
}

// Whether the last rows of a head go by pairs (steps_by_pairs). Zen 4, bf16, 33 to 155 tokens, heads of 64 and 128: 1 row 0.98 to
// 1.01 times as fast as by multiply-adds, 5 to 13 1.02 to 1.23, and beside the unit's panels 17 rows 1.07 to 1.17, 23 1.02 to 1.05,
// 27 0.94 to 0.99. Heads of 40 to 112: 5 to 17 rows 1.01 to 1.13, 20 rows 0.93 to 1.06, 23 0.87 to 0.99.
bool last_by_pairs(const plan& plan) {
  return plan.kernel == route_matrix && has_heads_for(steps_of_pairs, plan.p) &&
         plan.table->dtype[plan.p.dtype].unit_steps == steps_of_pairs;
}

// The last rows of a head where they would fill so little of a panel's last vector, or of the unit's last panel, that the
// decode route does them sooner: of 17, 49 (windows of 7 x 7), 197 or 577 (images and their class) 1, 1, 5 and 1. On Zen 4,
// 17 to 144 rows and heads of 32 to 128, f32 with AVX-512 1 row 1.23 to 1.33 times as fast as a vector of it, 4 rows 1.18 to
// 1.27, 8 rows 1.04 to 1.23; AVX2 1 row 1.1 to 1.36, 4 rows 1.03 to 1.17; bf16 on VDPBF16PS, 129 rows 1.2, 136 1.06 to 1.14,
// 577 1.05 to 1.07. They were even at 8, 12 and 14 rows of heads of 32, 64 and 128, on AVX2 at 4, 6 and 7. Elsewhere, where
// a second vector costs less (two of 16 lanes are multiplied a cycle, or a unit of tiles), it is unmeasured: fewer rows, and
// none of vectors of 4 and 2.
int64_t last_rows_of(const plan& plan, int64_t lanes, cpu_core core) {
  const problem& p = plan.p;
  const bool matrix = plan.kernel == route_matrix;
  const int64_t grain = matrix ? matrix_rows : lanes, rows = p.group() * p.q_len;
  // Not by strides, on which no bit of a result depends.
  if (plan.kernel == route_decode || shorter_than(p, lanes) || rows < grain || lanes <= 4) return 0;
  const int64_t last = rows % grain;
  if (last_by_pairs(plan)) return last <= (has_whole_steps(plan.p) ? 24 : 17) ? last : 0;
  const bool measured = core == cpu_core::zen4 || plan.table->lanes == 8;
  double most = (measured ? 0.75 : 0.5) * even_rows(p, lanes);
  if (matrix && !measured) most = std::min(most, plan.table->dtype[p.dtype].matrix_rows / 3.0);
  return static_cast<double>(last) <= most ? last : 0;
}

}  // namespace

std::pair<int64_t, int64_t> key_range(const problem& p, int64_t i) {
  const int64_t keys = p.kv_len - p.extra_keys;
  int64_t offset = 0;
  if (p.align == MH_ALIGN_BOTTOM_RIGHT) offset = keys - p.q_len;
  if (p.align == MH_ALIGN_OFFSET && !p.has_input(MH_INPUT_Q_OFFSET)) offset = p.q_offset;
  const bool known = !p.has_input(MH_INPUT_Q_OFFSET);
  int64_t begin = 0;
  int64_t end = keys;
  const int64_t at = i + offset;
  if (known && p.causal) end = std::min(end, at + 1);
  if (known && p.window_right >= 0) end = std::min(end, at + p.window_right + 1);
  if (known && p.window_left >= 0) begin = std::clamp<int64_t>(at - p.window_left, 0, keys);
  return {begin, std::max(begin, end)};
}

bool has_even_rows(const problem& p) { return !p.causal && p.window_left < 0 && p.window_right < 0; }

namespace {

// Pairs that are attended, of one batch entry and head.
double attended_pairs(const problem& p) {
  if (has_even_rows(p)) return static_cast<double>(p.q_len) * static_cast<double>(p.kv_len);
  double pairs = 0;
  // Ranges change linearly between few corners; long queries are sampled evenly.
  const int64_t step = std::max<int64_t>(1, p.q_len / 65536);
  for (int64_t i = 0; i < p.q_len; i += step) {
    const auto [begin, end] = key_range(p, i);
    pairs += static_cast<double>((end - begin + p.extra_keys) * std::min(step, p.q_len - i));
  }
  return pairs;
}

// Of the tiles of a panel's rows and block_kv keys; of very many panels one stands for its neighbours.
double share_skipped(const problem& p, int64_t panel_rows, int64_t block_kv) {
  const int64_t group = p.group();
  const int64_t tiles = blocks(p.kv_len, block_kv);
  if (tiles == 0 || p.q_len == 0) return 0;
  double used = 0;
  int64_t panels = 0;
  const int64_t step = panel_rows * (1 + p.q_len * group / (panel_rows * 65536));
  for (int64_t row = 0; row < p.q_len * group; row += step, ++panels) {
    const int64_t first = row / group;
    const int64_t last = (std::min(row + panel_rows, p.q_len * group) - 1) / group;
    const int64_t begin = key_range(p, first).first;
    const int64_t end = p.extra_keys > 0 ? p.kv_len : key_range(p, last).second;
    const int64_t skipped = begin / block_kv;
    if (begin < end) used += static_cast<double>(blocks(end, block_kv) - skipped);
  }
  return 1.0 - used / (static_cast<double>(tiles) * static_cast<double>(panels));
}

// Bytes of so many things of `each` bytes, or more than any machine has: plans are made of problems of any lengths.
int64_t bytes_of(int64_t count, int64_t each) {
  constexpr int64_t most = int64_t{1} << 50;
  int64_t bytes = 0;
  return __builtin_mul_overflow(count, each, &bytes) ? most : std::min(bytes, most);
}

// An odd number of lines, of 64 bytes.
int64_t kept_pitch(const problem& p) {
  const int64_t line = 64 / (p.is_f64() ? 8 : 4);
  return (blocks(p.kv_len, line) | 1) * line;
}
int64_t kept_row_bytes(const problem& p) { return bytes_of(kept_pitch(p), p.is_f64() ? 8 : 4); }

// Scores of all rows are kept where they are few, which spreads a few rows' weights over threads; and where the keys of so few
// rows are split among them that scores take less than K and V.
keeping how_to_keep(const problem& p, int64_t chunks, int64_t l2_bytes) {
  constexpr int64_t few_rows = 16;
  if ((p.outputs & of_kept_scores) == 0) return keeping::nothing;
  const int64_t most_rows = 4 * l2_bytes / kept_row_bytes(p);
  const bool of_all = p.batch * p.heads * p.q_len <= most_rows || (chunks > 1 && p.group() * p.q_len <= few_rows);
  return of_all ? keeping::of_all : keeping::of_task;
}

// How many rows' scores a task keeps at a time: of panels that fit into a quarter of L2 (half and an eighth of it are as fast), or of
// one; of four, where each time tiles of K and V are brought into an order of their own. Where there are many keys of less, so that
// threads' memory is bounded, but by the least that a kernel takes.
int64_t rows_kept(const plan& plan, int64_t l2_bytes) {
  constexpr int64_t most_bytes = 4 << 20;
  if (plan.kernel == route_decode) return plan.block_q;
  const bool matrix = plan.kernel == route_matrix;
  const int64_t panel = plan.panel_rows, row_bytes = kept_row_bytes(plan.p), least = matrix ? panel : plan.lanes();
  const int64_t panels = std::max<int64_t>(l2_bytes / 4 / row_bytes / panel, matrix || plan.copy_kv ? 4 : 1);
  const int64_t rows = std::min(panels * panel, most_bytes / row_bytes);
  return std::min(plan.block_q, rows >= panel ? rows / panel * panel : std::max(rows / least * least, least));
}

// Rows of a task that makes weights (plan.hpp: keeps). A block of rows is added up in column sums: the same blocks however the batch
// makes scores be kept.
int64_t rows_weighed(const plan& plan) {
  constexpr int64_t scores_of_task = 16384;
  const problem& p = plan.p;
  int64_t rows = plan.block_q;
  if (!p.has_output(MH_OUTPUT_COLUMN_SUMS)) {
    if (plan.keeps == keeping::of_all) rows = std::max<int64_t>(scores_of_task / std::max<int64_t>(p.kv_len, 1), 1);
    if (plan.keeps == keeping::of_task)
      rows = std::min(rows, plan.panel_rows * (plan.kernel == route_matrix || plan.copy_kv ? 4 : 2));
  }
  if (!means(p)) return rows;
  // Panels of a unit hold the same rows as without: one that is not finite is done again with those beside it.
  return round_up(rows, plan.kernel == route_matrix ? std::lcm(matrix_rows, p.group()) : p.group());
}

// p: the plan's problem, or as joined.
kernel_call make_call(const plan& plan, const problem& p) {
  kernel_call c{};
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
  const double log2e = 1.4426950408889634074;
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
  // Beyond any length, so that position +- window cannot overflow.
  c.window_left = std::min(p.window_left, int64_t{1} << 61);
  c.window_right = std::min(p.window_right, int64_t{1} << 61);
  c.index_type = p.index_type;
  c.bias_dtype = p.bias_dtype;
  c.alibi_mode = p.alibi_mode;
  c.lse_base = p.lse_base;
  c.scores_stage = p.scores_stage;
  c.chunks = plan.chunks;
  c.chunk_keys = plan.chunk_keys;
  c.block_kv = plan.block_kv;
  c.copy_kv = plan.copy_kv;
  c.tile = plan.table->dtype[p.dtype].attention[route_tile];
  c.prefetch = plan.prefetch;
  c.asks_own = plan.asks_own;
  c.adds_rows = plan.adds_rows;
  c.asks_l1 = plan.asks_l1;
  c.asks_in_order = plan.asks_in_order;
  c.whole_v_rows = plan.whole_v_rows;
  c.k_turn = plan.k_turn;
  c.v_turn = plan.v_turn;
  c.unit_steps = plan.unit_steps;
  c.unit_keys = most_keys_on_unit(plan.p, plan.table->dtype[p.dtype]);
  c.kept_pitch = plan.keeps == keeping::nothing ? 0 : kept_pitch(p);
  c.row_blocks = plan.weighed_blocks;
  return c;
}

}  // namespace

kernel_call last_call(const plan& plan, const kernel_call& of_panels) {
  kernel_call c = of_panels;
  c.unit_steps = last_by_pairs(plan);
  c.unit_keys = std::numeric_limits<int64_t>::max();
  c.block_kv = decode_keys(plan.p, plan.last_rows);
  c.copy_kv = needs_copy(plan.p, route_decode, plan.lanes());
  return c;
}

kernel_call scores_call(const plan& plan, const kernel_call& of_panels) {
  kernel_call c = of_panels;
  c.block_kv = keys_of_tile[route_tile];
  c.copy_kv = needs_copy(plan.p, route_tile, plan.lanes());
  return c;
}

int64_t scores_block_q(const plan& plan) { return 4 * plan.table->panel_rows[plan.p.is_f64()]; }

plan make_plan(const problem& p, const kernel_table& table, int64_t l2_bytes, cpu_core core, int64_t l3_bytes) {
  const default_fp_state fp;
  plan plan{};
  plan.p = p;
  plan.table = &table;
  const bool f64 = p.is_f64();
  const int64_t real = f64 ? 8 : 4;
  const int64_t lanes = plan.lanes();
  const int64_t rows = p.group() * p.q_len;

  const dtype_kernels& kernels = table.dtype[p.dtype];
  const double pairs = attended_pairs(p);
  const bool has_unit = kernels.attention[route_matrix] != nullptr;
  plan.unit_steps = steps_on_unit(p, kernels);
  plan.kernel = plan.unit_steps                               ? route_decode
                : has_unit && goes_to_unit(p, kernels, pairs) ? route_matrix
                : goes_to_decode(p, lanes)                    ? route_decode
                                                              : route_tile;
  const bool by_tiles = plan.unit_steps && kernels.unit_steps == steps_of_tiles;
  plan.block_kv = by_tiles                      ? keys_of_unit_step
                  : plan.kernel == route_decode ? decode_keys(p, rows, plan.unit_steps)
                                                : keys_of_tile[plan.kernel];
  plan.copy_kv = needs_copy(p, plan.kernel, lanes);
  plan.last_rows = last_rows_of(plan, lanes, core);
  const int64_t whole_rows = rows - plan.last_rows;  // those of panels
  plan.chunk_keys = round_up(split_keys, plan.block_kv);
  plan.chunks = rows <= split_rows ? std::max<int64_t>(1, blocks(p.kv_len, plan.chunk_keys)) : 1;
  if (plan.chunks == 1) plan.chunk_keys = round_up(std::max<int64_t>(p.kv_len, 1), plan.block_kv);
  plan.keeps = how_to_keep(p, plan.chunks, l2_bytes);

  const double kv_bytes = static_cast<double>(dtype_bytes(p.dtype)) * static_cast<double>(p.head_dim + p.v_dim) *
                          static_cast<double>(p.batch * p.kv_heads) * static_cast<double>(p.kv_len);
  const bool arithmetic = rows > 1 || dtype_bytes(p.dtype) < real;
  double read = kv_bytes;
  if (p.has_input(MH_INPUT_MASK)) read += pair_bytes(p, p.mask_strides, 1);
  if (p.has_input(MH_INPUT_BIAS)) read += pair_bytes(p, p.bias_strides, dtype_bytes(p.bias_dtype));
  const double l2s = read / static_cast<double>(l2_bytes),
               l3s = read / static_cast<double>(std::max<int64_t>(l3_bytes, 1));
  const bool unasked = plan.kernel == route_decode && l3s < 0.5 && comes_unasked(core, p, table.lanes, l2s);
  plan.prefetch = !unasked && l2s > (arithmetic ? 1 : 4);
  plan.asks_own = asks_for_own(core, p, l3s);
  plan.adds_rows = adds_rows(core, plan);
  const bool zen5 = core == cpu_core::zen5;
  const bool zen5_memory = zen5 && l3s > 0.5;
  // Nor where tiles are larger than L1 (decode_keys), but on Zen 5 from memory: 1.15 to 1.2 times as fast.
  plan.asks_l1 = core != cpu_core::zen4 && (zen5_memory || !(plan.unit_steps && rows <= 2));
  const int64_t most_at_once = plan.unit_steps ? 8 : 4;  // more ask once a pass
  plan.asks_in_order = zen5 && ((rows <= most_at_once && has_rows_in_order(p)) || has_heads_in_order(p));
  plan.whole_v_rows = dtype_bytes(p.dtype) == 2 ? zen5_memory && plan.unit_steps && rows <= 4 : plan.asks_own;
  const bool matrix = plan.kernel == route_matrix;
  plan.panel_rows = matrix ? matrix_rows : table.panel_rows[f64];
  const std::optional<problem> one = plan.kernel == route_decode && !has_second_pass(p) ? joined(p) : std::nullopt;
  const problem& told = one ? *one : p;
  plan.entries = told.batch;
  plan.entry_heads = told.kv_heads;
  plan.heads_at_once = 1;
  if (plan.kernel == route_decode) {
    plan.block_q = std::max<int64_t>(rows, 1);
    const bool in_l2 = read <= static_cast<double>(l2_bytes);
    if (!in_l2 && are_side_by_side(p)) set_turns(plan, zen5_memory);
    plan.heads_at_once = heads_of_task(plan, in_l2, l2_bytes);
  } else {
    // As many panels as share a tile of K and V while it is in cache, in blocks of even size; Q, O and a tile of K and V
    // of a task within half of L2.
    const int64_t row_bytes = (p.head_dim + p.v_dim) * real;
    const int64_t room = std::max<int64_t>(l2_bytes / 2 - plan.block_kv * row_bytes, 0);
    const int64_t panel_bytes = plan.panel_rows * row_bytes;
    // More than usual with Q and O in a quarter of it.
    const bool for_more = matrix && !p.has_input(MH_INPUT_MASK) && !p.has_input(MH_INPUT_BIAS);
    const int64_t limit =
        for_more ? std::clamp(l2_bytes / 4 / panel_bytes, most_panels, most_matrix_panels) : most_panels;
    const int64_t most = std::clamp<int64_t>(room / panel_bytes, 1, limit);
    const int64_t panels = blocks(std::max<int64_t>(whole_rows, 1), plan.panel_rows);
    const int64_t block = blocks(panels, blocks(panels, most)) * plan.panel_rows;
    plan.block_q = std::min(block, round_up(std::max<int64_t>(whole_rows, 1), lanes));
  }
  plan.row_blocks = blocks(whole_rows, plan.block_q);
  if (plan.keeps == keeping::of_task) plan.kept_rows = rows_kept(plan, l2_bytes) + plan.last_rows;
  plan.weighed_rows = rows_weighed(plan);
  const bool by_blocks = plan.keeps == keeping::of_task || p.has_output(MH_OUTPUT_COLUMN_SUMS);
  plan.weighed_blocks = blocks(by_blocks ? whole_rows : rows, plan.weighed_rows);

  plan.tasks = p.batch * p.kv_heads * plan.row_blocks * plan.chunks;

  const double heads = static_cast<double>(p.batch * p.heads);
  plan.flops = 2.0 * static_cast<double>(p.head_dim + p.v_dim) * heads * pairs;
  plan.bytes = static_cast<double>(dtype_bytes(p.dtype)) * static_cast<double>(p.head_dim + p.v_dim) * heads *
                   static_cast<double>(p.q_len) +
               kv_bytes;
  plan.expected_us = expected_us(plan.flops, plan.bytes);
  plan.share_threads = share_threads_of(plan, plan.bytes + read - kv_bytes, l2_bytes);
  plan.tiles_skipped = share_skipped(p, std::min(plan.block_q, plan.panel_rows), plan.block_kv);

  plan.call = make_call(plan, told);
  plan.scratch_bytes = kernels.scratch_bytes[plan.kernel](plan.call, plan.block_q * plan.heads_at_once);
  if (plan.last_rows > 0) {
    const kernel_call last = last_call(plan, plan.call);
    plan.scratch_bytes = std::max(plan.scratch_bytes, kernels.scratch_bytes[route_decode](last, plan.last_rows));
  }
  const bool writes_scores = p.has_output(MH_OUTPUT_SCORES);
  if (writes_scores) {
    const kernel_call scores = scores_call(plan, plan.call);
    plan.scratch_bytes = std::max(plan.scratch_bytes, kernels.scratch_bytes[route_tile](scores, scores_block_q(plan)));
  }
  if (plan.keeps == keeping::of_task) {
    plan.kept_at = round_up(plan.scratch_bytes, 64);
    plan.scratch_bytes = plan.kept_at + bytes_of(plan.kept_rows, kept_row_bytes(p));
  }
  constexpr int64_t state_bytes = 2 * sizeof(double);
  const int64_t all_rows = p.batch * p.heads * p.q_len;
  plan.partial_out_bytes = plan.chunks > 1 ? round_up(plan.chunks * all_rows * p.v_dim * real, 64) : 0;
  plan.partial_state_bytes = plan.chunks > 1 ? round_up(plan.chunks * all_rows * state_bytes, 64) : 0;
  plan.kept_bytes = plan.keeps == keeping::of_all ? bytes_of(all_rows, kept_row_bytes(p)) : 0;
  plan.column_bytes =
      p.has_output(MH_OUTPUT_COLUMN_SUMS)
          ? round_up(bytes_of(p.batch * p.heads, bytes_of(plan.weighed_blocks, bytes_of(p.kv_len, real))), 64)
          : 0;
  plan.shared_bytes = plan.partial_out_bytes + plan.partial_state_bytes + plan.kept_bytes + plan.column_bytes;
  plan.alone = cut_for(plan, 1);
  return plan;
}

plan make_plan(const problem& p, const kernel_table& table, const machine& m) {
  return make_plan(p, table, m.l2_bytes, m.core, m.l3_bytes);
}

const char* const route_names[route_count] = {"tile", "decode", "matrix"};

double expected_us(double flops, double bytes) { return flops / 40e3 + bytes / 10e3; }

namespace {

std::string kernel_name(const plan& plan) {
  return std::string("attention/") + dtype_name(plan.p.dtype) + "/" + route_names[plan.kernel] + "@" + plan.table->isa;
}

std::string as_json(const plan& plan, const schedule& order, int64_t threads) {
  json out;
  out.raw("{").key("problem").value(to_text(plan.p).text).key("kernel").value(kernel_name(plan).c_str());
  out.key("isa").value(plan.table->isa).key("dtype").value(dtype_name(plan.p.dtype));
  out.key("block_q").value(plan.block_q).key("block_kv").value(plan.block_kv);
  out.key("row_blocks").value(plan.row_blocks).key("last_rows").value(plan.last_rows).key("chunks").value(plan.chunks);
  out.key("chunk_keys").value(plan.chunk_keys).key("tasks").value(order.tasks());
  out.key("copies_kv").value(plan.copy_kv).key("unit_steps").value(plan.unit_steps);
  out.key("asks_in_order").value(plan.kernel == route_decode && plan.prefetch && plan.asks_in_order);
  out.key("second_pass").value(has_second_pass(plan.p));
  out.key("scratch_bytes_per_thread").value(plan.scratch_bytes).key("shared_bytes").value(plan.shared_bytes);
  out.key("flops").value(plan.flops).key("bytes").value(plan.bytes).key("tiles_skipped").value(plan.tiles_skipped);
  out.key("threads").value(threads).key("balance").value(order.balance());
  return out.raw("}").text;
}

std::string as_text(const plan& plan, const schedule& order, int64_t threads) {
  std::string text = to_text(plan.p).text;
  const auto add = [&text](const auto&... parts) { (append(text, parts), ...); };
  const auto yes = [](bool x) { return x ? "yes" : "no"; };
  const auto digits = [](double x, int count) { return std::string(number_text(x, count).digits); };
  add(": ", kernel_name(plan), " (", plan.table->isa, ", ", dtype_name(plan.p.dtype), "), block_q ", plan.block_q,
      ", block_kv ", plan.block_kv, ", row_blocks ", plan.row_blocks, ", last_rows ", plan.last_rows, ", chunks ",
      plan.chunks, " of ", plan.chunk_keys, " keys, tasks ", order.tasks(), ", copies_kv ", yes(plan.copy_kv),
      ", second_pass ", yes(has_second_pass(plan.p)), ", workspace ", plan.scratch_bytes, " per thread + ",
      plan.shared_bytes, ", ", digits(plan.flops, 4), " flops, ", digits(plan.bytes, 4), " bytes, tiles skipped ",
      digits(plan.tiles_skipped, 3), ", threads ", threads, ", balance ", digits(order.balance(), 4));
  return text;
}

}  // namespace

std::string describe(const plan& plan, bool json, int64_t threads) {
  const schedule order(plan, threads);
  return json ? as_json(plan, order, threads) : as_text(plan, order, threads);
}

}  // namespace manyhead
