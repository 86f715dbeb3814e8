// Normalisations of rows, one object for each instruction set.
//
// These files are compiled with flags that the processor at hand may not obey: see ceiling.h for what they may include.
// A row is added up in an order that its width alone decides.
#pragma once

#include "cpu/kernels/floats.h"

namespace quintet::cpu {

struct NormCall {
    void* out;             // [rows, width]
    void* sum;             // [rows, width]: x + residual, rounded; null without a residual
    const void* x;         // [rows / inner, inner, width]
    const void* residual;  // [rows, width], or null
    const void* weight;    // [width]
    const void* bias;      // [width], or null; layer_norm's
    long rows, width;
    long inner, outer_stride, inner_stride;  // x's, in elements
    float eps, offset;                       // offset: rms_norm's
    FloatType type;
};

struct NormKernels {  // each for rows first..last-1
    OfTypes<void (*)(const NormCall& call, long first, long last)> rms, layer;
};

extern const NormKernels kNormBaseline;
#if defined(__x86_64__)
extern const NormKernels kNormAvx2;
extern const NormKernels kNormAvx512;
#endif

}  // namespace quintet::cpu
