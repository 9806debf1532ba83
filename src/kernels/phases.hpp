// Where a task's time goes, for profiles: lap(clock, phase) says that what was done since the last lap was of that phase.
// Without a profile clock is NULL and a lap costs a branch that is never taken.
#pragma once

#include "kernel_api.hpp"
#include "simd.hpp"
#include "ticks.hpp"

namespace manyhead::MH_ISA {
namespace {

__attribute__((noinline, cold, unused)) void end_phase(phase_clock& clock, int32_t phase) {
  const uint64_t now = read_ticks();
  clock.ticks[phase] += (now - clock.last) * clock.weight;
  clock.last = now;
}

MH_INLINE void lap(phase_clock* clock, int32_t phase) {
  if (__builtin_expect(clock != nullptr, 0)) end_phase(*clock, phase);
}

// Some tiles stand for all: three laps would be a twentieth of the shortest. The next laps count `weight` times.
__attribute__((noinline, cold, unused)) void resume_clock(phase_clock& clock, int64_t weight) {
  clock.last = read_ticks();
  clock.weight = static_cast<uint64_t>(weight);
}

}  // namespace
}  // namespace manyhead::MH_ISA
