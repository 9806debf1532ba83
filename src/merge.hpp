// Merging partial results that a caller holds: mh_merge_states and mh_merge_state. (Those of split-KV are merged by
// scheduler.cpp with the same kernels.)
#pragma once

#include "manyhead/manyhead.h"

namespace manyhead {

// Both check everything but `exec`, which stands for merge.exec, then compute; they throw manyhead::error.
void merge_states(const mh_merge& merge, const mh_exec& exec, const void* outs, const void* lses, void* out, void* lse);
void merge_state(const mh_merge& merge, const mh_exec& exec, const void* out_a, const void* lse_a, const void* out_b,
                 const void* lse_b, void* out, void* lse);

}  // namespace manyhead
