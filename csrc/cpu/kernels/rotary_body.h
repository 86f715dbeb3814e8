// The loops of rotary.h, written once over the vectors of one instruction set. After vectors_*.h.
#pragma once

#include "cpu/kernels/norm_row.h"
#include "cpu/kernels/rotary.h"

namespace quintet::cpu {
namespace {

// a * b + c * d, the products rounded to the type as the specification's are; in float32, one of them not at all.
template <typename E>
inline Floats of_products(Floats a, Floats b, Floats c, Floats d) {
    if constexpr (sizeof(E) == sizeof(float)) return fma(a, b, c * d);
    return rounded(a * b, E{}) + rounded(c * d, E{});
}

// One token's heads, `stride` apart in x.
template <typename E>
inline void turn_heads(E* out, const E* x, long stride, long count, long dim, const float* table, long half) {
    for_vectors(half, [=](long i, long lanes) {
        const Floats cos = rounded(load_some(table + i, lanes), E{});
        const Floats sin = rounded(load_some(table + half + i, lanes), E{});
        for (long h = 0; h < count; ++h) {
            const Floats a = load_some(x + h * stride + i, lanes), b = load_some(x + h * stride + half + i, lanes);
            store_some(out + h * dim + i, of_products<E>(a, cos, -b, sin), lanes);
            store_some(out + h * dim + half + i, of_products<E>(b, cos, a, sin), lanes);
        }
    });
}

// The first of each pair, then the second.
template <typename E>
inline void take_apart(E* out, const E* x, long half) {
    for (long i = 0; i < half; ++i) {
        out[i] = x[2 * i];
        out[half + i] = x[2 * i + 1];
    }
}

template <typename E>
void turn(const RotaryCall& c, long first, long last) {
    const long half = c.turned / 2;
    for (long token = first; token < last; ++token) {
        const float* const table = c.table + c.positions[token] * c.turned;
        for (const RotaryHeads& heads : c.heads) {
            E* const out = static_cast<E*>(heads.out) + token * heads.count * c.dim;
            const E* x = static_cast<const E*>(heads.x) + token * heads.token_stride;
            long stride = heads.head_stride;
            for (long h = 0; h < heads.count; ++h) {
                const E* const head = x + h * stride;
                if (heads.weight) {
                    rms_row(out + h * c.dim, head, static_cast<const E*>(heads.weight), c.dim, {c.eps, c.offset});
                } else {
                    if (c.neighbours) take_apart(out + h * c.dim, head, half);
                    const size_t rest = static_cast<size_t>(c.dim - c.turned) * sizeof(E);
                    __builtin_memcpy(out + h * c.dim + c.turned, head + c.turned, rest);
                }
            }
            if (heads.weight || c.neighbours) {
                x = out;
                stride = c.dim;
            }
            turn_heads(out, x, stride, heads.count, c.dim, table, half);
        }
    }
}

}  // namespace
}  // namespace quintet::cpu

#define QUINTET_ROTARY_KERNELS {{{turn<float>, turn<Bfloat16>, turn<Float16>}}}
