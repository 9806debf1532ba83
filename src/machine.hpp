// What this computer is: the only file that asks the CPU and the environment (MH_ISA, MH_THREADS).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace manyhead {

// CPU levels that ISA tables need (rows of src/kernels/meson.build name them).
enum class cpu_level : int32_t { x86_floor, x86_v3, x86_v4, x86_amx, arm_floor, any, count };

struct machine {
  std::string cpu_name;
  bool has_level[static_cast<int>(cpu_level::count)] = {};  // indexed by cpu_level
  int64_t l1_bytes = 32768;                                 // data cache of one core
  int64_t l2_bytes = 262144;                                // of one core
  int64_t l3_bytes = 0;                                     // shared; 0 = unknown
  int32_t cpus = 1;             // that this process may run on (affinity mask, not the whole host)
  std::string isa_request;      // MH_ISA, "" = none
  std::string threads_error;    // why MH_THREADS could not be used, "" = fine
  int32_t threads_request = 0;  // MH_THREADS, 0 = none
};

// Read once, on first use; afterwards constant.
const machine& this_machine();

// The process-wide cap: mh_set_threads, else MH_THREADS, else cpus.
int32_t max_threads();
void set_max_threads(int32_t threads);

}  // namespace manyhead
