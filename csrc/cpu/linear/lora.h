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
    const int32_t* x_rows = nullptr;  // [T]: where each row of y has its x; null: in the same row
};

// y + (x A^T) B of each token's adapter. A token's result is its own, whatever tokens stand beside it and whatever number of
// threads there is; without an adapter y stays as it is. One job: threads that finish A x go on with B.
void add_lora(const LoraCall& call);

struct ScaleAdaptedCall {
    void* y;               // [T, outputs], rows y_stride apart
    const float* gains;    // [adapters, outputs]
    const float* offsets;  // [adapters, outputs]
    const int32_t* slots;  // [T]: 1 + a token's adapter, or 0; read at each call
    long tokens, outputs, adapters, y_stride;
    FloatType type;
};

// y * gains + offsets of each token's adapter; without one y stays as it is.
void scale_adapted(const ScaleAdaptedCall& call);

struct AdapterRowsCall {
    int32_t* out;          // [T]
    const int32_t* ids;    // [T], read at each call
    const int32_t* slots;  // [T], read at each call
    long tokens, adapters;
    long rows, first;      // of an adapter's table: how many, and the id of the first
};

// The row of each token's id in the tables of all adapters, one after the other; -1: it has no adapter, or no row there.
void adapter_rows(const AdapterRowsCall& call);

}  // namespace quintet::cpu
