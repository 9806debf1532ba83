// Which keys the rows of a problem attend, as far as it says without its tensors: lengths in memory as if full.
#pragma once

#include "kernels/positions.hpp"
#include "problem.hpp"

namespace manyhead {

// The keys [begin, end) that query i may attend.
key_range attended_keys(const problem& p, int64_t i);

// Keys from the first to the last that a head's rows may attend, at most, wherever its positions lie.
int64_t most_keys_between(const problem& p);

bool has_even_rows(const problem& p);     // all attend as many keys
double attended_pairs(const problem& p);  // of query and key, of one batch entry and head

// The share of (panel of rows, key tile) pairs that positions rule out.
double share_skipped(const problem& p, int64_t panel_rows, int64_t block_kv);

}  // namespace manyhead
