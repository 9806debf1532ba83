// See keeping.hpp.
#include "keeping.hpp"

#include <algorithm>
#include <numeric>

#include "blocks.hpp"
#include "check.hpp"

namespace manyhead {
namespace {

constexpr uint32_t of_kept_scores = MH_OUTPUT_WEIGHTS | MH_OUTPUT_MEAN_WEIGHTS | MH_OUTPUT_COLUMN_SUMS;

// Scores of all rows are kept where they are few, which spreads a few rows' weights over threads; and where the keys of so few
// rows are split among them that scores take less than K and V.
keeping how_to_keep(const problem& p, int64_t chunks, int64_t l2_bytes) {
  constexpr int64_t few_rows = 16;
  if ((p.outputs & of_kept_scores) == 0) return keeping::nothing;
  const int64_t most_rows = 4 * l2_bytes / kept_row_bytes(p);
  const bool of_all = p.batch * p.heads * p.q_len <= most_rows || (chunks > 1 && p.rows() <= few_rows);
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
  // Whole groups, and whole panels of a unit.
  return round_up(rows, plan.kernel == route_matrix ? std::lcm(plan.panel_rows, p.group()) : p.group());
}

}  // namespace

int64_t kept_pitch(const problem& p) { return odd_lines(p.kv_len, real_size(p.dtype)); }

int64_t kept_row_bytes(const problem& p) { return bytes_of(kept_pitch(p), real_size(p.dtype)); }

void choose_keeping(plan& plan, int64_t l2_bytes) {
  const problem& p = plan.p;
  plan.keeps = how_to_keep(p, plan.chunks, l2_bytes);
  if (plan.keeps == keeping::of_task) plan.kept_rows = rows_kept(plan, l2_bytes) + plan.last_rows;
  plan.weighed_rows = rows_weighed(plan);
  const bool by_blocks = plan.keeps == keeping::of_task || p.has_output(MH_OUTPUT_COLUMN_SUMS);
  const int64_t rows = p.rows();
  plan.weighed_blocks = blocks(by_blocks ? rows - plan.last_rows : rows, plan.weighed_rows);
}

}  // namespace manyhead
