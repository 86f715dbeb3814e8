// The rotary embedding, one object for each instruction set: see norm.h for what holds of these files.
#pragma once

#include "cpu/kernels/floats.h"

namespace quintet::cpu {

struct RotaryHeads {  // of q, or of k
    void* out;           // [T, count, dim]
    const void* x;       // [T, count, dim]
    const void* weight;  // [dim], of rms_norm; null: heads are not normalised
    long count, token_stride, head_stride;  // x's, in elements
};

struct RotaryCall {
    RotaryHeads heads[2];
    const float* table;        // [positions_there, turned]: cosines, then sines
    const int* positions;      // [tokens]
    long tokens, dim, turned, positions_there;
    float eps, offset;         // of rms_norm
    bool neighbours;           // pairs are of features 2 i and 2 i + 1; out has the first of each, then the second
    FloatType type;
};

struct RotaryKernels {  // tokens first..last-1
    OfTypes<void (*)(const RotaryCall& call, long first, long last)> turn;
};

extern const RotaryKernels kRotaryBaseline;
#if defined(__x86_64__)
extern const RotaryKernels kRotaryAvx2;
extern const RotaryKernels kRotaryAvx512;
#endif

}  // namespace quintet::cpu
