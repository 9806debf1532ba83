// Runs a plan: lays out the workspace, hands tasks to the threads of pool.hpp.
#pragma once

#include "plan.hpp"
#include "profile.hpp"

namespace manyhead {

// How many threads a run would use at most, given exec.threads (0 = default).
int32_t thread_count(const plan& plan, int32_t threads);
int64_t workspace_bytes(const plan& plan, int32_t threads);

// tensors have passed check_tensors. exec has been checked but for the workspace's size (throws).
void run(const plan& plan, const mh_tensors& tensors, const mh_exec& exec, const watched_call* within = nullptr);

// items 0..n-1 on at most exec.threads threads, each item once; fn must not throw. For work outside a plan (merge, the
// layer).
void parallel_for(int64_t n, const mh_exec& exec, const watched_call& watched, phase what, mh_task_fn fn, void* arg);

}  // namespace manyhead
