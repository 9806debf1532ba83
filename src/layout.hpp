// How the arrays of a problem lie in memory. No bit of a result depends on it, but which way of reading is the faster one does.
#pragma once

#include <optional>

#include "problem.hpp"

namespace manyhead {

// Of a mask or bias, one number a pair of query and key unless broadcast.
double pair_bytes(const problem& p, const int64_t* strides, int64_t size);

// Whether rows of `dim` elements of `size` bytes are so many bytes apart, or a multiple of it, with others between them: as heads
// lie in [batch, length, heads, head_dim].
bool are_apart(int64_t bytes, int64_t stride, int64_t dim, int64_t size);

// Whether rows of neighbouring heads lie next to each other, as in [batch, length, heads, head_dim]: those of K and V, of the result.
bool are_side_by_side(const problem& p);
bool writes_side_by_side(const problem& p);

// Whether rows of K and of V follow each other without gaps: those of a head, or of all heads of an entry, which lie side by side;
// or with gaps, as where K and V are one array, [batch, length, 2, heads, head_dim].
bool has_rows_in_order(const problem& p);
bool has_heads_in_order(const problem& p);
bool has_heads_in_order_with_gaps(const problem& p);

// The problem with all heads of a batch as those of one entry, or nothing: where nothing tells an entry's heads from more heads of
// the entry before.
std::optional<problem> joined(const problem& p);

}  // namespace manyhead
