// What Gemma 3n computes around its layers, and rows that are scaled (Llama 4): see quintet/ops for what each op gives.
// Tensors are addresses; sizes and strides are in elements. A token's results are its own alone, and the same bits on every
// instruction set.
#pragma once

#include <cstdint>

#include "cpu/kernels/floats.h"

namespace quintet::cpu {

constexpr int kMostStreams = 8;

struct StreamsCall {
    void* out[kMostStreams];       // [T, width] each
    const void* in[kMostStreams];  // [T, width] each
    const void* coefs;             // [T, count * count], or [T, count]
    const void* made;              // [T, width]: correct_streams()'s, and what follows
    const void* weight;            // [width]
    void* scaled;                  // [T, width]
    long tokens, width, count, coef_stride;
    long active;
    FloatType type;
};

void predict_streams(const StreamsCall& call);
void correct_streams(const StreamsCall& call);

struct SizedCall {
    void* out;         // [T, width]
    const void* x;     // [T, width]
    const void* like;  // [T, width]: as_large()'s
    long tokens, width, stride;  // of x's rows
    float deviations;  // keep_above()'s
    FloatType type;
};

void as_large(const SizedCall& call);
void keep_above(const SizedCall& call);  // x and out [T, 2 width]: the first half of each row, which the second follows

struct RowsCall {
    void* out;             // [T, width]
    const void* x;         // [T, width]
    const float* factors;  // [T]
    long tokens, width, stride;  // of x's rows
    FloatType type;
};

void scale_rows(const RowsCall& call);

struct KnownCall {
    int32_t* out;
    const int32_t* ids;
    long tokens, count;
};

void known_ids(const KnownCall& call);

}  // namespace quintet::cpu
