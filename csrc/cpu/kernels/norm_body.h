// The loops of norm.h, written once over the vectors of one instruction set. After vectors_*.h.
#pragma once

#include "cpu/kernels/norm.h"
#include "cpu/kernels/norm_row.h"

namespace quintet::cpu {
namespace {

template <typename E>
inline const E* row_of(const NormCall& c, long row) {
    return static_cast<const E*>(c.x) + row / c.inner * c.outer_stride + row % c.inner * c.inner_stride;
}

template <typename E>
void rms(const NormCall& c, long first, long last) {
    const E* const weight = static_cast<const E*>(c.weight);
    const RmsScale scale = {c.eps, c.offset};
    for (long row = first; row < last; ++row) {
        const E* const x = row_of<E>(c, row);
        E* const out = static_cast<E*>(c.out) + row * c.width;
        if (!c.residual) {
            rms_row(out, x, weight, c.width, scale);
            continue;
        }
        const E* const residual = static_cast<const E*>(c.residual) + row * c.width;
        E* const both = static_cast<E*>(c.sum) + row * c.width;
        const float squares = sum_of(c.width, [=](long i, long count, Floats sum) {
            const Floats each = rounded(load_some(x + i, count) + load_some(residual + i, count), E{});
            store_some(both + i, each, count);
            return fma(each, each, sum);
        });
        rms_scale(out, both, weight, c.width, squares, scale);
    }
}

// The first `count` lanes, then zeros.
inline Floats first_of(Floats x, long count) {
    float each[kLanes];
    store(each, x);
    return load_some(each, count);
}

template <typename E>
void layer(const NormCall& c, long first, long last) {
    const E* const weight = static_cast<const E*>(c.weight);
    const E* const bias = static_cast<const E*>(c.bias);
    for (long row = first; row < last; ++row) {
        const E* const x = row_of<E>(c, row);
        E* const out = static_cast<E*>(c.out) + row * c.width;
        const float sum = sum_of(c.width, [=](long i, long count, Floats s) { return s + load_some(x + i, count); });
        const Floats mean = splat(sum / static_cast<float>(c.width));
        const float squares = sum_of(c.width, [=](long i, long count, Floats s) {
            const Floats off = load_some(x + i, count) - mean;
            const Floats each = count < kLanes ? first_of(off, count) : off;
            return fma(each, each, s);
        });
        const Floats inverse = inverse_root(squares, c.width, c.eps);
        for_vectors(c.width, [=](long i, long count) {
            const Floats y = (load_some(x + i, count) - mean) * inverse;
            const Floats shift = bias ? load_some(bias + i, count) : splat(0.0F);
            store_some(out + i, fma(y, load_some(weight + i, count), shift), count);
        });
    }
}

}  // namespace
}  // namespace quintet::cpu

#define QUINTET_NORM_KERNELS \
    {{{rms<float>, rms<Bfloat16>, rms<Float16>}}, {{layer<float>, layer<Bfloat16>, layer<Float16>}}}
