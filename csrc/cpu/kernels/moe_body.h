// The loops of moe.h, written once over the vectors of one instruction set. After vectors_*.h.
#pragma once

#include "cpu/kernels/activation_math.h"
#include "cpu/kernels/moe.h"
#include "cpu/kernels/norm_row.h"

namespace quintet::cpu {
namespace {

template <typename E, long Vectors>
inline void sum_columns(const WeightedRows& token, long column, long lanes) {
    Floats sums[Vectors];
    for (long v = 0; v < Vectors; ++v) sums[v] = splat(0.0F);
    for (long j = 0; j < token.k; ++j) {
        if (token.places[j] < 0) continue;
        const E* const row = static_cast<const E*>(token.rows) + token.places[j] * token.stride + column;
        const Floats weight = splat(token.weights[j]);
        for (long v = 0; v < Vectors; ++v) sums[v] = fma(weight, load_some(row + v * kLanes, lanes), sums[v]);
    }
    E* const out = static_cast<E*>(token.out) + column;
    for (long v = 0; v < Vectors; ++v) store_some(out + v * kLanes, sums[v], lanes);
}

template <typename E>
void sum_rows(const WeightedRows& token) {
    constexpr long kVectors = 4;  // so that a row's address is looked up seldom
    long column = 0;
    for (; column + kVectors * kLanes <= token.width; column += kVectors * kLanes) {
        sum_columns<E, kVectors>(token, column, kLanes);
    }
    for (; column < token.width; column += kLanes) sum_columns<E, 1>(token, column, token.width - column);
}

template <typename E>
void add_bias(const BiasedRow& row) {
    const E *const x = static_cast<const E*>(row.x), *const bias = static_cast<const E*>(row.bias);
    E* const out = static_cast<E*>(row.out);
    for_vectors(row.width, [=](long i, long lanes) {
        store_some(out + i, load_some(x + i, lanes) + load_some(bias + i, lanes), lanes);
    });
}

// Gate and up, biases too, are told apart for some features at once.
template <typename E>
void clamp_row(const BiasedRow& row) {
    constexpr long kMost = 64;
    E parts[4][kMost];
    const E *const x = static_cast<const E*>(row.x), *const bias = static_cast<const E*>(row.bias);
    E* const out = static_cast<E*>(row.out);
    const Floats limit = splat(row.limit), alpha = splat(row.alpha);
    for (long first = 0; first < row.width; first += kMost) {
        const long some = first + kMost < row.width ? kMost : row.width - first;
        for (long i = 0; i < some; ++i) {
            parts[0][i] = x[2 * (first + i)];
            parts[1][i] = bias[2 * (first + i)];
            parts[2][i] = x[2 * (first + i) + 1];
            parts[3][i] = bias[2 * (first + i) + 1];
        }
        for_vectors(some, [&](long i, long lanes) {
            Floats gate = load_some(parts[0] + i, lanes) + load_some(parts[1] + i, lanes);
            Floats up = load_some(parts[2] + i, lanes) + load_some(parts[3] + i, lanes);
            gate = gate > limit ? limit : gate;
            up = up > limit ? limit : up;
            up = up < -limit ? -limit : up;
            store_some(out + first + i, (up + 1.0F) * (gate * sigmoid_of(gate * alpha)), lanes);
        });
    }
}

}  // namespace
}  // namespace quintet::cpu

#define QUINTET_MOE_KERNELS                                               \
    {{{sum_rows<float>, sum_rows<Bfloat16>, sum_rows<Float16>}},                                        \
     {{add_bias<float>, add_bias<Bfloat16>, add_bias<Float16>}},                                        \
     {{clamp_row<float>, clamp_row<Bfloat16>, clamp_row<Float16>}}}
