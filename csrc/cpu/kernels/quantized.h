// Products of rows with one block of a quantized weight, one object for each instruction set.
//
// These files are compiled with flags that the processor at hand may not obey: see ceiling.h for what they may include.
//
// Rows are whole numbers here, too: prepare() makes them of floats. A group's products are then added up exactly, in any
// order; its sum becomes a float, is multiplied by (scale of the weights * scale of the row), and joins the groups before
// it in one fused multiply-add. So all instruction sets give the same bits, whatever rows stand beside one.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "cpu/kernels/linear.h"

namespace quintet::cpu {

// What quintet/interface/types.py calls a scheme. Weights of 8 bits are stored with 128 added, weights of 4 bits with 8 added. In a
// block, four inputs in a row ("a quad") of a column stand side by side. 8 bits: [quads, 64 columns, 4]. 4 bits:
// [quads, 2, 16 columns, 4]: low bits are columns 0 to 15 of each 32, high bits the 16 after them.
enum QuantizedScheme {
    kInt8,  // rows in 16 bits, for each of their groups
    kInt4,
    kW8a8,  // rows in 8 bits, one scale for a row, and float32 scales for columns: all is one group
    kW4a8,  // rows in 8 bits, for each of their groups
    kW8a8Groups,  // the same with weights of 8 bits
    kTable4,      // 4 bits that are places in a table of 8 bits, which has 128 added; rows as kInt4 has them
    kTable4a8,    // rows as kW4a8 has them
    // Scales and minima are whole numbers of 8 bits, times one in float16 that 256 inputs share; rows as the above.
    kInt4Levels,
    kW4a8Levels,
    kInt6Levels,  // [quads, 128 + 64 bytes]: nibbles, and two bits of each value above them, in heights of 16 columns
    kW6a8Levels,
    // [pairs of quads, 2 * 128 + 64 bytes]: nibbles, and a bit of each value above them, in heights of 16 columns, the second
    // quad's after the first one's. Scales are in float16; rows as the above.
    kInt5,
    kW5a8,
    kQuantizedSchemes
};

constexpr long kLevelInputs = 256;
constexpr int kMiddleOfFive = 16;  // what 0 is stored as
constexpr int kMiddleOfSix = 32;   // the same in 6 bits without minima

constexpr bool looked_up(QuantizedScheme s) { return s == kTable4 || s == kTable4a8; }
constexpr bool leveled(QuantizedScheme s) { return s >= kInt4Levels && s <= kW6a8Levels; }
constexpr bool six(QuantizedScheme s) { return s == kInt6Levels || s == kW6a8Levels; }
constexpr bool five(QuantizedScheme s) { return s == kInt5 || s == kW5a8; }
constexpr bool nibbles(QuantizedScheme s) { return s == kInt4 || s == kW4a8 || looked_up(s) || (leveled(s) && !six(s)); }
constexpr int32_t offset_of(QuantizedScheme s) {
    return six(s) ? kMiddleOfSix : five(s) ? kMiddleOfFive : nibbles(s) && !looked_up(s) ? 8 : 128;
}

// 16 bits are 256 * high + low, both of -128..127, so the largest is 256 * 127 + 127.
constexpr float largest_input(QuantizedScheme s) {
    return s == kInt8 || s == kInt4 || s == kTable4 || s == kInt4Levels || s == kInt6Levels || s == kInt5 ? 32639.0F : 127.0F;
}

constexpr long kQuad = 4;
// A mask of so many bits above a nibble.
template <int Bits>
constexpr char bits_above_four = ((1 << Bits) - 1) << 4;
// Bytes of a block's quad; of 5 bits half of those of two.
constexpr long quad_bytes(QuantizedScheme s) {
    return five(s) ? kLinearColumns * 5 / 2 : kLinearColumns * (six(s) ? 3 : nibbles(s) ? 2 : 4);
}
constexpr long kLeastGroup = 16;     // inputs
constexpr long kLargestGroup = 128;  // inputs: 128 * 128 * 32639 and 128 * 255 * 32639 are below 2^31
constexpr long kMostInputs = 131072;  // of kW8a8: 131072 * 128 * 127 is below 2^31; what lies between may wrap around
constexpr long kRowPadding = 16;  // inputs: a row is prepared in whole vectors

struct QuantizedRow {
    uint8_t* values;  // prepared: what an instruction set wants for a quad, in a row
    float* scales;    // [groups]
    int32_t* starts;  // [2, groups]: where a sum starts, so that the offset of the weights counts for nothing, and where one
                      // of a core with flips starts
    const void* x;    // [groups * group]
    long groups, group;
    long span;        // inputs that share a scale of the row: whole groups
    float largest;
    int32_t offset;
};

struct QuantizedPanel {
    float* sums;         // [rows, kLinearColumns]
    const uint8_t* x;    // prepared rows
    const uint8_t* weight;
    const void* scales;  // [groups, kLinearColumns], float16, or float32 for kW8a8; with levels see level_at()
    long x_stride;       // bytes
    long scales_at;      // bytes from a row's beginning to its scales; its starts follow them
    long rows, groups;
    long quads;          // of a group
    const uint8_t* zeros;   // [groups, kLinearColumns], or null: what stands for 0, instead of the offset
    const void* mins;       // as scales of groups lie, or null: added to what values and scales stand for
    const uint8_t* table;   // [16], of the schemes that look up
    float offset;           // of the rows' starts
    int shared;             // with levels: 2 to the power of it groups share a number in float16; -1: there are none
    bool counted;           // the starts do not begin sums: the minima alone ask for them
};

struct QuantizedResult {
    void* out;         // [rows, columns]
    const void* bias;  // [columns], or null
    const float* sums; // [rows, kLinearColumns]
    const float* powers;  // [kLinearColumns], of two, or null: the columns' scales are so many times what they say
    long out_stride, rows, columns;
};

struct QuantizedKernels {
    long quad_bytes[kQuantizedSchemes];  // of a prepared quad
    void (*prepare[kQuantizedSchemes][kLinearTypes])(const QuantizedRow& row);
    // What zero points and minima give: sums begin with it, or with zeros.
    void (*begin)(const QuantizedPanel& panel);
    void (*multiply[kQuantizedSchemes])(const QuantizedPanel& panel);
    void (*finish[kLinearTypes])(const QuantizedResult& result);
};

struct QuantizedBlock {
    uint8_t* packed;
    void* scales;        // [groups, kLinearColumns]
    const void* weight;  // [columns, groups * group]
    long stride, columns, groups, group;
};

struct QuantizedPacking {
    // False where a number is not finite, or too large for a scale in float16. Other instruction sets may choose another
    // scale where two are as good. Floats do not become places in a table.
    bool (*pack[kQuantizedSchemes][kLinearTypes])(const QuantizedBlock& block);
};

extern const QuantizedKernels kQuantizedBaseline;
extern const QuantizedPacking kQuantizedPackingBaseline;
#if defined(__x86_64__)
extern const QuantizedKernels kQuantizedAvx2;
extern const QuantizedKernels kQuantizedAvx2Vnni;  // rows in 8 bits alone
extern const QuantizedKernels kQuantizedAvx512;
extern const QuantizedKernels kQuantizedAvx512Vnni;
QuantizedKernels with_tiles(const QuantizedKernels& vectors);  // these, but for what AMX multiplies
extern const QuantizedPacking kQuantizedPackingAvx2;
#elif defined(__aarch64__)
extern const QuantizedKernels kQuantizedNeonDotprod;
extern const QuantizedKernels kQuantizedNeonI8mm;
#endif

}  // namespace quintet::cpu
