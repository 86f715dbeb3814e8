// The loops of linear.h, written once over the vectors of one instruction set.
//
// The including file defines kLanes, Floats, zeros(), load(const float*), store(float*, Floats), add(Floats, Floats), and for
// each type a struct with: Element; kPair; kRows and kVectors, the sums that stay in registers; kAlone, the vectors of a
// row alone; Weights and Inputs; weights(at), kLanes columns' kPair weights; inputs(at), kPair inputs for all lanes;
// step(Floats, Weights, Inputs), the one way in which a sum grows; widened(Element); round(Floats, Element*), kLanes. For
// multiply_widened() also a struct Wide, that of float32; widen_weights(at, to), kLanes columns' kPair weights to rows of
// kLinearColumns; and widen_inputs(at, to), kLanes inputs.
#pragma once

#include "cpu/kernels/linear.h"

namespace quintet::cpu {
namespace {

// Bytes of a block that all rows of a panel pass before the next: they, the next and the rows fit a core's second cache,
// and the sums are put aside seldom. On Zen 4: 32 KiB 90%, 64 KiB 94%, 128 and 256 KiB 96% of the peak.
constexpr long kStretch = 128L << 10;
// The same for few rows, in a first cache, where their columns take several passes.
constexpr long kFewStretch = 16L << 10;
constexpr long kLine = 64;  // bytes in a cache line

// Rows and columns whose sums grow together. T: what multiplies; Result: what a sum becomes.
template <typename T, typename Result>
struct Tile {
    const LinearPanel& panel;
    const typename T::Element* weight;  // of this stretch
    const typename T::Element* x;       // of the first row in this stretch
    long x_stride;
    const float* bias;        // [kLinearColumns]
    long first, last, depth;  // steps: this stretch, and all
    long row;
    long vector;              // of the block's columns
    const char* next;         // the stretch after this one, that is asked from memory meanwhile; null: nothing is
    long index;               // of the tile: the first ones ask; or, if it is alone, its passes in turn
    bool alone;
    const char* ahead;        // the part of the next stretch that this pass asks for
    long pace;                // bytes of it in a step, one or two lines, or 0
};

// Vectors of two rows: enough sums for the latency of a step.
template <typename T>
constexpr long kTwoRows = T::kVectors < 4 ? 4 : T::kVectors;

constexpr long passes(long vectors) { return kLinearColumns / (kLanes * vectors); }

template <typename Result, long Vectors, typename T>
inline void finish_row(const Tile<T, Result>& t, long row, const Floats* sums) {
    using E = typename Result::Element;
    E* const out = static_cast<E*>(t.panel.out) + row * t.panel.out_stride;
#pragma GCC unroll 16
    for (long v = 0; v < Vectors; ++v) {
        const long column = (t.vector + v) * kLanes, left = t.panel.columns - column;
        const Floats sum = add(sums[v], load(t.bias + column));
        if (left >= kLanes) {
            Result::round(sum, out + column);
        } else if (left > 0) {
            E rest[kLanes];
            Result::round(sum, rest);
            __builtin_memcpy(out + column, rest, static_cast<size_t>(left) * sizeof(E));
        }
    }
}

template <typename T, long Rows, long Vectors>
inline void grow(Floats (&sums)[Rows][Vectors], const typename T::Element* w, const typename T::Element* x, long stride) {
    if constexpr (Rows == 2) {  // the weights need not be in registers at once
        const typename T::Inputs inputs[2] = {T::inputs(x), T::inputs(x + stride)};
#pragma GCC unroll 16
        for (long v = 0; v < Vectors; ++v) {
            const typename T::Weights weights = T::weights(w + v * kLanes * T::kPair);
            sums[0][v] = T::step(sums[0][v], weights, inputs[0]);
            sums[1][v] = T::step(sums[1][v], weights, inputs[1]);
        }
        return;
    }
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

template <typename T, typename Result, long Rows, long Vectors>
__attribute__((noinline)) void tile(const Tile<T, Result>& t) {
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

    const E* w = t.weight + t.vector * kLanes * T::kPair;
    const E* x = t.x;
    const long stride = t.x_stride, whole = t.panel.inputs / T::kPair;
    const long last = t.last < whole ? t.last : whole;
    [[maybe_unused]] const char* ahead = t.ahead;
    [[maybe_unused]] const long beside = t.pace > kLine ? kLine : 0;
    for (long s = t.first; s < last; ++s) {
        if constexpr (Rows > 2 || passes(Vectors) > 1) {  // else the processor's own prefetching serves best
            __builtin_prefetch(ahead, 0, 2);
            __builtin_prefetch(ahead + beside, 0, 2);
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
        for (long r = 0; r < Rows; ++r) finish_row<Result, Vectors>(t, t.row + r, sums[r]);
        return;
    }
#pragma GCC unroll 16
    for (long r = 0; r < Rows; ++r) {
#pragma GCC unroll 16
        for (long v = 0; v < Vectors; ++v) store(kept + r * kLinearColumns + v * kLanes, sums[r][v]);
    }
}

template <typename T, typename Result, long Rows>
inline void tile_of(const Tile<T, Result>& t, long rows) {
    if constexpr (Rows > 1) {
        if (rows < Rows) return tile_of<T, Result, Rows - 1>(t, rows);
    }
    constexpr long kVectors = Rows == 1 ? T::kAlone : Rows == 2 ? kTwoRows<T> : T::kVectors;
    // Lines of the next stretch for each step of this one; all at once would stand in line. Each pass of a tile among others
    // asks for the same again: memory drops what it has no room to note.
    constexpr long kLines = kLinearColumns * T::kPair * static_cast<long>(sizeof(typename Result::Element)) / kLine;
    constexpr long kPasses = passes(kVectors), kOfPass = kLines > kPasses ? 2 : 1;
    Tile<T, Result> part = t;
    for (long pass = 0; pass < kPasses; ++pass, part.vector += kVectors) {
        const long lines = t.alone ? kOfPass : 2, before = (t.alone ? pass : t.index) * lines;
        const bool asks = t.next && before < kLines;
        part.ahead = asks ? t.next + before * (t.last - t.first) * kLine : reinterpret_cast<const char*>(t.weight);
        part.pace = asks ? lines * kLine : 0;
        tile<T, Result, Rows, kVectors>(part);
    }
}

template <typename T>
void widen_bias(const LinearPanel& panel, float* bias) {
    if (!panel.bias) return;
    for (long c = 0; c < panel.columns; ++c) bias[c] = T::widened(static_cast<const typename T::Element*>(panel.bias)[c]);
}

template <typename T>
void multiply(const LinearPanel& panel) {
    using E = typename T::Element;
    alignas(64) float bias[kLinearColumns] = {};
    widen_bias<T>(panel, bias);
    const long depth = (panel.inputs + T::kPair - 1) / T::kPair, tiles = (panel.rows + T::kRows - 1) / T::kRows;
    constexpr long kStep = kLinearColumns * T::kPair * static_cast<long>(sizeof(E));  // bytes
    const bool alone = tiles == 1 && panel.rows > 1 && passes(T::kVectors) > 1;
    const long stretch = alone ? kFewStretch / kStep : tiles == 1 ? depth : kStretch / kStep;
    const char* next = static_cast<const char*>(panel.weight) + stretch * kStep;  // after the last, the next block
    long first = 0;
    do {
        const long last = depth - first > stretch ? first + stretch : depth;
        const E* const weight = static_cast<const E*>(panel.weight) + first * kLinearColumns * T::kPair;
        for (long i = 0; i < tiles; ++i) {  // of nearly the same height
            const long row = panel.rows * i / tiles, end = panel.rows * (i + 1) / tiles;
            const E* const x = static_cast<const E*>(panel.x) + row * panel.x_stride + first * T::kPair;
            tile_of<T, T, T::kRows>({panel, weight, x, panel.x_stride, bias, first, last, depth, row, 0,
                                     alone || tiles > 1 ? next : nullptr, i, alone, nullptr, 0}, end - row);
        }
        next += (last - first) * kStep;
        first = last;
    } while (first < depth);
}

template <typename T>
void widen(const void* from, float* to, long count) {
    const auto* const own = static_cast<const typename T::Element*>(from);
    long i = 0;
    for (; i + kLanes <= count; i += kLanes) T::widen_inputs(own + i, to + i);
    for (; i < count; ++i) to[i] = T::widened(own[i]);
}

// The same sums where there is no product of these numbers: a stretch of the block and a tile's rows become float32 once,
// instead of in each step. The inputs follow each other as before, so that no bit changes.
template <typename T>
void multiply_widened(const LinearPanel& panel) {
    using E = typename T::Element;
    using Wide = typename T::Wide;
    constexpr long kInputs = 512;       // of a stretch: 128 KiB of weights, for a core's second cache
    if (panel.rows < kFewWidened) return multiply<T>(panel);
    alignas(64) float bias[kLinearColumns] = {}, weight[kInputs * kLinearColumns], x[Wide::kRows * kInputs];
    widen_bias<T>(panel, bias);
    const long tiles = (panel.rows + Wide::kRows - 1) / Wide::kRows;
    for (long first = 0; first < panel.inputs; first += kInputs) {
        const long last = panel.inputs - first > kInputs ? first + kInputs : panel.inputs;
        const E* const from = static_cast<const E*>(panel.weight) + first * kLinearColumns;
        for (long i = 0; i < last - first; i += T::kPair) {
            for (long c = 0; c < kLinearColumns; c += kLanes) {
                T::widen_weights(from + i * kLinearColumns + c * T::kPair, weight + i * kLinearColumns + c);
            }
        }
        const char* const next = reinterpret_cast<const char*>(from + (last - first) * kLinearColumns);
        for (long i = 0; i < tiles; ++i) {  // of nearly the same height
            const long row = panel.rows * i / tiles, end = panel.rows * (i + 1) / tiles;
            for (long r = row; r < end && !panel.wide; ++r) {
                const E* const own = static_cast<const E*>(panel.x) + r * panel.x_stride + first;
                widen<T>(own, x + (r - row) * kInputs, last - first);
            }
            const float* const rows = panel.wide ? panel.wide + row * panel.wide_stride + first : x;
            tile_of<Wide, T, Wide::kRows>({panel, weight, rows, panel.wide ? panel.wide_stride : kInputs, bias, first, last,
                                           panel.inputs, row, 0, next, i, false, nullptr, 0}, end - row);
        }
    }
}

}  // namespace
}  // namespace quintet::cpu
