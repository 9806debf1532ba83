// The multi-head layer: projections -> attention -> output projection.
#pragma once

#include <memory>

#include "manyhead/manyhead.h"

namespace manyhead {

class mha {  // has packed the weights
 public:
  virtual ~mha() = default;
  virtual void run(const mh_mha_call& call, const mh_exec& exec) const = 0;
};

std::unique_ptr<const mha> make_mha(const mh_mha_weights& weights);  // validates; throws manyhead::error

}  // namespace manyhead
