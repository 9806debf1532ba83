// The threads that work is spread over: the host's (exec.parallel_for), oneTBB's, or the caller alone. pool.cpp is the
// only file of src that includes oneTBB.
#pragma once

#include <cstdint>

#include "manyhead/manyhead.h"

namespace manyhead {

// What exec.threads says; 0 is the default, mh_threads(). What a call asks for has been cut to the cap (machine.hpp: allowed_threads).
int32_t wanted_threads(int32_t threads);

// As far as there are so many.
int64_t usable_threads(const mh_exec& exec);

// fn(arg, 0) and, at most once each, fn(arg, i) for i in 1..n-1, on threads of their own as far as these come in time: who is
// called does all there is to do. Returns when all have returned.
void spread(int64_t n, const mh_exec& exec, mh_task_fn fn, void* arg);

// Within fn(arg, i) of n calls: a number for its thread, as a rule the same in every spread of n. Where n is all of the arena's
// threads it is the thread's own, else i, as oneTBB's threads come to the same calls once these are laid before them, and a
// host's are taken to. Nothing but speed depends on it.
int64_t thread_number(int64_t i, int64_t n, const mh_exec& exec);

}  // namespace manyhead
