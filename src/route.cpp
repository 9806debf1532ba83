// See route.hpp.
#include "route.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "blocks.hpp"
#include "check.hpp"
#include "layout.hpp"
#include "machine.hpp"

namespace manyhead {
namespace {

// Keys of a tile, of the route, and in decode of rows and head size: tile borders lie at its multiples, and the same borders mean the
// same bits, so never a function of the machine's caches or of numbers of keys. What the product with V reads again and
// again should stay in the smallest L1, 32 KB: the weights of a panel (96 x 48 x 4 bytes = 18 KB) and a column of lines of
// the tile (96 x 64 = 6 KB). More keys mean fewer passes over the results: 96 was 1.00 to 1.01 times as fast as 64, 48 0.99, 32
// 0.98; 128 gave another 0.01 with heads of 64 on a CPU with 48 KB, and took it away on AVX2.
constexpr int64_t keys_of_tile[] = {96, 64, 128};  // by route: tile, decode (of many rows), matrix

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
// Nor on Zen 5, in f16, are they so soon even: 15 % more rows 1.03 to 1.26 times as fast (7 sizes of heads of 32 to 256, 0.96 to 0.97
// in three places).
bool goes_to_decode(const problem& p, int64_t lanes, cpu_core core) {
  const int64_t rows = p.rows();
  const bool widened = lanes == 16 && dtype_size(p.dtype) == 2 && core == cpu_core::zen5;
  const double even = even_rows(p, lanes) * (widened ? 1.15 : decode_gain(p, lanes));
  if (rows > most_decode_rows) return false;
  if (rows <= lanes) return static_cast<double>(rows) <= even;
  const bool second = lanes == 8 || (lanes == 16 && dtype_size(p.dtype) == 2);
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
  const int64_t rows = p.rows(), dims = p.head_dim + p.v_dim;
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
bool has_large_heads(const problem& p) { return p.head_dim + p.v_dim > 2 * 64; }
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
// Zen 5 one row 0.9 to 1.25, two 0.87 to 1.05, three and four 1.05 to 1.35, six to 12 1.3 to 1.5, 16 to 28 1.6 to 1.95; beside
// the matrix route and 64 to 1024 keys, heads of 32 and 64 24 rows 1.07 to 1.2, 26 rows 0.92 to 1.07, 28 rows 0.89 to 1.01, of 128
// 28 rows 1.02 to 1.04 (28 keys 0.91).
bool steps_by_pairs(const problem& p, const dtype_kernels& kernels, cpu_core core) {
  constexpr int64_t few_keys = 16;
  const bool whole = has_whole_steps(p);
  const bool panel_is_sooner = core == cpu_core::zen5 && !has_large_heads(p) && p.kv_len >= kernels.matrix_keys;
  const int64_t most_rows = !whole ? 20 : panel_is_sooner ? 25 : 28, most_rows_of_few_keys = whole ? 8 : 0;
  return p.rows() <= (p.kv_len < few_keys ? most_rows_of_few_keys : most_rows);
}

// Whether a step of few rows is the decode route's with the unit's products (decode_unit.hpp). Measured on one thread of an
// Intel Xeon (AMX), bf16, in the time that decode by multiply-adds takes (up to 10 rows) or the matrix route (from 11 on): 32 to
// 512 keys in cache, heads of 64 and 128, 2 rows 1.0 to 1.45, 3 and 4 rows 0.63 to 1.02 (48 keys of 64 take as long), 6 and 8
// rows 0.41 to 0.77, 12 and 16 rows 0.47 to 0.73, 20 rows 0.7 to 1.0, 24 rows 0.82 to 1.12, 28 rows 0.88 to 1.13; 16 keys 0.85 to
// 1.15, 24 keys 0.71 to 0.98. From L3, 3 rows 0.8, 4 rows 0.94 to 0.97, 6 rows 0.66. Heads of 256 from L3: 3 rows 1.06, 4 rows
// 1.15 to 1.27, 6 rows 0.87, 12 rows 0.94, 20 rows 1.08. f16 on a unit that has it: unmeasured, taken as bf16.
bool steps_on_unit(const problem& p, const dtype_kernels& kernels, cpu_core core) {
  if (!has_heads_for(static_cast<how_unit_steps>(kernels.unit_steps), p) || !unit_takes_scores(p)) return false;
  if (kernels.unit_steps == steps_of_pairs) return steps_by_pairs(p, kernels, core);
  const int64_t rows = p.rows();
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
  const int64_t size = dtype_size(p.dtype), row_bytes = std::max(p.head_dim, p.v_dim) * size;
  const int64_t most_bytes = size > 2 ? 256 << 10 : by_pairs ? 64 << 10 : 16 << 10;
  while (2 * keys <= most_tile_keys && 2 * keys * row_bytes <= most_bytes) keys *= 2;
  return keys;
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
  const int64_t size = dtype_size(p.dtype);
  return p.rows() >= copying_rows && (are_apart(crowding_bytes, p.k_strides[2], p.head_dim, size) ||
                                      are_apart(crowding_bytes, p.v_strides[2], p.v_dim, size));
}

// Whether the last rows of a head go by pairs (steps_by_pairs). Zen 4, bf16, 33 to 155 tokens, heads of 64 and 128: 1 row 0.98 to
// 1.01 times as fast as by multiply-adds, 5 to 13 1.02 to 1.23, and beside the unit's panels 17 rows 1.07 to 1.17, 23 1.02 to 1.05,
// 27 0.94 to 0.99. Heads of 40 to 112: 5 to 17 rows 1.01 to 1.13, 20 rows 0.93 to 1.06, 23 0.87 to 0.99.
// On Zen 5 a panel of 16 rows or less (matrix.hpp: columns_of) or more is sooner even, behind 32 rows: of heads of 32 and 64 the
// last 8 rows are by pairs 1.0 to 1.17 times as fast, 10 rows 0.89 to 1.08, 12 rows 0.86 to 1.04, 16 rows 0.83 to 0.98, 20 rows 0.87 to
// 1.08, 24 rows 0.84 to 1.02, the less the fewer keys; of heads of 128 12 rows 0.98 to 1.06, 14 rows 0.93 to 0.99, 20 rows 1.04 to 1.11,
// 24 rows 1.0 to 1.06.
bool last_by_pairs(const plan& plan) {
  return plan.kernel == route_matrix && has_heads_for(steps_of_pairs, plan.p) &&
         plan.table->dtype[plan.p.dtype].unit_steps == steps_of_pairs;
}

// The last rows of a head where they would fill so little of a panel's last vector, or of the unit's last panel, that the
// decode route does them sooner: of 17, 49 (windows of 7 x 7), 197 or 577 (images and their class) 1, 1, 5 and 1. On Zen 4,
// 17 to 144 rows and heads of 32 to 128, f32 with AVX-512 1 row 1.23 to 1.33 times as fast as a vector of it, 4 rows 1.18 to
// 1.27, 8 rows 1.04 to 1.23; AVX2 1 row 1.1 to 1.36, 4 rows 1.03 to 1.17; bf16 on VDPBF16PS, 129 rows 1.2, 136 1.06 to 1.14,
// 577 1.05 to 1.07. They were even at 8, 12 and 14 rows of heads of 32, 64 and 128, on AVX2 at 4, 6 and 7. Elsewhere, where
// a second vector costs less (two of 16 lanes are multiplied a cycle, or a unit of tiles), fewer rows, and none of vectors of 4 and
// 2: on Zen 5, f32 and heads of 64 to 256, 7 and 8 rows 1.03 to 1.12 (of 64 keys 0.94), 9 0.97 to 1.03, 10 0.94; others are unmeasured.
int64_t last_rows_of(const plan& plan, int64_t lanes, cpu_core core) {
  const problem& p = plan.p;
  const bool matrix = plan.kernel == route_matrix;
  const int64_t grain = matrix ? plan.panel_rows : lanes, rows = p.rows();
  // Not by strides, on which no bit of a result depends.
  if (plan.kernel == route_decode || shorter_than(p, lanes) || rows < grain || lanes <= 4) return 0;
  const int64_t last = rows % grain;
  if (last_by_pairs(plan)) {
    const bool whole = has_whole_steps(p), large = whole && has_large_heads(p);
    const bool by_pairs = core != cpu_core::zen5 ? last <= (whole ? 24 : 17)
                          : large                ? last <= 13 || (last > unit_rows / 2 && last < 24)
                                                 : last <= 11;
    return by_pairs ? last : 0;
  }
  const bool measured = core == cpu_core::zen4 || plan.table->lanes == 8;
  const double even = even_rows(p, lanes);
  double most = measured ? 0.75 * even : core == cpu_core::zen5 ? std::min(0.6 * even, 8.0) : 0.5 * even;
  if (matrix && !measured) most = std::min(most, plan.table->dtype[p.dtype].matrix_rows / 3.0);
  return static_cast<double>(last) <= most ? last : 0;
}

}  // namespace

void choose_route(plan& plan, double pairs, cpu_core core) {
  const problem& p = plan.p;
  const int64_t lanes = plan.lanes();
  const dtype_kernels& kernels = plan.table->dtype[p.dtype];
  const bool has_unit = kernels.attention[route_matrix] != nullptr;
  plan.unit_steps = steps_on_unit(p, kernels, core);
  plan.kernel = plan.unit_steps                               ? route_decode
                : has_unit && goes_to_unit(p, kernels, pairs) ? route_matrix
                : goes_to_decode(p, lanes, core)              ? route_decode
                                                              : route_tile;
  const bool by_tiles = plan.unit_steps && kernels.unit_steps == steps_of_tiles;
  plan.block_kv = by_tiles                      ? unit_rows
                  : plan.kernel == route_decode ? decode_keys(p, p.rows(), plan.unit_steps)
                                                : keys_of_tile[plan.kernel];
  plan.copy_kv = needs_copy(p, plan.kernel, lanes);
  plan.panel_rows = plan.kernel == route_matrix ? unit_rows : plan.table->panel_rows[p.is_f64()];
  plan.last_rows = last_rows_of(plan, lanes, core);
}

// One and two rows go by pairs up to half of L3 as it was where steps_by_pairs was measured, 32 MB: from memory lines come too late.
// The kernel asks how many keys an entry has in use: bits may depend neither on the batch nor, from 16 keys on, on how far its
// entries are padded.
int64_t most_keys_on_unit(const problem& p, const dtype_kernels& kernels) {
  constexpr int64_t most_bytes = 16 << 20;
  if (kernels.unit_steps != steps_of_pairs || p.rows() > 2) return std::numeric_limits<int64_t>::max();
  return most_bytes / (p.kv_heads * (p.head_dim + p.v_dim) * dtype_size(p.dtype));
}

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

}  // namespace manyhead
