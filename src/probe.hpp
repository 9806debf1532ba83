// What the machine can do at this moment: the rate of multiply-adds in registers, of reading memory, and a core's clock.
// Shared machines change from minute to minute, so these are asked again beside what they are compared with.
#pragma once

#include <cstdint>

#include "kernels/kernel_api.hpp"

namespace manyhead {

// FLOP/s of independent multiply-adds on the unit that the table's kernels of a dtype use, on so many threads together.
double arithmetic_rate(const kernel_table& table, int32_t dtype, int32_t threads, double seconds);

// Bytes/s of reading a buffer of that size again and again, a part of it on each thread.
double read_rate(const kernel_table& table, int64_t bytes, int32_t threads, double seconds);

// Cycles/s of the core that this runs on.
double clock_rate(double seconds);

}  // namespace manyhead
