// What the loops of states have in common: whose tokens they take, and the numbers that steer a state. After vectors_*.h.
#pragma once

#include "cpu/kernels/activation_math.h"
#include "cpu/kernels/norm_row.h"
#include "cpu/kernels/states.h"

namespace quintet::cpu {
namespace {

template <typename E>
inline const E* as(const void* at, long place) {
    return static_cast<const E*>(at) + place;
}

struct Stretch {  // of one request: tokens from `known` on are drafts; `accepted` ones of the step before come first
    long begin, known, end, read, write, accepted;
};

inline Stretch stretch_of(const StateRows& rows, long request) {
    const int* const units = rows.block_table + request * rows.columns;
    const long end = rows.query_start_loc[request + 1];
    return {rows.query_start_loc[request], rows.drafts ? end - units[3] : end, end, units[0], units[1],
            rows.drafts ? units[2] : 0};
}

// What the place-th draft does to a head's state in the unit at `state`: decay, given[rows], key[width].
inline float* update_of(float* state, long place, long heads, long head, long rows, long width) {
    return state + heads * rows * width + (place * heads + head) * (1 + rows + width);
}

template <typename E>
inline float one(const E* at) {
    return load_some(at, 1)[0];
}

inline float one(const float* at) { return *at; }
inline float one(const Bfloat16* at) { return __builtin_bit_cast(float, static_cast<uint32_t>(at->bits) << 16); }

template <typename E>
inline void widened(float* out, const E* x, long count) {
    for_vectors(count, [=](long i, long some) { store_some(out + i, load_some(x + i, some), some); });
}

// [rows, columns] -> the columns, `stride` apart.
inline void turned(float* out, long stride, const float* x, long rows, long columns) {
    for (long r = 0; r < rows; ++r) {
        for (long c = 0; c < columns; ++c) out[c * stride + r] = x[r * columns + c];
    }
}

// e**x, to 5 units in the last place; infinite above 87.
inline Floats power_of(Floats x) {
    const Floats small = exp_of(-magnitude_of(x));
    return x <= 0.0F ? small : 1.0F / small;
}

// log(1 + e**x), to 6 units in the last place; 0 below -87. log(1 + u) is twice the area tangent of u / (2 + u), which is a
// third at most: eight terms of its series.
inline Floats softplus_of(Floats x) {
    const Floats small = exp_of(-magnitude_of(x)), ratio = small / (small + 2.0F), square = ratio * ratio;
    Floats sum = splat(2.0F / 15.0F);
    sum = fma(sum, square, splat(2.0F / 13.0F));
    sum = fma(sum, square, splat(2.0F / 11.0F));
    sum = fma(sum, square, splat(2.0F / 9.0F));
    sum = fma(sum, square, splat(2.0F / 7.0F));
    sum = fma(sum, square, splat(2.0F / 5.0F));
    sum = fma(sum, square, splat(2.0F / 3.0F));
    sum = fma(sum, square, splat(2.0F));
    const Floats above = x < 0.0F ? splat(0.0F) : x;  // what is not a number stays so
    return fma(sum, ratio, above);
}

}  // namespace
}  // namespace quintet::cpu
