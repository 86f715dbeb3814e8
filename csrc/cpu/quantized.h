// Products of rows with quantized weights, and rows out of packed weights. Tensors are addresses; sizes and strides are in
// elements.
#pragma once

#include "cpu/kernels/quantized.h"

namespace quintet::cpu {

struct QuantizedCall {
    void* out;           // [T, outputs]
    const void* x;       // [T, inputs]
    const void* weight;  // as pack_quantized() left it, with its scales
    const void* scales;
    const void* bias;    // [outputs], or null
    long tokens, inputs, outputs;
    long groups;         // that the inputs are divided into; 1 for kW8a8
    long x_stride;       // from token to token
    LinearType type;     // of out, x and bias
    QuantizedScheme scheme;
};

// An output has the same bits on every processor, whatever rows stand beside its own and whatever number of threads there is.
void quantized(const QuantizedCall& call);

struct QuantizedWeight {
    void* packed;        // [blocks, ceil(inputs / 4), 256], or 128 for nibbles
    void* scales;        // [blocks, groups, 64], float16, or float32 for kW8a8
    const void* weight;  // [outputs, inputs], rows `stride` apart
    long outputs, inputs, groups, stride;
    LinearType type;     // of the weight
    QuantizedScheme scheme;
};

// False where a number of the weight is not finite, or too large for a scale in float16.
bool pack_quantized(const QuantizedWeight& weight);

struct GatherCall {
    void* out;           // [T, inputs]
    const int32_t* ids;  // [T], of rows: 0..outputs - 1; others give zeros
    const void* weight;  // as pack_quantized() of 8 bits, or pack_linear(), left it
    const void* scales;  // null: as pack_linear() left it, in `type`
    long tokens, inputs, outputs, groups;
    LinearType type;     // of out
    QuantizedScheme scheme;
};

// out[t] = weight[ids[t]], as an embedding looks it up.
void gather(const GatherCall& call);

}  // namespace quintet::cpu
