// Products of rows with one block of a weight in 8-bit floats, one object for each instruction set.
//
// These files are compiled with flags that the processor at hand may not obey: see ceiling.h for what they may include.
//
// All that 8 bits hold, bfloat16 holds exactly: weights are widened to its pairs, and multiplied as linear.h does it, in
// registers for a few rows, in a buffer of one stretch for many. An output adds up the products of a stretch in the order
// of the inputs; stretches, each multiplied by its group's scale, join those before them in one multiply-add, in order;
// then the bias, then it is rounded, once. Nothing of that depends on the rows beside it.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "cpu/kernels/linear.h"

namespace quintet::cpu {

enum Float8Format { kE4m3fn, kE5m2, kFloat8Formats };

// Inputs of a group that are added up before they are scaled: 16 KiB of widened weights, half of a core's first cache.
constexpr long kFloat8Stretch = 128;
// Bytes of a block's pair of inputs. In each 64 of them, words of 16 bits: those of a pair for column 0 of 32, then for
// column 1, ..; the word's high byte is the column's own, its low byte that of the column 16 further on. So words that are
// taken apart come out as vectors of neighbouring columns, however wide those are.
constexpr long kFloat8Step = kLinearColumns * 2;
// Where the first byte of a column's pair is within a step; the other is two further on.
constexpr long float8_place(long column) { return column / 32 * 64 + column % 16 * 4 + (column % 32 < 16 ? 1 : 0); }

struct Float8Panel {
    void* out;              // [rows, columns]
    const void* x;          // [rows, inputs]
    const uint8_t* weight;  // [ceil(inputs / 2), kFloat8Step], zeros past the last input and output
    const float* scales;    // [ceil(inputs / group), kLinearColumns]
    const void* bias;       // [columns], or null
    long out_stride, x_stride;  // elements from row to row
    long rows, columns, inputs;
    long group;             // inputs that share scales; even, or all
    float* sums;            // [rows, kLinearColumns], scratch
};

struct Float8Kernels {
    void (*multiply[kFloat8Formats][kLinearTypes])(const Float8Panel& panel);
};

extern const Float8Kernels kFloat8Baseline;
#if defined(__x86_64__)
extern const Float8Kernels kFloat8Avx2;
extern const Float8Kernels kFloat8Avx512;
extern const Float8Kernels kFloat8Avx512Bf16;
#endif

}  // namespace quintet::cpu
