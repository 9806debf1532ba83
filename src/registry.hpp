// Lists, chooses and forces the ISA tables that src/kernels/meson.build compiled.
#pragma once

#include "kernels/kernel_api.hpp"

namespace manyhead {

int32_t isa_count() noexcept;                // shipped ISAs, best first
const kernel_table* isa_table(int32_t isa);  // nullptr when out of range; looks at the machine, as all below
bool isa_supported(int32_t isa);

// The table that new plans use: the forced one (set_isa, MH_ISA), else the best supported. Throws where MH_ISA names
// none.
const kernel_table& current_isa();
const kernel_table& find_isa(const char* name);  // throws where there is none, or the CPU cannot run it
void set_isa(const char* name);                  // throws manyhead::error; nullptr or "" = automatic

}  // namespace manyhead
