// Products of a panel's rows with a block by AMX's tiles, of bfloat16 or of bytes.
//
// A step multiplies 64 bytes of each row with 16 lines of the block, of 256 bytes.
#pragma once

#include "cpu/kernels/tiles.h"

namespace quintet::cpu {
namespace {

constexpr long kTileRows = 16, kTileColumns = 16, kTileBytes = 64;
constexpr long kTileLines = 16;           // of the block, that a step takes
constexpr long kBlockLine = 256;          // bytes
constexpr long kStepBytes = kTileLines * kBlockLine;
constexpr long kBothRows = 2 * kTileRows, kBlockColumns = 4 * kTileColumns;
constexpr long kAheadOfFew = 2 * kStepBytes;  // where few rows ask memory for the block

struct TilePanel {
    const uint8_t* x;       // [rows, bytes], `x_stride` bytes apart
    const uint8_t* weight;  // lines of the block, one for four bytes of a row
    void* sums;             // [rows, kBlockColumns], of 32 bits
    long x_stride, rows, bytes;
};

// What is left of rows behind the last whole step, and of the block; zeros follow.
struct RestOfRows {
    alignas(64) uint8_t x[kBothRows][kTileBytes];
    alignas(64) uint8_t weight[kTileLines][kBlockLine];
};

inline long whole_steps(const TilePanel& panel) { return panel.bytes / kTileBytes; }
inline long lines_of(const TilePanel& panel) { return (panel.bytes + 3) / 4; }

inline void fill_rows(const TilePanel& panel, long row, long rows, RestOfRows& rest) {
    const long done = whole_steps(panel) * kTileBytes;
    if (done == panel.bytes) return;
    __builtin_memset(rest.x, 0, sizeof rest.x);
    for (long r = 0; r < rows; ++r) {
        const uint8_t* const from = panel.x + (row + r) * panel.x_stride + done;
        __builtin_memcpy(rest.x[r], from, static_cast<size_t>(panel.bytes - done));
    }
}

inline void fill_lines(const TilePanel& panel, RestOfRows& rest) {
    const long done = whole_steps(panel) * kTileLines, left = lines_of(panel) - done;
    if (left == 0) return;
    __builtin_memset(rest.weight, 0, sizeof rest.weight);
    __builtin_memcpy(rest.weight, panel.weight + done * kBlockLine, static_cast<size_t>(left * kBlockLine));
}

inline uint32_t* sums_at(const TilePanel& panel, long row, long column) {
    return static_cast<uint32_t*>(panel.sums) + row * kBlockColumns + column;
}

// ------------------------------------------------------------------------------------------ one tile of rows, or fewer

template <typename Number>
inline void add_columns(const uint8_t* x, long x_stride, const uint8_t* weight) {
    load_tile<4>(x, x_stride);
    load_tile<5>(weight, kBlockLine);
    Number::template multiply<0, 4, 5>();
    load_tile<6>(weight + kTileBytes, kBlockLine);
    Number::template multiply<1, 4, 6>();
    load_tile<7>(weight + 2 * kTileBytes, kBlockLine);
    Number::template multiply<2, 4, 7>();
    load_tile<5>(weight + 3 * kTileBytes, kBlockLine);
    Number::template multiply<3, 4, 5>();
}

// All columns at once: the block is read from end to end.
template <typename Number>
void multiply_few(const TilePanel& panel) {
    configure_columns(panel.rows);
    zero_tile<0>();
    zero_tile<1>();
    zero_tile<2>();
    zero_tile<3>();
    const long whole = whole_steps(panel);
    const uint8_t *x = panel.x, *weight = panel.weight;
    for (long i = 0; i < whole; ++i, x += kTileBytes, weight += kStepBytes) {
#pragma GCC unroll 64
        for (long at = 0; at < kStepBytes; at += 64) __builtin_prefetch(weight + kAheadOfFew + at, 0, 3);
        add_columns<Number>(x, panel.x_stride, weight);
    }
    if (whole * kTileBytes < panel.bytes) {
        RestOfRows rest;
        fill_rows(panel, 0, panel.rows, rest);
        fill_lines(panel, rest);
        add_columns<Number>(rest.x[0], kTileBytes, rest.weight[0]);
    }
    store_tile<0>(sums_at(panel, 0, 0), kBlockLine);
    store_tile<1>(sums_at(panel, 0, kTileColumns), kBlockLine);
    store_tile<2>(sums_at(panel, 0, 2 * kTileColumns), kBlockLine);
    store_tile<3>(sums_at(panel, 0, 3 * kTileColumns), kBlockLine);
}

// ------------------------------------------------------------------------------------------------------ more rows

template <typename Number, bool Both>
inline void add_half(const uint8_t* x, long x_stride, const uint8_t* weight) {
    load_tile<6>(weight, kBlockLine);
    load_tile<7>(weight + kTileBytes, kBlockLine);
    load_tile<4>(x, x_stride);
    Number::template multiply<0, 4, 6>();
    Number::template multiply<1, 4, 7>();
    if constexpr (Both) {
        load_tile<5>(x + kTileRows * x_stride, x_stride);
        Number::template multiply<2, 5, 6>();
        Number::template multiply<3, 5, 7>();
    }
}

template <bool Both>
inline void end_sums(uint32_t* sums) {
    store_tile<0>(sums, kBlockLine);
    store_tile<1>(sums + kTileColumns, kBlockLine);
    if constexpr (Both) {
        store_tile<2>(sums + kTileRows * kBlockColumns, kBlockLine);
        store_tile<3>(sums + kTileRows * kBlockColumns + kTileColumns, kBlockLine);
    }
}

// What is asked from memory: the next block, some lines with each step.
struct NextBlock {
    const uint8_t* at;
    long lines;

