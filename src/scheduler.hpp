// Runs a plan: lays out the workspace, hands tasks to the threads of pool.hpp.
#pragma once

#include "plan.hpp"
#include "profile.hpp"

namespace manyhead {

// How many threads a run would use at most, given exec.threads (0 = default), whatever the cap.
int32_t thread_count(const plan& plan, int32_t threads);
int64_t workspace_bytes(const plan& plan, int32_t threads);

// tensors have passed check_tensors. exec has been checked but for the workspace's size (throws).
void run(const plan& plan, const mh_tensors& tensors, const mh_exec& exec, const watched_call* within = nullptr);

// items 0..n-1 by at most `workers` <= usable_threads(exec) of exec's threads, each item once; fn must not throw. `worker` <
// workers is no other item's at the same time. For work outside a plan (merge, the layer). shares: as in deal.hpp.
using item_fn = void (*)(void* arg, int64_t item, int64_t worker);
void parallel_for(int64_t n, int64_t workers, const mh_exec& exec, const watched_call& watched, phase what, item_fn fn,
                  void* arg, bool shares = false);

}  // namespace manyhead
