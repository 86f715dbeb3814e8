// Rows out of weights that lie as products read them. Tensors are addresses; sizes are in elements.
#pragma once

#include "cpu/kernels/float8.h"
#include "cpu/kernels/quantized.h"

namespace quintet::cpu {

struct GatherCall {
    void* out;           // [T, inputs]
    const int32_t* ids;  // [T], of rows: first..first + outputs - 1; others give zeros
    const void* weight;  // as pack_quantized(), lay_quantized(), or pack_linear() left it
    const void* scales;  // null: as pack_linear() left it, in `type`
    long tokens, inputs, outputs, groups;
    LinearType type;     // of out
    QuantizedScheme scheme;
    long first = 0;
    const void* zeros = nullptr;    // these as in QuantizedCall
    const void* mins = nullptr;
    const int32_t* order = nullptr;
    bool powers = false;
    uint8_t table[16] = {};
};

// out[t] = weight[ids[t] - first], as an embedding looks it up: ((value - zero) * scale + minimum) * power in float32, each step
// rounded, then in `type`.
void gather(const GatherCall& call);

struct Float8GatherCall {
    void* out;            // [T, inputs]
    const int32_t* ids;   // [T], as above
    const void* weight;   // as pack_float8() left it
    const float* scales;  // [blocks, ceil(inputs / group), kLinearColumns]
    long tokens, inputs, outputs;
    long group;           // inputs that share scales
    LinearType type;      // of out
    Float8Format format;
    long first;
};

// The same of weights in 8-bit floats: value * scale.
void gather_float8(const Float8GatherCall& call);

}  // namespace quintet::cpu