    void ask() {
        for (long i = 0; i < lines; ++i, at += 64) __builtin_prefetch(at, 0, 2);
    }
};

// Up to 32 rows from `row` on by 32 columns.
template <typename Number, bool Both>
void multiply_half(const TilePanel& panel, long row, long column, const RestOfRows& rest, NextBlock& next) {
    zero_tile<0>();
    zero_tile<1>();
    zero_tile<2>();
    zero_tile<3>();
    const long whole = whole_steps(panel), stride = panel.x_stride;
    const uint8_t *x = panel.x + row * stride, *weight = panel.weight + column * 4;
    for (long i = 0; i < whole; ++i, x += kTileBytes, weight += kStepBytes) {
        add_half<Number, Both>(x, stride, weight);
        next.ask();
    }
    if (whole * kTileBytes < panel.bytes) add_half<Number, Both>(rest.x[0], kTileBytes, rest.weight[0] + column * 4);
    end_sums<Both>(sums_at(panel, row, column));
}

template <typename Number>
void multiply_many(const TilePanel& panel) {
    RestOfRows rest;
    fill_lines(panel, rest);
    const long blocks = (panel.rows + kBothRows - 1) / kBothRows;
    NextBlock next{panel.weight + lines_of(panel) * kBlockLine, (2 * kTileLines + blocks - 1) / blocks};
    long configured = 0;
    for (long row = 0; row < panel.rows; row += kBothRows) {
        const long rows = panel.rows - row < kBothRows ? panel.rows - row : kBothRows;
        if (rows != configured) configure_rows(configured = rows);
        fill_rows(panel, row, rows, rest);
        for (long column = 0; column < kBlockColumns; column += 2 * kTileColumns) {
            if (rows > kTileRows) {
                multiply_half<Number, true>(panel, row, column, rest, next);
            } else {
                multiply_half<Number, false>(panel, row, column, rest, next);
            }
        }
    }
}

// Into panel.sums, tiles as multiply_tiles() or multiply_byte_tiles() adds them up.
template <typename Number>
void multiply_panel(const TilePanel& panel) {
    if (panel.rows <= kTileRows) {
        multiply_few<Number>(panel);
    } else {
        multiply_many<Number>(panel);
    }
    release_tiles();  // or the operating system would save them at every switch of threads
}

}  // namespace
}  // namespace quintet::cpu
