// Weights times values, in float32. Needs what attention_body.h says.
#pragma once

#include "cpu/kernels/attention_scratch.h"

namespace quintet::cpu {
namespace {

// acc [Rows, Vectors * kLanes] = acc * shrink + weights @ v, one position after the other.
template <long Rows, long Vectors, typename E>
inline void value_tile(const float* weights, const E* const* v, long at, Range seen, const float* shrink, float* acc,
                       long width, const E* const* ahead) {
    Floats sums[Rows * Vectors];
#pragma GCC unroll 16
    for (long r = 0; r < Rows; ++r) {
#pragma GCC unroll 16
        for (long i = 0; i < Vectors; ++i) {
            sums[r * Vectors + i] = load(acc + r * width + at + i * kLanes) * splat(shrink[r]);
        }
    }
    for (long p = seen.first; p < seen.last; ++p) {
        Floats value[Vectors];
        const E* const from = v[p] + at;
        if (ahead) fetch(ahead[p] + at, Vectors * kLanes);
#pragma GCC unroll 16
        for (long i = 0; i < Vectors; ++i) value[i] = load(from + i * kLanes);
#pragma GCC unroll 16
        for (long r = 0; r < Rows; ++r) {
            const Floats weight = splat(weights[r * kAttentionBlock + p]);
#pragma GCC unroll 16
            for (long i = 0; i < Vectors; ++i) sums[r * Vectors + i] = fma(weight, value[i], sums[r * Vectors + i]);
        }
    }
#pragma GCC unroll 16
    for (long r = 0; r < Rows; ++r) {
#pragma GCC unroll 16
        for (long i = 0; i < Vectors; ++i) store(acc + r * width + at + i * kLanes, sums[r * Vectors + i]);
    }
}

template <long Rows, long Vectors, typename E>
inline void value_rows(const float* weights, const E* const* v, long at, Range seen, const float* shrink, float* acc,
                       long width, const E* const* ahead) {
    for (; at + Vectors * kLanes <= width; at += Vectors * kLanes) {
        value_tile<Rows, Vectors>(weights, v, at, seen, shrink, acc, width, ahead);
    }
    if constexpr (Vectors > 1) value_rows<Rows, Vectors / 2>(weights, v, at, seen, shrink, acc, width, ahead);
}

// Rows go together that see the same positions. The others' values are not even multiplied by 0: they may be infinite.
template <typename E>
inline void add_values(const Scratch& s, long rows, const E* const* v, long width, const E* const* ahead) {
    constexpr long kFour = kTile / 4, kTwo = kTile / 2 < 8 ? kTile / 2 : 8, kOne = kTile < 8 ? kTile : 8;
    for (long r = 0, together = 0; r < rows; r += together) {
        const Range seen = s.seen[r];
        together = alike(s.seen + r, rows - r);
        const float *weights = s.scores + r * kAttentionBlock, *shrink = s.shrink + r;
        float* const acc = s.now.acc + r * width;
        if (seen.first >= seen.last) continue;
        if (together == 4) value_rows<4, kFour>(weights, v, 0, seen, shrink, acc, width, ahead);
        if (together == 2) value_rows<2, kTwo>(weights, v, 0, seen, shrink, acc, width, ahead);
        if (together == 1) value_rows<1, kOne>(weights, v, 0, seen, shrink, acc, width, ahead);
        ahead = nullptr;
    }
}

}  // namespace
}  // namespace quintet::cpu
