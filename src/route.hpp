// Which kernels compute a problem: the route, the keys of its tiles, whether it reads copies of K and V, and which rows are left to
// the decode route. Bits of results depend on these: nothing here may depend on sizes of caches, threads or neighbours in the batch.
#pragma once

#include "plan.hpp"

namespace manyhead {

// Sets kernel, unit_steps, block_kv, copy_kv, panel_rows and last_rows. pairs: attended, of a head.
void choose_route(plan& plan, double pairs, cpu_core core);

// How many keys an entry may have in use for the unit's steps (kernel_call.unit_keys).
int64_t most_keys_on_unit(const problem& p, const dtype_kernels& kernels);

// What the decode route is told of last_rows where panels are told this.
kernel_call last_call(const plan& plan, const kernel_call& of_panels);

// And what the kernel that writes scores is told, of so many rows a task.
kernel_call scores_call(const plan& plan, const kernel_call& of_panels);
int64_t scores_block_q(const plan& plan);

}  // namespace manyhead
