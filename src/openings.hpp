// Masks, biases and key masks that heads share are looked at once for all of them, before the tasks (kernels/openings.hpp): which
// are, and where what is seen of them lies.
#pragma once

#include "plan.hpp"

namespace manyhead {

// Of how many batch entries there are rows.
int64_t entries_of(const kernel_call& c, const openings& open);

// Sets which are, in plan.call, where the route is chosen. Returns how many bytes they take.
int64_t choose_openings(plan& plan);

// Gives them that memory, 64-byte aligned.
void place_openings(kernel_call& c, char* memory);

}  // namespace manyhead
