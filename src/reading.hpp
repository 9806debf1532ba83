// How kernels bring what lies beyond L2: what is asked for ahead of need, and in decode which of the heads take turns. By the kind
// of core, and by where and how arrays lie; no bit of a result depends on it.
#pragma once

#include "plan.hpp"

namespace manyhead {

// What a call reads, K, V, masks and biases, beside the caches of a core.
struct footprint {
  double bytes;
  int64_t l2_bytes, l3_bytes;
  double l2s() const { return bytes / static_cast<double>(l2_bytes); }
  double l3s() const { return bytes / static_cast<double>(l3_bytes > 0 ? l3_bytes : 1); }  // unknown: far away
};

// Sets prefetch and what else kernels are told of asking, k_turn, v_turn and heads_at_once, by route, rows of a task and
// entry_heads.
void choose_reading(plan& plan, cpu_core core, footprint of);

}  // namespace manyhead
