// Quantized products of many rows by groups with AMX's tiles, for quantized_amx.cpp.
//
// A block's weights become bytes with a sign, a stretch of inputs at a time, for all rows of a panel. A group's products of
// 16 rows by 16 columns are one tile, which is stored and joins floats that stay in registers over the stretch. Tiles 0 to 3
// are sums of groups that follow each other, 4 and 5 rows of x, 6 and 7 weights.
#pragma once

#include "cpu/kernels/quantized_avx512_weights.h"
#include "cpu/kernels/quantized_body.h"
#include "cpu/kernels/tile_panels.h"

namespace quintet::cpu {
namespace {

constexpr long kTileQuads = kTileBytes / kQuad;
constexpr long kStretchQuads = 128;  // 32 KiB of weights: with 16 rows of x they fit a core's first cache
constexpr long kStretchGroups = kStretchQuads / (kTileQuads / 2);
constexpr long kFewestOfGroups = 14;  // rows that tiles are quicker for
constexpr long kFewestOfSmall = 24;   // the same where a group fills half a tile; of smaller ones they never are

// Weights as tiles multiply them: less what stands for 0.
template <int Offset>
struct SignedWeights : ByteWeights {
    static Weights less(Weights w) { return _mm512_sub_epi8(w, _mm512_set1_epi8(static_cast<char>(Offset))); }
    static void less(Weights (&w)[2]) { w[0] = less(w[0]), w[1] = less(w[1]); }
    static Weights weights(const uint8_t* at) { return less(ByteWeights::weights(at)); }
    static void weights_of_nibbles(const uint8_t* at, Weights (&w)[2]) {
        ByteWeights::weights_of_nibbles(at, w);
        less(w);
    }
    template <int Bits>
    static void weights_with(const uint8_t* at, const uint8_t* plane, int height, Weights (&w)[2]) {
        ByteWeights::weights_with<Bits>(at, plane, height, w);
        less(w);
    }
    static void weights_of_table(const uint8_t* at, const Table& table, Weights (&w)[2]) {
        ByteWeights::weights_of_table(at, table, w);
        less(w);
    }
};

constexpr Held held_of(QuantizedScheme s) {
    return six(s) ? Held::sixes : five(s) ? Held::fives : looked_up(s) ? Held::table : nibbles(s) ? Held::nibbles : Held::bytes;
}

constexpr bool wide(QuantizedScheme s) { return largest_input(s) > 127.0F; }

// What a stretch's rows and weights are to tiles.
struct Staged {
    alignas(64) uint8_t weight[kStretchQuads * kByteQuad];
    alignas(64) float scales[kStretchGroups * kLinearColumns];
    alignas(64) float own_scales[kStretchGroups][kTileRows];  // of rows
    alignas(64) uint8_t x[2][kTileRows][kStretchQuads * kQuad];  // of rows in 16 bits: low bytes, high bytes
};

struct Ahead {
    const uint8_t* at;
    long lines;  // with each group
};

// A stretch of 16 rows or fewer by 16 columns.
struct GroupTile {
    const Staged& staged;
    const uint8_t *x, *high;  // rows of low bytes, or of all, and of high bytes
    long x_stride;
    const uint8_t* weight;    // [quads, kByteQuad], from the tile's first column on
    const float* scales;      // [groups, kLinearColumns], as above
    float* sums;              // [rows, kLinearColumns], as above
    long rows, groups, quads; // quads are a group's
    Ahead& ahead;
};

void configure_groups(long rows, long quads) {
    TileConfig config;
    const long tall = quads < kTileQuads ? quads : kTileQuads;
    for (int i = 0; i < 8; ++i) {
        config.rows[i] = static_cast<uint8_t>(i >= 6 ? tall : rows);
        config.row_bytes[i] = static_cast<uint16_t>(i / 2 == 2 ? tall * kQuad : kTileBytes);
    }
    configure_tiles(config);
}

// A group's products, of low bytes into tile Sum and, of rows in 16 bits, of high ones into the next.
template <int Sum, int Turn, bool Wide>
inline void multiply_group(const uint8_t* x, const uint8_t* high, long x_stride, const uint8_t* weight, long bytes) {
    constexpr int kX = 4 + Turn % 2, kWeights = 6 + Turn % 2;
    zero_tile<Sum>();
    if constexpr (Wide) zero_tile<Sum + 1>();
    long at = 0;
    do {
        load_tile<kX>(x + at, x_stride);
        load_tile<kWeights>(weight + at / kQuad * kByteQuad, kByteQuad);
        multiply_signed_tiles<Sum, kX, kWeights>();
        if constexpr (Wide) {
            load_tile<kX>(high + at, x_stride);
            multiply_signed_tiles<Sum + 1, kX, kWeights>();
        }
        at += kTileBytes;
    } while (at < bytes);
}

using Sums = int32_t[4][kTileRows * kTileColumns];  // of tiles 0 to 3

// So many groups that follow each other, all before one is stored: a tile is ready long after it was asked for.
template <long Groups, bool Wide>
inline void multiply_some(const GroupTile& t, long group, Sums& sums) {
    constexpr int kTiles = Wide ? 2 : 1;
    const long bytes = t.quads * kQuad, stride = t.x_stride, block = t.quads * kByteQuad;
    const uint8_t *const x = t.x + group * bytes, *const high = t.high + group * bytes, *const w = t.weight + group * block;
    multiply_group<0, 0, Wide>(x, high, stride, w, bytes);
    if constexpr (Groups > 1) multiply_group<kTiles, 1, Wide>(x + bytes, high + bytes, stride, w + block, bytes);
    if constexpr (Groups > 2) multiply_group<2, 2, Wide>(x + 2 * bytes, high, stride, w + 2 * block, bytes);
    if constexpr (Groups > 2) multiply_group<3, 3, Wide>(x + 3 * bytes, high, stride, w + 3 * block, bytes);
    store_tile<0>(sums[0], kTileColumns * 4);
    if constexpr (Groups * kTiles > 1) store_tile<1>(sums[1], kTileColumns * 4);
    if constexpr (Groups * kTiles > 2) store_tile<2>(sums[2], kTileColumns * 4);
    if constexpr (Groups * kTiles > 2) store_tile<3>(sums[3], kTileColumns * 4);
}

// Adds what a group gives.
template <bool Wide, long Rows>
inline void join_group(const GroupTile& t, long group, const int32_t* sums, Floats (&floats)[Rows]) {
    const Floats scale = load(t.scales + group * kLinearColumns);
#pragma GCC unroll 16
    for (long r = 0; r < Rows; ++r) {
        Ints total = _mm512_load_si512(sums + r * kTileColumns);
        if constexpr (Wide) {
            const Ints high = _mm512_load_si512(sums + (kTileRows + r) * kTileColumns);
            total = add_ints(total, _mm512_slli_epi32(high, 8));
        }
        floats[r] = fma(to_floats(total), mul(scale, splat(t.staged.own_scales[group][r])), floats[r]);
    }
}

template <long Groups, bool Wide, long Rows>
inline void add_groups(const GroupTile& t, long group, Sums& sums, Floats (&floats)[Rows]) {
    multiply_some<Groups, Wide>(t, group, sums);
#pragma GCC unroll 4
    for (long i = 0; i < Groups; ++i) join_group<Wide>(t, group + i, sums[Wide ? 2 * i : i], floats);
}

template <bool Wide, long Rows>
__attribute__((noinline)) void multiply_tile(const GroupTile& t) {
    constexpr long kAtOnce = Wide ? 2 : 4;
    alignas(64) Sums sums;
    if (t.rows < Rows) __builtin_memset(sums, 0, sizeof sums);
    Floats floats[Rows];
#pragma GCC unroll 16
    for (long r = 0; r < Rows; ++r) floats[r] = r < t.rows ? load(t.sums + r * kLinearColumns) : zeros();
    long g = 0;
    for (; g + kAtOnce <= t.groups; g += kAtOnce) {
        for (long i = 0; i < t.ahead.lines; ++i, t.ahead.at += kLine) __builtin_prefetch(t.ahead.at, 0, 2);
        add_groups<kAtOnce, Wide>(t, g, sums, floats);
    }
    for (; g < t.groups; ++g) add_groups<1, Wide>(t, g, sums, floats);
#pragma GCC unroll 16
    for (long r = 0; r < Rows; ++r) {
        if (r < t.rows) store(t.sums + r * kLinearColumns, floats[r]);
    }
}

template <bool Wide>
void multiply_columns(GroupTile t) {
    for (long column = 0; column < kLinearColumns; column += kTileColumns) {
        t.rows > 8 ? multiply_tile<Wide, 16>(t) : multiply_tile<Wide, 8>(t);
        t.weight += kTileColumns * kQuad;
        t.scales += kTileColumns;
        t.sums += kTileColumns;
    }
}

// Rows in 16 bits, groups from `first` on: a quad's low bytes, then its high bytes.
void split_rows(const QuantizedPanel& panel, long row, long rows, long first, long groups, Staged& to) {
    const long bytes = groups * panel.quads * kQuad;
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i odd = add_ints(even, ints(1));
    for (long r = 0; r < rows; ++r) {
        const uint8_t* x = panel.x + (row + r) * panel.x_stride + first * panel.quads * kQuad * 2;
        for (long i = 0; i < bytes; i += kTileBytes, x += 2 * kTileBytes) {
            const __m512i one = _mm512_loadu_si512(x), two = _mm512_loadu_si512(x + kTileBytes);
            _mm512_store_si512(to.x[0][r] + i, _mm512_permutex2var_epi32(one, even, two));
            _mm512_store_si512(to.x[1][r] + i, _mm512_permutex2var_epi32(one, odd, two));
        }
    }
}

// Scales of rows; of those that are missing the last one's.
void stage_scales(const QuantizedPanel& panel, long row, long rows, long first, long groups, Staged& to) {
    const __m512i each = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i last = _mm512_min_epi32(each, ints(static_cast<int32_t>(rows - 1)));
    const __m512i places = _mm512_mullo_epi32(last, ints(static_cast<int32_t>(panel.x_stride)));
    const uint8_t* const scales = panel.x + row * panel.x_stride + panel.scales_at + first * 4;
    for (long g = 0; g < groups; ++g) {
        store(to.own_scales[g], _mm512_i32gather_ps(places, scales + g * 4, 1));
    }
}

inline void widen_scales(const QuantizedPanel& panel, long first, long groups, float* to) {
    if (panel.shared >= 0) return widen_levels(panel, first, groups, to);
    const uint16_t* from = static_cast<const uint16_t*>(panel.scales) + first * kLinearColumns;
    for (long i = 0; i < groups * kLinearColumns; i += kLanes) store(to + i, widen_half(from + i));
}

// Of the stretch after this, or of the next block.
inline void ask_scales(const QuantizedPanel& panel, long first, long groups) {
    const long bytes = kLinearColumns * (panel.shared >= 0 ? 1 : 2);  // of a group's, without what levels share
    const uint8_t* const at = static_cast<const uint8_t*>(panel.scales) + first * bytes;
    for (long i = 0; i < groups * bytes; i += kLine) __builtin_prefetch(at + i, 0, 2);
}

// Offset: what weights lose.
template <QuantizedScheme Scheme, int Offset>
void multiply_by_tiles(const QuantizedPanel& panel) {
    constexpr bool kWide = wide(Scheme);
    Staged staged;
    const long least = panel.quads * kQuad, at_once = kStretchQuads / panel.quads;
    long configured = 0;
    for (long first = 0; first < panel.groups; first += at_once) {
        const long left = panel.groups - first, groups = left < at_once ? left : at_once;
        const uint8_t* const weight = panel.weight + first * panel.quads * quad_bytes(Scheme);
        make_ready<SignedWeights<Offset>, held_of(Scheme)>(panel, weight, groups * panel.quads, staged.weight);
        widen_scales(panel, first, groups, staged.scales);
        ask_scales(panel, first + groups, groups);
        const long bytes = groups * panel.quads * quad_bytes(Scheme), lines = bytes / kLine;
        const long turns = (panel.rows + kTileRows - 1) / kTileRows * (kLinearColumns / kTileColumns) * ((groups + 3) / 4);
        Ahead ahead{weight + bytes, panel.rows > 32 ? (lines + turns - 1) / turns : 0};
        for (long row = 0; row < panel.rows; row += kTileRows) {
            const long rows = panel.rows - row < kTileRows ? panel.rows - row : kTileRows;
            if (rows != configured) configure_groups(configured = rows, panel.quads);
            stage_scales(panel, row, rows, first, groups, staged);
            if constexpr (kWide) split_rows(panel, row, rows, first, groups, staged);
            const uint8_t* const x = kWide ? staged.x[0][0] : panel.x + row * panel.x_stride + first * least;
            const long stride = kWide ? kStretchQuads * kQuad : panel.x_stride;
            multiply_columns<kWide>({staged, x, staged.x[1][0], stride, staged.weight, staged.scales,
                                              panel.sums + row * kLinearColumns, rows, groups, panel.quads, ahead});
        }
    }
    release_tiles();  // or the operating system would save them at every switch of threads
}

template <QuantizedScheme Scheme>
void multiply_groups(const QuantizedPanel& panel) {
    const bool whole = panel.quads % kTileQuads == 0, half = panel.quads == kTileQuads / 2;
    const long fewest = whole ? kFewestOfGroups : kFewestOfSmall;
    if (panel.rows < fewest || !(whole || half)) return kQuantizedAvx512Vnni.multiply[Scheme](panel);
    if constexpr (leveled(Scheme)) {
        if (panel.counted) return multiply_by_tiles<Scheme, 0>(panel);
    }
    multiply_by_tiles<Scheme, offset_of(Scheme)>(panel);
}

template <QuantizedScheme... Schemes>
void set_groups(QuantizedKernels& all) {
    ((all.multiply[Schemes] = multiply_groups<Schemes>), ...);
}

void groups_with_tiles(QuantizedKernels& all) {
    set_groups<kInt8, kInt4, kW4a8, kW8a8Groups, kTable4, kTable4a8, kInt4Levels, kW4a8Levels, kInt6Levels, kW6a8Levels,
               kInt5, kW5a8>(all);
}

}  // namespace
}  // namespace quintet::cpu
