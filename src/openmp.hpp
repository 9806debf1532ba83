// Tasks on the threads of an OpenMP runtime that the host has anyway.
#pragma once

#include "manyhead/manyhead.h"

namespace manyhead {

// What exec.openmp asks for, as threads and parallel_for of exec; threads > 0. Throws where it is wrong.
void use_openmp(mh_exec& exec);

}  // namespace manyhead
