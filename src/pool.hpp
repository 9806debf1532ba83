// The threads that work is spread over: the host's (exec.parallel_for), oneTBB's, or the caller alone. pool.cpp is the
// only file of src that includes oneTBB.
#pragma once

#include <cstdint>

#include "manyhead/manyhead.h"

namespace manyhead {

// What exec.threads asks for; 0 is the default, mh_threads().
int32_t wanted_threads(int32_t threads);

// As far as there are so many.
int64_t usable_threads(const mh_exec& exec);

// fn(arg, i) for i in 0..n-1, each on a thread of its own as far as there are any. Returns when all have returned.
void spread(int64_t n, const mh_exec& exec, mh_task_fn fn, void* arg);

// Whether each of the n calls of spread runs, as a rule, on a thread with a number of its own, the same in every spread of
// n > 1: oneTBB's do if n is all of them, a host's are taken to. Nothing but speed depends on it.
bool are_numbered(int64_t n, const mh_exec& exec);

// The number of the thread within fn(arg, i).
int64_t thread_number(int64_t i, const mh_exec& exec);

}  // namespace manyhead
