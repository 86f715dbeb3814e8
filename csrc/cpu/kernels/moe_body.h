// The loops of moe.h, written once over the vectors of one instruction set. After vectors_*.h.
#pragma once

#include "cpu/kernels/moe.h"

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

}  // namespace
}  // namespace quintet::cpu

#define QUINTET_MOE_KERNELS {{{sum_rows<float>, sum_rows<Bfloat16>, sum_rows<Float16>}}}
