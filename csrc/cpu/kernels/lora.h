// Low-rank adapters beside a product, one object for each instruction set: see norm.h for what holds of these files.
//
// Each number is one sum, in an order that the sizes alone decide: the tokens that share a tile change nothing of it.
#pragma once

#include "cpu/kernels/floats.h"

namespace quintet::cpu {

constexpr long kLoraTokens = 16;    // of one adapter, at most: A and B are read once for them
constexpr long kLoraColumns = 512;  // of B, at most

struct LoraDown {  // low = A x
    float* low[kLoraTokens];      // [rows]
    const void* x[kLoraTokens];   // [inputs]
    const void* a;                // [rows, inputs]
    long tokens, rows, inputs;
};

struct LoraUp {  // y += low B, rounded once
    void* y[kLoraTokens];           // [columns]
    const float* low[kLoraTokens];  // [rows]
    const void* b;                  // [rows, columns], rows `stride` elements apart
    long tokens, rows, columns, stride;
};

struct LoraScale {  // y * gains + offsets, rounded once
    void* y;               // [columns]
    const float* gains;    // [columns]
    const float* offsets;  // [columns]
    long columns;
};

struct LoraKernels {
    OfTypes<void (*)(const LoraDown& call)> down;
    OfTypes<void (*)(const LoraUp& call)> up;
    OfTypes<void (*)(const LoraScale& call)> scale;
};

extern const LoraKernels kLoraBaseline;
#if defined(__x86_64__)
extern const LoraKernels kLoraAvx2;
extern const LoraKernels kLoraAvx512;
#endif

}  // namespace quintet::cpu
