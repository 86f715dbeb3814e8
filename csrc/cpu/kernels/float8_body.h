// The loops of float8.h, written once over the vectors of one instruction set. After vectors_*.h, whose Ints hold a pair of
// bfloat16 for each column.
//
// The including file defines one(E), a number for all lanes, of each type; Widener<Format>, whose widen(at, Ints&, Ints&)
// spreads 4 * kLanes bytes to the pairs of kLanes columns and of those 16 columns on; and cores, one for each type:
// Element; Weights and Inputs; kRows and kVectors, the sums that stay in registers; kFew, the rows whose weights are widened
// in registers (at least 1); weights(Ints); inputs(const Element*), a pair; step(Floats, Weights, Inputs).
#pragma once

#include "cpu/kernels/float8.h"

namespace quintet::cpu {
namespace {

constexpr long kLoads = kFloat8Step / (4 * kLanes);  // of Widener, for a pair of inputs
constexpr long kFar = 16;                            // columns from a load's first ones to its second ones
constexpr long kLine = 64;                           // bytes in a cache line

inline long first_column(long load) {
    constexpr long kPer = kFar / kLanes;
    return load / kPer * 2 * kFar + load % kPer * kLanes;
}

// So many inputs that are added up before they are scaled.
struct Stretch {
    const uint8_t* weight;
    const float* scales;  // [kLinearColumns]
    long input, inputs;   // first, and how many
};

inline void join(float* at, const float* scale, Floats sum) { store(at, fma(sum, load(scale), load(at))); }

// A row's pair of inputs, the last of which may have nothing beside it.
template <typename Core>
inline typename Core::Inputs pair_of(const typename Core::Element* x, bool alone) {
    if (!alone) return Core::inputs(x);
    const typename Core::Element both[2] = {x[0], {}};
    return Core::inputs(both);
}

template <typename Core, typename Widen, long Rows>
inline void grow_few(Floats (&sums)[Rows][kLoads][2], const uint8_t* w, const typename Core::Element* x, long stride,
                     bool alone) {
    typename Core::Inputs inputs[Rows];
#pragma GCC unroll 8
    for (long r = 0; r < Rows; ++r) inputs[r] = pair_of<Core>(x + r * stride, alone);
#pragma GCC unroll 8
    for (long l = 0; l < kLoads; ++l) {
        Ints first, second;
        Widen::widen(w + l * 4 * kLanes, first, second);
        const typename Core::Weights near = Core::weights(first), far = Core::weights(second);
#pragma GCC unroll 8
        for (long r = 0; r < Rows; ++r) {
            sums[r][l][0] = Core::step(sums[r][l][0], near, inputs[r]);
            sums[r][l][1] = Core::step(sums[r][l][1], far, inputs[r]);
        }
    }
}

// One stretch after the other: a processor that reads several at once gets less of its memory.
template <typename Core, typename Widen, long Rows>
__attribute__((noinline)) void few_rows(const Float8Panel& panel, const Stretch& s) {
    Floats sums[Rows][kLoads][2];
#pragma GCC unroll 16
    for (long i = 0; i < Rows * kLoads * 2; ++i) (&sums[0][0][0])[i] = splat(0.0F);
    const auto* x = static_cast<const typename Core::Element*>(panel.x) + s.input;
    const uint8_t* w = s.weight;
    const long far = (s.inputs + 1) / 2 * kFloat8Step, stride = panel.x_stride;
    for (long i = 0; i < s.inputs / 2; ++i, w += kFloat8Step, x += 2) {
        __builtin_prefetch(w + far, 0, 2);  // the same place of the next one
        __builtin_prefetch(w + far + kLine, 0, 2);
        grow_few<Core, Widen, Rows>(sums, w, x, stride, false);
    }
    if (s.inputs % 2) grow_few<Core, Widen, Rows>(sums, w, x, stride, true);
#pragma GCC unroll 16
    for (long i = 0; i < Rows * kLoads * 2; ++i) {
        const long r = i / (2 * kLoads), column = first_column(i / 2 % kLoads) + i % 2 * kFar;
        join(panel.sums + r * kLinearColumns + column, s.scales + column, sums[r][i / 2 % kLoads][i % 2]);
    }
}

// The stretch's weights [pairs, kLinearColumns] into a buffer; what follows them is asked for from memory.
template <typename Widen>
inline void widen_stretch(uint32_t* buffer, const Stretch& s) {
    const uint8_t* w = s.weight;
    for (long i = 0; i < (s.inputs + 1) / 2; ++i, w += kFloat8Step, buffer += kLinearColumns) {
        __builtin_prefetch(w + kFloat8Stretch / 2 * kFloat8Step, 0, 2);
        __builtin_prefetch(w + kFloat8Stretch / 2 * kFloat8Step + kLine, 0, 2);
#pragma GCC unroll 8
        for (long l = 0; l < kLoads; ++l) {
            Ints first, second;
            Widen::widen(w + l * 4 * kLanes, first, second);
            __builtin_memcpy(buffer + first_column(l), &first, sizeof first);
            __builtin_memcpy(buffer + first_column(l) + kFar, &second, sizeof second);
        }
    }
}

template <typename Core, long Rows, long Vectors>
inline void grow_many(Floats (&sums)[Rows][Vectors], const uint32_t* w, const typename Core::Element* x, long stride,
                      bool alone) {
    typename Core::Weights weights[Vectors];
#pragma GCC unroll 8
    for (long v = 0; v < Vectors; ++v) {
        Ints pairs;
        __builtin_memcpy(&pairs, w + v * kLanes, sizeof pairs);
        weights[v] = Core::weights(pairs);
    }
#pragma GCC unroll 8
    for (long r = 0; r < Rows; ++r) {
        const typename Core::Inputs inputs = pair_of<Core>(x + r * stride, alone);
#pragma GCC unroll 8
        for (long v = 0; v < Vectors; ++v) sums[r][v] = Core::step(sums[r][v], weights[v], inputs);
    }
}

template <typename Core, long Rows>
__attribute__((noinline)) void many_rows(const Float8Panel& panel, const Stretch& s, const uint32_t* buffer, long row) {
    constexpr long kVectors = Core::kVectors;
    const auto* const from = static_cast<const typename Core::Element*>(panel.x) + row * panel.x_stride + s.input;
    for (long column = 0; column < kLinearColumns; column += kVectors * kLanes) {
        Floats sums[Rows][kVectors];
#pragma GCC unroll 8
        for (long r = 0; r < Rows; ++r) {
#pragma GCC unroll 8
            for (long v = 0; v < kVectors; ++v) sums[r][v] = splat(0.0F);
        }
        const auto* x = from;
        const uint32_t* w = buffer + column;
        for (long i = 0; i < s.inputs / 2; ++i, w += kLinearColumns, x += 2) {
            grow_many<Core, Rows, kVectors>(sums, w, x, panel.x_stride, false);
        }
        if (s.inputs % 2) grow_many<Core, Rows, kVectors>(sums, w, x, panel.x_stride, true);
#pragma GCC unroll 8
        for (long r = 0; r < Rows; ++r) {
            float* const at = panel.sums + (row + r) * kLinearColumns + column;
#pragma GCC unroll 8
            for (long v = 0; v < kVectors; ++v) join(at + v * kLanes, s.scales + column + v * kLanes, sums[r][v]);
        }
    }
}

template <typename Core, long Rows>
inline void many_of(const Float8Panel& panel, const Stretch& s, const uint32_t* buffer, long row, long rows) {
    if constexpr (Rows > 1) {
        if (rows < Rows) return many_of<Core, Rows - 1>(panel, s, buffer, row, rows);
    }
    many_rows<Core, Rows>(panel, s, buffer, row);
}

template <typename Core, typename Widen>
void add_many(const Float8Panel& panel, const Stretch& s) {
    alignas(64) uint32_t buffer[kFloat8Stretch / 2 * kLinearColumns];
    widen_stretch<Widen>(buffer, s);
    const long tiles = (panel.rows + Core::kRows - 1) / Core::kRows;
    for (long i = 0; i < tiles; ++i) {  // of nearly the same height
        const long row = panel.rows * i / tiles;
        many_of<Core, Core::kRows>(panel, s, buffer, row, panel.rows * (i + 1) / tiles - row);
    }
}

inline Stretch stretch_at(const Float8Panel& panel, long input) {
    const long g = input / panel.group, end = (g + 1) * panel.group < panel.inputs ? (g + 1) * panel.group : panel.inputs;
    const long left = end - input, inputs = left < kFloat8Stretch ? left : kFloat8Stretch;
    return {panel.weight + input / 2 * kFloat8Step, panel.scales + g * kLinearColumns, input, inputs};
}

template <typename Core, typename Widen, long Rows>
void add_all_few(const Float8Panel& panel) {
    if constexpr (Rows > 1) {
        if (panel.rows < Rows) return add_all_few<Core, Widen, Rows - 1>(panel);
    }
    for (long input = 0; input < panel.inputs;) {
        const Stretch s = stretch_at(panel, input);
        few_rows<Core, Widen, Rows>(panel, s);
        input += s.inputs;
    }
}

template <typename E>
void finish(const Float8Panel& panel) {
    alignas(64) float bias[kLinearColumns] = {};
    for (long c = 0; panel.bias && c < panel.columns; c += kLanes) {
        store(bias + c, load_some(static_cast<const E*>(panel.bias) + c, panel.columns - c));
    }
    const Floats zero = splat(0.0F), unit = splat(1.0F);
    for (long r = 0; r < panel.rows; ++r) {
        const float* const sums = panel.sums + r * kLinearColumns;
        E* const out = static_cast<E*>(panel.out) + r * panel.out_stride;
        for (long c = 0; c < panel.columns; c += kLanes) {
            const Floats sum = panel.bias ? fma(load(sums + c), unit, load(bias + c)) : fma(load(sums + c), unit, zero);
            store_some(out + c, sum, panel.columns - c);
        }
    }
}

template <typename Core, typename Widen>
void multiply(const Float8Panel& panel) {
    __builtin_memset(panel.sums, 0, static_cast<size_t>(panel.rows * kLinearColumns) * sizeof(float));
    if (panel.rows <= Core::kFew) {
        add_all_few<Core, Widen, Core::kFew>(panel);
    } else {
        for (long input = 0; input < panel.inputs;) {
            const Stretch s = stretch_at(panel, input);
            add_many<Core, Widen>(panel, s);
            input += s.inputs;
        }
    }
    finish<typename Core::Element>(panel);
}

// A core of float32 multiply-adds: the first of a pair is the lower half, every processor here being little-endian.
template <typename E, long Rows, long Vectors, long Few>
struct Singly {
    using Element = E;
    struct Weights {
        Floats first, second;
    };
    using Inputs = Weights;
    static constexpr long kRows = Rows, kVectors = Vectors, kFew = Few;
    static Weights weights(Ints pairs) { return {(Floats)(pairs << 16), (Floats)(pairs & 0xFFFF0000)}; }
    static Inputs inputs(const E* at) { return {one(at[0]), one(at[1])}; }
    static Floats step(Floats sum, const Weights& w, const Inputs& x) {
        return fma(w.second, x.second, fma(w.first, x.first, sum));
    }
};

template <typename Single, typename Brain, typename Half>
constexpr Float8Kernels float8_kernels() {
    using A = Widener<kE4m3fn>;
    using B = Widener<kE5m2>;
    return {{{multiply<Single, A>, multiply<Brain, A>, multiply<Half, A>},
             {multiply<Single, B>, multiply<Brain, B>, multiply<Half, B>}}};
}

}  // namespace
}  // namespace quintet::cpu
