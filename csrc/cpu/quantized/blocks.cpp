#include "cpu/quantized/blocks.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>

#include "common/huge_pages.h"
#include "common/share.h"
#include "cpu/quantized/halves.h"
#include "cpu/kernels/quantized.h"

namespace quintet::cpu {

namespace {

constexpr long kThreadWork = 64L << 10;  // bytes that are worth another thread's waking

uint16_t half_bits(const uint8_t* at) {
    uint16_t bits;
    std::memcpy(&bits, at, sizeof bits);
    return bits;
}

bool finite(uint16_t half) { return (half & 0x7C00) != 0x7C00; }

float half(const uint8_t* at) {
    const uint16_t bits = half_bits(at);
    return finite(bits) ? float_of(bits) : std::numeric_limits<float>::quiet_NaN();
}

// Fields of so many bits, `Heights` of them in a byte: of each run of `Run` bytes first all lowest ones.
template <long Run, long Heights, int Bits>
void fields(const uint8_t* from, long bytes, uint8_t* out) {
    for (long first = 0; first < bytes; first += Run) {
        for (long height = 0; height < Heights; ++height, out += Run) {
            for (long i = 0; i < Run; ++i) out[i] = static_cast<uint8_t>(from[first + i] >> height * Bits & ((1 << Bits) - 1));
        }
    }
}

// The same, above what is there.
template <long Run, long Heights, int Bits, int Above>
void more(const uint8_t* from, long bytes, uint8_t* out) {
    for (long first = 0; first < bytes; first += Run) {
        for (long height = 0; height < Heights; ++height, out += Run) {
            for (long i = 0; i < Run; ++i) {
                out[i] = static_cast<uint8_t>(out[i] | (from[first + i] >> height * Bits & ((1 << Bits) - 1)) << Above);
            }
        }
    }
}

void less(uint8_t* values, long count, int zero) {
    for (long i = 0; i < count; ++i) values[i] = static_cast<uint8_t>(values[i] - zero);
}

void fifth_bits(const uint8_t* from, uint8_t* values) {
    for (long i = 0; i < 32; ++i) values[i] = static_cast<uint8_t>(values[i] | (from[i / 8] >> i % 8 & 1) << 4);
}

void read_q4_0(const uint8_t* from, Block& block) {
    block.scales[0] = half(from);
    fields<16, 2, 4>(from + 2, 16, block.values);
}

void read_q4_1(const uint8_t* from, Block& block) {
    block.scales[0] = half(from);
    block.mins[0] = half(from + 2);
    fields<16, 2, 4>(from + 4, 16, block.values);
}

void read_q5_0(const uint8_t* from, Block& block) {
    block.scales[0] = half(from);
    fields<16, 2, 4>(from + 6, 16, block.values);
    fifth_bits(from + 2, block.values);
    less(block.values, 32, 16);
}

void read_q5_1(const uint8_t* from, Block& block) {
    block.scales[0] = half(from);
    block.mins[0] = half(from + 2);
    fields<16, 2, 4>(from + 8, 16, block.values);
    fifth_bits(from + 4, block.values);
}

void read_q8_0(const uint8_t* from, Block& block) {
    block.scales[0] = half(from);
    std::memcpy(block.values, from + 2, 32);
}

void read_mxfp4(const uint8_t* from, Block& block) {
    block.scales[0] = std::ldexp(1.0F, from[0] - 128);
    fields<16, 2, 4>(from + 1, 16, block.values);
}

void read_iq4_xs(const uint8_t* from, Block& block) {
    uint8_t scales[8];
    fields<1, 2, 4>(from + 4, 4, scales);
    more<1, 4, 2, 4>(from + 2, 2, scales);
    for (long g = 0; g < 8; ++g) block.scales[g] = half(from) * static_cast<float>(scales[g] - 32);
    fields<16, 2, 4>(from + 8, 128, block.values);
}

void read_q2_k(const uint8_t* from, Block& block) {
    for (long g = 0; g < 16; ++g) {
        block.codes[g] = static_cast<int8_t>(from[g] & 15);
        block.min_codes[g] = static_cast<int8_t>(-(from[g] >> 4));
    }
    fields<32, 4, 2>(from + 16, 64, block.values);
    block.scale = half_bits(from + 80);
    block.min = half_bits(from + 82);
}

void read_q3_k(const uint8_t* from, Block& block) {
    fields<32, 4, 2>(from + 32, 64, block.values);
    more<32, 8, 1, 2>(from, 32, block.values);
    less(block.values, 256, -4);  // 0..7 stand for -4..3, and 8 for 0
    uint8_t scales[16];
    fields<8, 2, 4>(from + 96, 8, scales);
    more<4, 4, 2, 4>(from + 104, 4, scales);
    for (long g = 0; g < 16; ++g) block.codes[g] = static_cast<int8_t>(scales[g] - 32);
    block.scale = half_bits(from + 108);
}

// Eight scales and minima of 6 bits in 12 bytes, after the two numbers that they are multiples of.
void read_sixes(const uint8_t* from, Block& block) {
    block.scale = half_bits(from);
    block.min = half_bits(from + 2);
    const uint8_t *first = from + 4, *second = from + 8, *third = from + 12;
    for (long g = 0; g < 4; ++g) {
        block.codes[g] = static_cast<int8_t>(first[g] & 63);
        block.codes[g + 4] = static_cast<int8_t>((third[g] & 15) | (first[g] >> 2 & 48));
        block.min_codes[g] = static_cast<int8_t>(-(second[g] & 63));
        block.min_codes[g + 4] = static_cast<int8_t>(-(third[g] >> 4 | (second[g] >> 2 & 48)));
    }
}

void read_q4_k(const uint8_t* from, Block& block) {
    read_sixes(from, block);
    fields<32, 2, 4>(from + 16, 128, block.values);
}

void read_q5_k(const uint8_t* from, Block& block) {
    read_sixes(from, block);
    fields<32, 2, 4>(from + 48, 128, block.values);
    more<32, 8, 1, 4>(from + 16, 32, block.values);
}

void read_q6_k(const uint8_t* from, Block& block) {
    fields<64, 2, 4>(from, 128, block.values);
    more<32, 4, 2, 4>(from + 128, 64, block.values);
    less(block.values, 256, 32);
    std::memcpy(block.codes, from + 192, 16);
    block.scale = half_bits(from + 208);
}

constexpr BlockKind kKinds[] = {
    {"Q4_0", 32, 18, 32, true, false, false, read_q4_0},      {"Q4_1", 32, 20, 32, true, true, false, read_q4_1},
    {"Q5_0", 32, 22, 32, false, false, false, read_q5_0, true},     {"Q5_1", 32, 24, 32, false, true, false, read_q5_1},
    {"Q8_0", 32, 34, 32, false, false, false, read_q8_0},     {"IQ4_NL", 32, 18, 32, true, false, false, read_q4_0},
    {"MXFP4", 32, 17, 32, true, false, false, read_mxfp4},    {"IQ4_XS", 256, 136, 32, true, false, false, read_iq4_xs},
    {"Q2_K", 256, 84, 16, true, true, true, read_q2_k},       {"Q3_K", 256, 110, 16, true, false, true, read_q3_k},
    {"Q4_K", 256, 144, 32, true, true, true, read_q4_k},      {"Q5_K", 256, 176, 32, false, true, true, read_q5_k},
    {"Q6_K", 256, 210, 16, false, false, true, read_q6_k},
};

void level(const BlockKind& kind, Block& block) {
    const float scale = finite(block.scale) ? float_of(block.scale) : std::numeric_limits<float>::quiet_NaN();
    const float min = !kind.mins ? 0.0F : finite(block.min) ? float_of(block.min) : std::numeric_limits<float>::quiet_NaN();
    for (long g = 0; g < kind.values / kind.group; ++g) {
        block.scales[g] = scale * static_cast<float>(block.codes[g]);
        if (kind.mins) block.mins[g] = min * static_cast<float>(block.min_codes[g]);
    }
}

void unpack_row(const BlocksUnpacking& call, long row) {
    const BlockKind& kind = *call.kind;
    const long groups = kind.values / kind.group, width = kind.nibbles ? call.inputs / 2 : call.inputs;
    const uint8_t* from = call.rows + row * call.stride;
    uint8_t* values = call.values + row * width;
    float* scales = call.scales + row * (call.inputs / kind.group);
    float* mins = call.mins ? call.mins + row * (call.inputs / kind.group) : nullptr;
    Block block;
    for (long first = 0; first < call.inputs; first += kind.values, from += kind.bytes, scales += groups) {
        kind.read(from, block);
        if (kind.levels) level(kind, block);
        std::memcpy(scales, block.scales, static_cast<size_t>(groups) * sizeof *scales);
        if (mins) {
            std::memcpy(mins, block.mins, static_cast<size_t>(groups) * sizeof *mins);
            mins += groups;
        }
        if (kind.nibbles) {
            for (long i = 0; i < kind.values / 2; ++i) {
                values[i] = static_cast<uint8_t>(block.values[2 * i] | block.values[2 * i + 1] << 4);
            }
        } else {
            std::memcpy(values, block.values, static_cast<size_t>(kind.values));
        }
        values += kind.nibbles ? kind.values / 2 : kind.values;
    }
}

uint32_t quad(const Block& block, long q) {
    uint32_t four;
    std::memcpy(&four, block.values + q * kQuad, sizeof four);
    return four;
}

constexpr long kPairColumns = 16;  // between columns that share bytes
constexpr long kFiveInputs = 32;   // of a block of 5 bits

// A stretch of all columns, as quantized_body.h reads it: nibbles, and for 6 bits the two above in a plane.
void lay_quads(const Block (&blocks)[kLinearColumns], bool nibbles, uint8_t* out) {
    for (long q = 0; q < kMostValues / kQuad; ++q) {
        uint32_t low[kLinearColumns / 2], high[kPairColumns] = {};
        for (long i = 0; i < kLinearColumns / 2; ++i) {
            const long column = i / kPairColumns * 2 * kPairColumns + i % kPairColumns;
            const uint32_t a = quad(blocks[column], q), b = quad(blocks[column + kPairColumns], q);
            low[i] = (a & 0x0F0F0F0FU) | (b & 0x0F0F0F0FU) << 4;
            const uint32_t above = (a >> 4 & 0x03030303U) | (b >> 4 & 0x03030303U) << 2;
            high[i % kPairColumns] |= above << i / kPairColumns * 4;
        }
        std::memcpy(out, low, sizeof low);
        out += sizeof low;
        if (nibbles) continue;
        std::memcpy(out, high, sizeof high);
        out += sizeof high;
    }
}

// Rows of codes, then of the numbers in float16 that stretches of kMostValues inputs have in common.
struct Levels {
    int8_t* at;  // of a block
    long groups;

