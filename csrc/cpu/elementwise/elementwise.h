// What is computed number by number. Tensors are addresses; sizes and strides are in elements.
#pragma once

#include "cpu/kernels/elementwise.h"

namespace quintet::cpu {

struct ElementwiseCall {
    void* out;      // [rows, width]; may be x, if that is contiguous
    const void* x;  // [rows, width]
    const void* y;  // [rows, width], where two are joined
    long rows, width, x_stride, y_stride;  // from row to row
    float factor;  // see kernels/elementwise.h
    FloatType type;
    Elementwise op;
};

struct HeadsCall {
    void* out;             // [tokens, heads, dim]
    const void* x;         // [tokens, heads, dim]
    const float* factors;  // [groups], each for heads / groups heads in a row
    long tokens, heads, groups, dim, token_stride, head_stride;
    FloatType type;
};

void elementwise(const ElementwiseCall& call);
void scale_heads(const HeadsCall& call);
void gated(const ElementwiseCall& call);  // the activation of x, rounded, times y

}  // namespace quintet::cpu
