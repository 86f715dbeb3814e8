// The blocks of GGUF files' types (llama.cpp, ggml-common.h): a row is one after the other, each of so many values.
#pragma once

#include <cstdint>
#include <span>

namespace quintet::cpu {

constexpr long kMostValues = 256;  // of a block
constexpr long kMostGroups = 16;   // of a block: values that share a scale

// One block taken apart: a value stands for value * scale + minimum, of 4 bits without minima for (value - 8) * scale.
struct Block {
    alignas(64) uint8_t values[kMostValues];  // 0..15, or 8 bits with a sign
    float scales[kMostGroups], mins[kMostGroups];  // but for types with levels:
    int8_t codes[kMostGroups], min_codes[kMostGroups];  // whole numbers, times two that lie in float16
    uint16_t scale, min;
};

struct BlockKind {
    const char* name;  // ggml's
    long values, bytes, group;
    bool nibbles, mins, levels;
    void (*read)(const uint8_t* from, Block& block);
    bool fives = false;  // laid in 5 bits, its scales as they are; else what is laid has levels
};

// Those that are read here.
std::span<const BlockKind> block_kinds();

// Null for a name that is not read here.
const BlockKind* block_kind(const char* name);

struct BlocksUnpacking {
    const uint8_t* rows;  // [outputs] of blocks, `stride` bytes apart
    uint8_t* values;      // [outputs, inputs], or with two nibbles in a byte half as many
    float* scales;        // [outputs, groups]
    float* mins;          // [outputs, groups], or null
    long outputs, inputs, stride;
    const BlockKind* kind;
};

// Rows to a canonical matrix.
void unpack_blocks(const BlocksUnpacking& unpacking);

struct BlocksLaying {
    const uint8_t* rows;  // as above
    uint8_t* packed;      // as quantized() reads kInt4Levels, kInt6Levels or kInt5
    int8_t* scales;       // of kInt5 float16 [blocks, groups, kLinearColumns]
    int8_t* mins;         // or null
    long outputs, inputs, stride;
    const BlockKind* kind;
};

// Rows of a type with levels, or of 5 bits, to where products find them. False where a number is not finite.
bool lay_blocks(const BlocksLaying& laying);

}  // namespace quintet::cpu
