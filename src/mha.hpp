// The multi-head layer: projections -> attention -> output projection.
#pragma once

#include "manyhead/manyhead.h"

namespace manyhead {

class mha;  // packed weights

mha* make_mha(const mh_mha_weights& weights);  // validates; throws manyhead::error
void run_mha(const mha& layer, const mh_mha_call& call, const mh_exec& exec);

void destroy_mha(mha* layer) noexcept;

}  // namespace manyhead
