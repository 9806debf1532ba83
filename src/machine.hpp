// What this computer is: the only file that asks the CPU and the environment (MH_ISA, MH_THREADS, MH_F32_UNIT, MH_OPENMP,
// MH_VERBOSE, MH_PROFILE).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace manyhead {

// CPU levels that ISA tables need (rows of src/kernels/meson.build name them).
enum class cpu_level : int32_t {
  x86_floor,
  x86_v3,
  x86_v4,
  x86_bf16,
  x86_amx,
  x86_amx_fp16,
  arm_floor,
  arm_bf16,
  any,
  count
};

// Cores that bring rows of K and V better when asked in another way than most (reading.cpp).
enum class cpu_core : int32_t { other, zen4, zen5, intel };

struct machine {
  std::string cpu_name;
  bool has_level[static_cast<int>(cpu_level::count)] = {};   // indexed by cpu_level
  bool slow_level[static_cast<int>(cpu_level::count)] = {};  // the level before it is faster
  int64_t l1_bytes = 32768;                                  // data cache of one core
  int64_t l2_bytes = 262144;                                 // of one core
  int64_t l3_bytes = 0;                                      // shared; 0 = unknown
  int32_t cpus = 1;  // that this process may run on (affinity mask, not the whole host)
  cpu_core core = cpu_core::other;
  bool f32_on_unit = true;        // MH_F32_UNIT, else unit_pays_for_f32
  bool openmp = true;             // MH_OPENMP: tasks may go to the threads of a host's runtime
  std::string isa_request;        // MH_ISA, "" = none
  int32_t threads_request = 0;    // MH_THREADS, 0 = none
  bool verbose = false;           // MH_VERBOSE
  std::string profile_path;       // MH_PROFILE, "" = none
  std::string environment_error;  // what is wrong with MH_VERBOSE, MH_F32_UNIT, MH_OPENMP or MH_THREADS; "" = nothing
};

// Read once, on first use; afterwards constant.
const machine& this_machine();

// Whether f32 goes to a matrix unit where there is one, by the CPUs of the whole machine: not by those that this process may
// run on, nor by its threads, for results have the same bits on all of them. Of f32 the unit does six products for one, and
// its rate is a matter of power: alone a core of an Intel Xeon with AMX takes 0.65 to 0.76 of the time of multiply-adds from
// 384 tokens on, but with 16 at work (or with neighbours' on other cores of the socket) half of the cores do half as much.
// Prompts of f32 there, the time of multiply-adds over the unit's, mean of ten: on one thread 1.32, two 1.08 to 1.26, four
// 0.98 to 1.12, eight 0.93 to 1.00, sixteen 0.88 (0.73 to 1.07).
constexpr bool unit_pays_for_f32(int32_t cpus) { return cpus < 16; }

// What only reports need, asked for anew each time. 0 and "" = unknown.
struct host {
  int32_t cores = 0;         // hyperthreads not counted
  int32_t numa_nodes = 0;    // of memory
  int64_t memory_bytes = 0;  // in all
  std::string system;        // "Linux 6.1.0"
};
host this_host();
std::string describe_machine();  // of both, as JSON; in describe.cpp

// The process-wide cap, mh_set_threads or MH_THREADS; without one, all CPUs.
int32_t max_threads();
// Of so many asked for, 0 = as many as there may be; those that the cap allows. Without a cap it may be more than there are CPUs.
int32_t allowed_threads(int32_t asked);
void set_max_threads(int32_t threads);

}  // namespace manyhead
