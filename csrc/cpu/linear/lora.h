// Low-rank adapters beside a product, several in one batch. Tensors are addresses; sizes and strides are in elements.
#pragma once

#include <stdint.h>

#include "cpu/kernels/lora.h"

namespace quintet::cpu {

struct LoraCall {
    void* y;                 // [T, outputs], added to
    const void* x;           // [T, inputs]
    const void* a;           // [adapters, parts, rank, inputs]
    const void* b;           // [adapters, rank, outputs]
    const int32_t* ranks;    // [adapters, parts]: rows of each part that are used, read at each call
    const int32_t* slots;    // [T]: 1 + a token's adapter, or 0; read at each call
    const int32_t* columns;  // [stretches, 2]: part and width of stretches of y that lie side by side
    long tokens, inputs, outputs, adapters, parts, rank, stretches;
    long y_stride, x_stride, ranks_stride;
    FloatType type;
};

// y + (x A^T) B of each token's adapter. A token's result is its own, whatever tokens stand beside it and whatever number of
// threads there is; without an adapter y stays as it is. One job: threads that finish A x go on with B.
void add_lora(const LoraCall& call);

}  // namespace quintet::cpu
