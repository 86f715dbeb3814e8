// Products of rows with weights in 8-bit floats. Tensors are addresses; sizes and strides are in elements.
#pragma once

#include "common/pool.h"
#include "cpu/kernels/float8.h"
#include "cpu/linear/panels.h"

namespace quintet::cpu {

struct Float8Call {
    void* out;             // [T, outputs]
    const void* x;         // [T, inputs]
    const void* weight;    // as pack_float8() left it
    const float* scales;   // [blocks, ceil(inputs / group), kLinearColumns]
    const void* bias;      // [outputs], or null
    long tokens, inputs, outputs;
    long group;            // inputs that share scales; even, or all
    long x_stride;         // from token to token
    LinearType type;       // of out, x and bias
    Float8Format format;
};

// An output is computed in one order, whatever rows stand beside its own and whatever number of threads there is.
void float8(const Float8Call& call);
Stretch weights_of(const Float8Call& call);

// Matrices, one after another: the first one's call, but for what comes in and out.
struct Float8Stack {
    Float8Call first;
    long weight_bytes, scale_bytes;  // from matrix to matrix
};

// Each row by its own matrix: what float8() gives of that. See ExpertsProduct for the arguments.
void float8_stack(const Float8Stack& stack, const SortedRows& sorted, void* out, const void* x, long stride, void* spare);

// Bytes [outputs, inputs], rows `stride` apart -> [blocks, ceil(inputs / 2), kFloat8Step], zeros where it is wider than the
// weight. False where a number is not finite.
bool pack_float8(void* packed, const void* weight, long outputs, long inputs, long stride, Float8Format format);

}  // namespace quintet::cpu
