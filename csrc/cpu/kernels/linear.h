// Products of rows with one block of a packed weight, one object for each instruction set.
//
// These files are compiled with flags that the processor at hand may not obey: see ceiling.h for what they may include.
// Lanes are outputs, so that each output is one sum: its products are added one after another in the order of the inputs,
// then the bias, then it is rounded, once. What is computed beside it changes nothing of that.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace quintet::cpu {

constexpr long kLinearColumns = 64;  // outputs in a block; four vectors of AVX512: enough chains for one row alone
constexpr long kFewWidened = 16;     // rows from which on weights become float32 once, where numbers have no product
constexpr long kLinearRows = 256;    // at most in a panel; its sums (64 KiB) stay in a core's second cache, with the block

enum LinearType { kLinearFloat32, kLinearBfloat16, kLinearFloat16, kLinearTypes };

// Two neighbouring inputs of bfloat16 stand side by side, as its dot product wants them.
constexpr long linear_pair(LinearType type) { return type == kLinearBfloat16 ? 2 : 1; }

struct LinearPanel {
    void* out;           // [rows, columns]
    const void* x;       // [rows, inputs]
    const void* weight;  // [ceil(inputs / pair), kLinearColumns, pair], zeros past the last input and output
    const void* bias;    // [columns], or null
    long out_stride, x_stride;  // elements from row to row
    long rows, columns, inputs; // columns: 1 to kLinearColumns
    float* sums;         // [rows, kLinearColumns], scratch
    const float* wide = nullptr;  // [rows, inputs], x in float32 where widen() made it
    long wide_stride = 0;
};

struct LinearKernels {
    void (*multiply[kLinearTypes])(const LinearPanel& panel);
    void (*widen[kLinearTypes])(const void* from, float* to, long count);  // null where multiply() has no use for it
};

extern const LinearKernels kLinearBaseline;
#if defined(__x86_64__)
extern const LinearKernels kLinearAvx2;
extern const LinearKernels kLinearAvx512;
extern const LinearKernels kLinearAvx512Bf16;
extern void (*const kLinearAmxBfloat16)(const LinearPanel& panel);
#elif defined(__aarch64__)
extern void (*const kLinearNeonBfloat16)(const LinearPanel& panel);
#endif

}  // namespace quintet::cpu