    void put(long stretch, long column, const int8_t* codes, long count, uint16_t number) const {
        for (long g = 0; g < count; ++g) at[(stretch * count + g) * kLinearColumns + column] = codes[g];
        std::memcpy(at + groups * kLinearColumns + (stretch * kLinearColumns + column) * 2, &number, sizeof number);
    }
};

// Two quads of all columns: nibbles of each, then a bit above each of them in a plane.
void lay_fives(const uint8_t (&values)[kLinearColumns][2 * kQuad], uint8_t* out) {
    uint32_t plane[kPairColumns] = {};
    for (long q = 0; q < 2; ++q) {
        uint32_t low[kLinearColumns / 2] = {};
        for (long c = 0; c < kLinearColumns; ++c) {
            uint32_t four;
            std::memcpy(&four, values[c] + q * kQuad, sizeof four);
            const long at = c / kPairColumns, lane = c % kPairColumns;
            low[at / 2 * kPairColumns + lane] |= (four & 0x0F0F0F0FU) << at % 2 * 4;
            plane[lane] |= (four >> 4 & 0x01010101U) << (q * 4 + at);
        }
        std::memcpy(out, low, sizeof low);
        out += sizeof low;
    }
    std::memcpy(out, plane, sizeof plane);
}

bool lay_fives_of(const BlocksLaying& call, long index) {
    const BlockKind& kind = *call.kind;
    const long groups = call.inputs / kind.group, first = index * kLinearColumns;
    const long columns = std::min(kLinearColumns, call.outputs - first);
    uint8_t* out = call.packed + index * call.inputs / kQuad * quad_bytes(kInt5);
    uint8_t* scales = reinterpret_cast<uint8_t*>(call.scales) + index * groups * kLinearColumns * 2;
    thread_local Block block;
    bool good = true;
    for (long g = 0; g < groups; ++g, scales += kLinearColumns * 2) {
        uint8_t values[kFiveInputs / (2 * kQuad)][kLinearColumns][2 * kQuad];
        std::memset(values, kMiddleOfFive, sizeof values);
        std::memset(scales, 0, kLinearColumns * 2);
        for (long c = 0; c < columns; ++c) {
            const uint8_t* const from = call.rows + (first + c) * call.stride + g * kind.bytes;
            kind.read(from, block);
            less(block.values, kind.values, -kMiddleOfFive);
            good = good && finite(half_bits(from));
            std::memcpy(scales + 2 * c, from, 2);
            for (long i = 0; i < kind.values; i += 2 * kQuad) std::memcpy(values[i / (2 * kQuad)][c], block.values + i, 2 * kQuad);
        }
        for (const auto& two : values) {
            lay_fives(two, out);
            out += 2 * quad_bytes(kInt5);
        }
    }
    return good;
}

bool lay_block_of(const BlocksLaying& call, long index) {
    if (call.kind->fives) return lay_fives_of(call, index);
    const BlockKind& kind = *call.kind;
    const long stretches = call.inputs / kMostValues, groups = call.inputs / kind.group, each = kMostValues / kind.group;
    const long bytes = kMostValues / kQuad * kLinearColumns * (kind.nibbles ? 2 : 3);
    const long levels = (groups + 2 * stretches) * kLinearColumns, first = index * kLinearColumns;
    const long columns = std::min(kLinearColumns, call.outputs - first);
    const Levels scales{call.scales + index * levels, groups}, mins{call.mins ? call.mins + index * levels : nullptr, groups};
    thread_local Block blocks[kLinearColumns];
    for (Block& block : blocks) block = {};
    bool good = true;
    for (long s = 0; s < stretches; ++s) {
        for (long c = 0; c < kLinearColumns; ++c) {
            Block& block = blocks[c];
            if (c < columns) {
                kind.read(call.rows + (first + c) * call.stride + s * kind.bytes, block);
                if (!kind.nibbles && !kind.mins) less(block.values, kMostValues, -kMiddleOfSix);
            }
            good = good && finite(block.scale) && (!kind.mins || finite(block.min));
            scales.put(s, c, block.codes, each, block.scale);
            if (mins.at) mins.put(s, c, block.min_codes, each, block.min);
        }
        lay_quads(blocks, kind.nibbles, call.packed + (index * stretches + s) * bytes);
    }
    return good;
}

long parts_of(long items, long bytes) {
    return std::max(1L, std::min({items, static_cast<long>(pool_threads()), bytes / kThreadWork}));
}

}  // namespace

std::span<const BlockKind> block_kinds() { return kKinds; }

const BlockKind* block_kind(const char* name) {
    for (const BlockKind& kind : kKinds) {
        if (std::strcmp(kind.name, name) == 0) return &kind;
    }
    return nullptr;
}

void unpack_blocks(const BlocksUnpacking& call) {
    constexpr long kRows = 16;  // that a thread takes at once
    const long items = (call.outputs + kRows - 1) / kRows;
    share_out(items, parts_of(items, call.outputs * call.stride), [&](long item) {
        for (long row = item * kRows; row < std::min(call.outputs, (item + 1) * kRows); ++row) unpack_row(call, row);
    });
}

bool lay_blocks(const BlocksLaying& call) {
    const long blocks = (call.outputs + kLinearColumns - 1) / kLinearColumns;
    const QuantizedScheme scheme = call.kind->fives ? kInt5 : call.kind->nibbles ? kInt4Levels : kInt6Levels;
    wish_huge_pages(call.packed, blocks * call.inputs / kQuad * quad_bytes(scheme));
    std::atomic<bool> good{true};
    share_out(blocks, parts_of(blocks, call.outputs * call.stride), [&](long block) {
        if (!lay_block_of(call, block)) good = false;
    });
    return good;
}

}  // namespace quintet::cpu
