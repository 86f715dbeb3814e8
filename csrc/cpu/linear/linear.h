// Products of rows with packed weights. Tensors are addresses; sizes and strides are in elements.
#pragma once

#include "common/pool.h"
#include "cpu/kernels/linear.h"

namespace quintet::cpu {

struct LinearCall {
    void* out;           // [T, outputs]
    const void* x;       // [T, inputs]
    const void* weight;  // as pack_linear() left it
    const void* bias;    // [outputs], or null
    long tokens, inputs, outputs;
    long x_stride;       // from token to token
    LinearType type;
};

// An output is computed in one order, whatever rows stand beside its own and whatever number of threads there is.
void linear(const LinearCall& call);
Stretch weights_of(const LinearCall& call);
// What linear() keeps beside its operands: x in float32, where this processor multiplies no such numbers.
long linear_scratch_bytes(long tokens, long inputs, LinearType type);

struct LinearHeadsCall {
    void* out;           // [T, heads, outputs]
    const void* x;       // [T, heads, inputs]
    const void* weight;  // of each head as pack_linear() left it, one after the other
    long tokens, heads, inputs, outputs;
    long token_stride, head_stride;  // of x
    LinearType type;
};

// linear() of each head by its own weight.
void linear_by_heads(const LinearHeadsCall& call);

// What every product with such weights is made of. The kernel for one block:
using LinearMultiply = void (*)(const LinearPanel& panel);
LinearMultiply linear_multiply(LinearType type);
// Groups of rows that are computed apart: at most kLinearRows, and fewer while there are threads without work.
long linear_panels(long tokens, long blocks);
// Threads for so many items, of so many multiply-adds altogether.
long linear_parts(long items, long work);

// [outputs, inputs], rows `stride` apart -> [ceil(outputs / kLinearColumns), ceil(inputs / pair), kLinearColumns, pair],
// zeros where it is wider than the weight.
void pack_linear(void* packed, const void* weight, long outputs, long inputs, long stride, LinearType type);

}  // namespace quintet::cpu
