// What a run is told where nothing but threads is asked for.
#pragma once

#include <cstdint>

#include "manyhead/manyhead.h"

namespace manyhead::test {

inline mh_exec exec_of(int32_t threads) {
  mh_exec exec = {};
  exec.struct_size = sizeof exec;
  exec.threads = threads;
  return exec;
}

}  // namespace manyhead::test
