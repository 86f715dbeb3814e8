// What activations are made of, for a vector: a value gives the same bits in whatever lane. After vectors_*.h.
#pragma once

#include "cpu/kernels/attention_math.h"

namespace quintet::cpu {
namespace {

inline Floats magnitude_of(Floats x) { return (Floats)((Ints)x & 0x7FFFFFFF); }

// 1 / (1 + e**-x), to 4 units in the last place; 0 below -87.
inline Floats sigmoid_of(Floats x) {
    const Floats small = exp_of(-magnitude_of(x));
    return (x < 0.0F ? small : splat(1.0F)) / (small + 1.0F);
}

// The share of a normal distribution below x, to 6 units in the last place (70 far below 0 where fma() is not fused);
// 0 below -13.19, where e**(-x*x/2) leaves exp_of()'s range. Its ratio to the density is t * Q(t), t = 1 / (1 + 0.3 |x|):
// Q was fitted for this file to 4e-9.
inline Floats normal_share_of(Floats x) {
    const Floats size = magnitude_of(x), far = splat(14.0F);
    const Floats clamped = size < far ? size : far;
    const Floats t = 1.0F / fma(clamped, splat(0.3F), splat(1.0F));
    Floats sum = splat(-0.020612947642803192F);
    sum = fma(sum, t, splat(0.11237642168998718F));
    sum = fma(sum, t, splat(-0.22806903719902039F));
    sum = fma(sum, t, splat(0.19158373773097992F));
    sum = fma(sum, t, splat(-0.07924903929233551F));
    sum = fma(sum, t, splat(0.09605874121189117F));
    sum = fma(sum, t, splat(0.07842526584863663F));
    sum = fma(sum, t, splat(0.11022739112377167F));
    sum = fma(sum, t, splat(0.11957283318042755F));
    sum = fma(sum, t, splat(0.11968663334846497F));
    const Floats square = clamped * clamped;
    const Floats lost = fma(clamped, clamped, -square);  // by the rounding of the square, which the exponent magnifies
    const Floats power = exp_of(square * -0.5F), ratio = sum * t;
    const Floats density = fma(power, lost * -0.5F, power);
    return x < 0.0F ? density * ratio : fma(-density, ratio, splat(1.0F));
}

}  // namespace
}  // namespace quintet::cpu
