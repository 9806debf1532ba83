// Where the scores of a plan's first pass are kept for the weights, their means and column sums that are made of them.
#pragma once

#include "plan.hpp"

namespace manyhead {

// Numbers from a row of kept scores to the next, an odd number of lines of 64 bytes; and its bytes.
int64_t kept_pitch(const problem& p);
int64_t kept_row_bytes(const problem& p);

// Sets keeps, kept_rows, weighed_rows and weighed_blocks, by route, chunks and row blocks.
void choose_keeping(plan& plan, int64_t l2_bytes);

}  // namespace manyhead
