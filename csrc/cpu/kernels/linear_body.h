// The loops of linear.h, written once over the vectors of one instruction set.
//
// The including file defines kLanes, Floats, zeros(), load(const float*), store(float*, Floats), add(Floats, Floats), and for
// each type a struct with: Element; kPair; kRows and kVectors, the sums that stay in registers; kAlone, the vectors of a
// row alone; Weights and Inputs; weights(at), kLanes columns' kPair weights; inputs(at), kPair inputs for all lanes;
// step(Floats, Weights, Inputs), the one way in which a sum grows; widened(Element); round(Floats, Element*), kLanes.
#pragma once

#include "cpu/kernels/linear.h"

namespace quintet::cpu {
namespace {

// Bytes of a block that all rows of a panel pass before the next: they, the next and the rows fit a core's second cache,
// and the sums are put aside seldom. On Zen 4: 32 KiB 90%, 64 KiB 94%, 128 and 256 KiB 96% of the peak.
constexpr long kStretch = 128L << 10;
constexpr long kLine = 64;  // bytes in a cache line

template <typename T>
struct Tile {
    const LinearPanel& panel;
    const float* bias;       // [kLinearColumns]
    long first, last, depth;  // steps: this stretch, and all
    long row;
    long vector;              // of the block's columns
    const char* ahead;        // the part of the next stretch that this tile asks memory for, 2 lines a step
    long pace;                // from step to step; 0: nothing is asked for
};

template <typename T, long Vectors>
inline void finish_row(const Tile<T>& t, long row, const Floats* sums) {
    using E = typename T::Element;
    E* const out = static_cast<E*>(t.panel.out) + row * t.panel.out_stride;
#pragma GCC unroll 16
    for (long v = 0; v < Vectors; ++v) {
        const long column = (t.vector + v) * kLanes, left = t.panel.columns - column;
        const Floats sum = add(sums[v], load(t.bias + column));
        if (left >= kLanes) {
            T::round(sum, out + column);
        } else if (left > 0) {
            E rest[kLanes];
            T::round(sum, rest);
            __builtin_memcpy(out + column, rest, static_cast<size_t>(left) * sizeof(E));
        }
    }
}

template <typename T, long Rows, long Vectors>
inline void grow(Floats (&sums)[Rows][Vectors], const typename T::Element* w, const typename T::Element* x, long stride) {
    typename T::Weights weights[Vectors];
#pragma GCC unroll 16
    for (long v = 0; v < Vectors; ++v) weights[v] = T::weights(w + v * kLanes * T::kPair);
#pragma GCC unroll 16
    for (long r = 0; r < Rows; ++r) {
        const typename T::Inputs inputs = T::inputs(x + r * stride);
#pragma GCC unroll 16
        for (long v = 0; v < Vectors; ++v) sums[r][v] = T::step(sums[r][v], weights[v], inputs);
    }
}

template <typename T, long Rows, long Vectors>
__attribute__((noinline)) void tile(const Tile<T>& t) {
    using E = typename T::Element;
    constexpr long kStep = kLinearColumns * T::kPair;
    Floats sums[Rows][Vectors];
    float* const kept = t.panel.sums + t.row * kLinearColumns + t.vector * kLanes;
#pragma GCC unroll 16
    for (long r = 0; r < Rows; ++r) {
#pragma GCC unroll 16
        for (long v = 0; v < Vectors; ++v) {
            sums[r][v] = t.first == 0 ? zeros() : load(kept + r * kLinearColumns + v * kLanes);
        }
    }

    const E* w = static_cast<const E*>(t.panel.weight) + t.first * kStep + t.vector * kLanes * T::kPair;
    const E* x = static_cast<const E*>(t.panel.x) + t.row * t.panel.x_stride + t.first * T::kPair;
    const long stride = t.panel.x_stride, whole = t.panel.inputs / T::kPair;
    const long last = t.last < whole ? t.last : whole;
    [[maybe_unused]] const char* ahead = t.ahead;
    for (long s = t.first; s < last; ++s) {
        if constexpr (Rows > 2) {  // with fewer there is one tile, which the processor's own prefetching serves best
            __builtin_prefetch(ahead, 0, 2);
            __builtin_prefetch(ahead + kLine, 0, 2);
            ahead += t.pace;
        }
        grow<T, Rows, Vectors>(sums, w, x, stride);
        x += T::kPair;
        w += kStep;
    }
    if constexpr (T::kPair == 2) {
        if (last < t.last) {  // an odd input, with nothing beside it
            E pairs[Rows][2] = {};
            for (long r = 0; r < Rows; ++r) pairs[r][0] = x[r * stride];
            grow<T, Rows, Vectors>(sums, w, pairs[0], 2);
        }
    }

    if (t.last == t.depth) {
        for (long r = 0; r < Rows; ++r) finish_row<T, Vectors>(t, t.row + r, sums[r]);
        return;
    }
#pragma GCC unroll 16
    for (long r = 0; r < Rows; ++r) {
#pragma GCC unroll 16
        for (long v = 0; v < Vectors; ++v) store(kept + r * kLinearColumns + v * kLanes, sums[r][v]);
    }
}

template <typename T, long Rows>
inline void tile_of(const Tile<T>& t, long rows) {
    if constexpr (Rows > 1) {
        if (rows < Rows) return tile_of<T, Rows - 1>(t, rows);
    }
    constexpr long kVectors = Rows == 1 ? T::kAlone : T::kVectors;
    Tile<T> part = t;
    for (; part.vector < kLinearColumns / kLanes; part.vector += kVectors) tile<T, Rows, kVectors>(part);
}

template <typename T>
void multiply(const LinearPanel& panel) {
    using E = typename T::Element;
    alignas(64) float bias[kLinearColumns] = {};
    if (panel.bias) {
        for (long c = 0; c < panel.columns; ++c) bias[c] = T::widened(static_cast<const E*>(panel.bias)[c]);
    }
    const long depth = (panel.inputs + T::kPair - 1) / T::kPair, tiles = (panel.rows + T::kRows - 1) / T::kRows;
    constexpr long kStep = kLinearColumns * T::kPair * static_cast<long>(sizeof(E));  // bytes
    const long stretch = tiles == 1 ? depth : kStretch / kStep;
    const char* next = static_cast<const char*>(panel.weight) + stretch * kStep;  // after the last, the next block
    long first = 0;
    do {
        const long last = depth - first > stretch ? first + stretch : depth;
        for (long i = 0; i < tiles; ++i) {  // of nearly the same height
            const long row = panel.rows * i / tiles, end = panel.rows * (i + 1) / tiles;
            const bool asks = tiles > 1 && i * 2 * kLine < kStep;
            tile_of<T, T::kRows>({panel, bias, first, last, depth, row, 0,
                                  asks ? next + i * (last - first) * 2 * kLine : static_cast<const char*>(panel.weight),
                                  asks ? 2 * kLine : 0}, end - row);
        }
        next += (last - first) * kStep;
        first = last;
    } while (first < depth);
}

}  // namespace
}  // namespace quintet::cpu
