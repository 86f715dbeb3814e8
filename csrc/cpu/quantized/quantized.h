// Products of rows with quantized weights. Tensors are addresses; sizes and strides are in elements.
#pragma once

#include "common/pool.h"
#include "cpu/kernels/quantized.h"
#include "cpu/linear/panels.h"

namespace quintet::cpu {

struct QuantizedCall {
    void* out;           // [T, outputs]
    const void* x;       // [T, inputs]
    const void* weight;  // as pack_quantized() left it, with its scales
    const void* scales;
    const void* bias;    // [outputs], or null
    long tokens, inputs, outputs;
    long groups;         // that the inputs are divided into; 1 for kW8a8
    long x_stride;       // from token to token
    LinearType type;     // of out, x and bias
    QuantizedScheme scheme;
    const void* zeros = nullptr;    // uint8 [blocks, groups, 64]: what stands for 0, where that is not the offset
    const void* mins = nullptr;     // float16 [blocks, groups, 64]: added to what values and scales stand for
    const int32_t* order = nullptr; // [inputs]: input order[i] meets place i of the weight
    long span = 0;                  // inputs that share a scale of the row, in whole groups; 0: a group
    bool powers = false;            // float32 [64] follows each block's scales: see lay_scales()
    uint8_t table[16] = {};         // of the schemes that look up
};

// An output has the same bits on every processor, whatever rows stand beside its own and whatever number of threads there is.
void quantized(const QuantizedCall& call);
Stretch weights_of(const QuantizedCall& call);

// Matrices, one after another: the first one's call, but for what comes in and out.
struct QuantizedStack {
    QuantizedCall first;
    long weight_bytes, scale_bytes, zero_bytes, min_bytes;  // from matrix to matrix
};

// Each row by its own matrix: what quantized() gives of that. See ExpertsProduct for the arguments.
void quantized_stack(const QuantizedStack& stack, const SortedRows& sorted, void* out, const void* x, long stride);

struct QuantizedWeight {
    void* packed;        // [blocks, ceil(inputs / 4), 256], or 128 for nibbles
    void* scales;        // [blocks, groups, 64], float16, or float32 for kW8a8
    const void* weight;  // [outputs, inputs], rows `stride` apart
    long outputs, inputs, groups, stride;
    LinearType type;     // of the weight
    QuantizedScheme scheme;
};

// False where a number of the weight is not finite, or too large for a scale in float16.
bool pack_quantized(const QuantizedWeight& weight);

struct QuantizedLaying {
    void* packed;         // as pack_quantized() leaves it
    const void* values;   // [outputs, inputs] of 8 bits, or half as many bytes, the first of two inputs in the low bits
    long outputs, inputs;
    bool nibbles;
    const uint8_t* bytes; // [256]: what a value of 8 bits is stored as
};

// Whole numbers, as they are, to where products find them.
void lay_quantized(const QuantizedLaying& laying);

struct ScalesLaying {
    void* scales;            // float16 [blocks, groups * repeat, 64], and float32 [64] after each block with `powers`
    void* mins;              // float16 [blocks, groups * repeat, 64], or null
    const float* scales_in;  // [outputs, groups]
    const float* mins_in;    // [outputs, groups], or null
    long outputs, groups;
    long repeat;             // groups that one becomes
    bool powers;             // a column's numbers are held as multiples of a power of two, with which float16 holds them
};

enum class Laid { exactly, rounded, not_finite };

// Whether float16 holds the numbers: to one part in 1024, or with powers to that of a column's largest.
Laid lay_scales(const ScalesLaying& laying);

}  // namespace quintet::cpu
