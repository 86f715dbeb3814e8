// Quantized weights of checkpoints to the blocks that products read.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>

#include "common/huge_pages.h"
#include "common/share.h"
#include "cpu/quantized/halves.h"
#include "cpu/kernels/attention_types.h"
#include "cpu/quantized/quantized.h"

namespace quintet::cpu {

namespace {

constexpr long kThreadWork = 64L << 10;  // bytes that are worth another thread's waking
constexpr long kChunk = 64;              // bytes of a row that are read at once: a cache line
constexpr long kPairColumns = 16;        // between columns that share bytes of nibbles

using Rows = uint8_t[kLinearColumns][kChunk];

long parts_of(long blocks, long bytes) {
    return std::max(1L, std::min({blocks, static_cast<long>(pool_threads()), bytes / kThreadWork}));
}

// The four nibbles of two bytes, in a byte each.
inline uint32_t spread(const uint8_t* at) {
    uint16_t two;
    std::memcpy(&two, at, sizeof two);
    uint32_t x = two;
    x = (x | x << 8) & 0x00FF00FFU;
    return (x | x << 4) & 0x0F0F0F0FU;
}

uint8_t* lay_nibbles(const Rows& rows, uint8_t* out, long quads) {
    for (long q = 0; q < quads; ++q) {
        for (long first = 0; first < kLinearColumns; first += 2 * kPairColumns) {
            for (long c = first; c < first + kPairColumns; ++c, out += kQuad) {
                const uint32_t quad = spread(&rows[c][q * 2]) | spread(&rows[c + kPairColumns][q * 2]) << 4;
                std::memcpy(out, &quad, sizeof quad);
            }
        }
    }
    return out;
}

uint8_t* lay_bytes(const Rows& rows, uint8_t* out, long quads) {
    for (long q = 0; q < quads; ++q) {
        for (long c = 0; c < kLinearColumns; ++c, out += kQuad) std::memcpy(out, &rows[c][q * kQuad], kQuad);
    }
    return out;
}

void lay_block(const QuantizedLaying& laying, long block) {
    const long width = laying.nibbles ? laying.inputs / 2 : laying.inputs, unit = laying.nibbles ? 2 : kQuad;
    const long quads = (laying.inputs + kQuad - 1) / kQuad, first = block * kLinearColumns;
    const long columns = std::min(kLinearColumns, laying.outputs - first);
    const uint8_t* const values = static_cast<const uint8_t*>(laying.values) + first * width;
    uint8_t* out = static_cast<uint8_t*>(laying.packed) + block * quads * kLinearColumns * unit;
    alignas(64) Rows rows;
    std::memset(rows, laying.nibbles ? 0x88 : 0x80, sizeof rows);  // zeros
    for (long start = 0; start < width; start += kChunk) {
        const long count = std::min(kChunk, width - start);
        for (long c = 0; c < columns; ++c) {
            const uint8_t* const from = values + c * width + start;
            if (laying.nibbles) {
                std::memcpy(rows[c], from, static_cast<size_t>(count));
            } else {
                for (long i = 0; i < count; ++i) rows[c][i] = laying.bytes[from[i]];
            }
        }
        out = (laying.nibbles ? lay_nibbles : lay_bytes)(rows, out, (count + unit - 1) / unit);
    }
}

// 2^0 to 2^14 lie below float16's largest, and 28 powers more above what it holds less well.
constexpr int kTop = 14, kLowest = -112;

int power_of(float most) { return most > 0.0F ? std::max(std::ilogb(most), kLowest) - kTop : 0; }

float largest(const float* x, long count) {
    float most = 0.0F;
    for (long i = 0; x && i < count; ++i) most = std::max(most, std::fabs(x[i]));
    return most;
}

bool finite(const float* x, long count) {
    bool good = true;
    for (long i = 0; x && i < count; ++i) good = good && std::isfinite(x[i]);
    return good;
}

struct Column {
    uint16_t* scales;  // of a block, from this column on
    uint16_t* mins;    // or null
    const float* scales_in;
    const float* mins_in;
    long groups, repeat;
    float off;  // how far a number may be, as a part of it
};

// The half nearest to x. `good` stays where it is no further than `off`.
uint16_t halved(float x, float off, bool& good) {
    Float16 half;
    narrow(x, &half);
    const bool finite = (half.bits & 0x7FFF) < 0x7C00;  // float_of() takes infinity for 65536, which is near to 65520
    good = good && finite && std::fabs(float_of(half.bits) - x) <= std::fabs(x) * off;
    return half.bits;
}

// A minimum follows its scale where that is rounded: what is near 0 stays as near.
bool lay_column(const Column& column, float factor) {
    bool good = true;
    long at = 0;
    for (long g = 0; g < column.groups; ++g) {
        const float scale = column.scales_in[g] * factor;
        const uint16_t half = halved(scale, column.off, good);
        uint16_t added = 0;
        if (column.mins) {
            const float back = scale == 0.0F ? 1.0F : float_of(half) / scale, least = column.mins_in[g] * factor;
            added = halved(back > 0.5F && back < 2.0F ? least * back : least, column.off, good);
        }
        for (long i = 0; i < column.repeat; ++i, at += kLinearColumns) {
            column.scales[at] = half;
            if (column.mins) column.mins[at] = added;
        }
    }
    return good;
}

Laid lay_scales_of(const ScalesLaying& laying, long block) {
    const long groups = laying.groups * laying.repeat, numbers = groups * kLinearColumns;
    uint16_t* const scales = static_cast<uint16_t*>(laying.scales) + block * (numbers + (laying.powers ? 2 * kLinearColumns : 0));
    uint16_t* const mins = laying.mins ? static_cast<uint16_t*>(laying.mins) + block * numbers : nullptr;
    float powers[kLinearColumns] = {};
    bool good = true;
    std::memset(scales, 0, static_cast<size_t>(numbers) * sizeof *scales);
    if (mins) std::memset(mins, 0, static_cast<size_t>(numbers) * sizeof *mins);
    for (long c = 0; c < std::min(kLinearColumns, laying.outputs - block * kLinearColumns); ++c) {
        const long at = (block * kLinearColumns + c) * laying.groups;
        const float* const in = laying.scales_in + at;
        const float* const mins_in = mins ? laying.mins_in + at : nullptr;
        if (!finite(in, laying.groups) || !finite(mins_in, laying.groups)) return Laid::not_finite;
        const Column column{scales + c, mins ? mins + c : nullptr, in, mins_in, laying.groups, laying.repeat,
                            laying.powers ? 0.0F : 0x1p-10F};
        const bool as_they_are = lay_column(column, 1.0F);
        powers[c] = 1.0F;
        good = good && as_they_are;
        if (as_they_are || !laying.powers) continue;
        const int power = power_of(std::max(largest(in, laying.groups), largest(mins_in, laying.groups)));
        powers[c] = std::ldexp(1.0F, power);
        lay_column(column, std::ldexp(1.0F, -power));
    }
    if (laying.powers) std::memcpy(scales + numbers, powers, sizeof powers);
    return good || laying.powers ? Laid::exactly : Laid::rounded;
}

}  // namespace

void lay_quantized(const QuantizedLaying& laying) {
    const long blocks = (laying.outputs + kLinearColumns - 1) / kLinearColumns;
    const long bytes = (laying.inputs + kQuad - 1) / kQuad * blocks * kLinearColumns * (laying.nibbles ? 2 : kQuad);
    wish_huge_pages(laying.packed, bytes);
    share_out(blocks, parts_of(blocks, bytes), [&](long block) { lay_block(laying, block); });
}

Laid lay_scales(const ScalesLaying& laying) {
    const long blocks = (laying.outputs + kLinearColumns - 1) / kLinearColumns;
    std::atomic<Laid> worst{Laid::exactly};
    share_out(blocks, parts_of(blocks, laying.outputs * laying.groups * 4), [&](long block) {
        const Laid laid = lay_scales_of(laying, block);
        Laid before = worst.load();
        while (before < laid && !worst.compare_exchange_weak(before, laid)) {
        }
    });
    return worst.load();
}

}  // namespace quintet::cpu
