// What comes back from a token's experts, added up, one object for each instruction set: see norm.h for what holds of
// these files.
#pragma once

#include <stdint.h>

#include "cpu/kernels/floats.h"

namespace quintet::cpu {

struct WeightedRows {  // of one token
    void* out;              // [width]
    const void* rows;       // `stride` elements apart
    const float* weights;   // [k]
    const int32_t* places;  // [k]: which row; below 0: none
    long k, width, stride;
};

struct BiasedRow {
    void* out;         // [width]
    const void* x;     // [width]; of clamped() [2 width], gate and up taking turns
    const void* bias;  // as x
    long width;
    float alpha, limit;
};

struct MoeKernels {
    OfTypes<void (*)(const WeightedRows& token)> sum;  // in float32, in the order of k
    OfTypes<void (*)(const BiasedRow& row)> biased;         // x + bias
    OfTypes<void (*)(const BiasedRow& row)> clamped;        // of them, (up + 1) * gate * sigmoid(alpha * gate)
};

extern const MoeKernels kMoeBaseline;
#if defined(__x86_64__)
extern const MoeKernels kMoeAvx2;
extern const MoeKernels kMoeAvx512;
#endif

}  // namespace quintet::cpu
