// What is computed number by number. Tensors are addresses; sizes and strides are in elements.
#pragma once

#include "cpu/kernels/elementwise.h"

namespace quintet::cpu {

struct ElementwiseCall {
    void* out;      // [rows, width]; may be x, if that is contiguous
    const void* x;  // [rows, width]
    const void* y;  // [rows, width], where two are joined
    long rows, width, x_stride, y_stride;  // from row to row
    float factor;
    FloatType type;
    Elementwise op;
};

void elementwise(const ElementwiseCall& call);
void gated(const ElementwiseCall& call);  // the activation of x, rounded, times y

}  // namespace quintet::cpu
