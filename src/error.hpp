// Why a call failed: a status and a sentence, thrown inside the portable core and turned into an mh_status and
// mh_last_error() at the C border (capi/manyhead.cpp). Kernels never throw.
#pragma once

#include <stdexcept>
#include <string>

#include "manyhead/manyhead.h"

namespace manyhead {

class error : public std::runtime_error {
 public:
  error(mh_status status, const std::string& text) : std::runtime_error(text), status_(status) {}
  mh_status status() const noexcept { return status_; }

 private:
  mh_status status_;
};

}  // namespace manyhead
