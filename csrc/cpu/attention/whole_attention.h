// Attention of a step's requests that are whole in it and keep nothing. Tensors are addresses; sizes are in elements.
#pragma once

#include "cpu/kernels/attention.h"

namespace quintet::cpu {

struct WholeBatch {
    const int32_t* query_start_loc;  // [R + 1]
    long tokens, requests;
};

// Fills call.out; the tokens past the last request's get zeros. A row of the result depends on its own request alone, not on
// the batch or the number of threads. Throws std::invalid_argument for a batch that points outside its arrays.
void whole_attention(const WholeCall& call, const WholeBatch& batch, AttentionType type);

}  // namespace quintet::cpu
