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

// The same to 2e-7, for what is rounded to 16 bits: a polynomial in x * x, fitted for this file between -5.2 and 5.2, and what
// it is there beyond.
inline Floats normal_share_near(Floats x) {
    constexpr int kTerms = 14;
    constexpr float kFar = 5.2F, kTerm[kTerms] = {
        0.13594999909F, -0.067743666470F, 0.050024520606F, -0.039929818362F, 0.031989958137F, -0.024723628536F, 0.017954787239F,
        -0.012505124323F, 0.0085599655285F, -0.0047890325077F, 0.0018001246499F, -0.0012214990566F, 0.0012685103575F,
        -0.00048127537593F};
    const Floats high = splat(kFar), low = splat(-kFar);
    const Floats under = x < high ? x : high, near = under < low ? low : under;
    const Floats s = fma(near * near, splat(2.0F / (kFar * kFar)), splat(-1.0F)), s2 = s * s, s4 = s2 * s2;
    Floats two[kTerms / 2];  // neighbours, and then their neighbours: no chain of products is long
#pragma GCC unroll 8
    for (int i = 0; i < kTerms / 2; ++i) two[i] = fma(splat(kTerm[2 * i + 1]), s, splat(kTerm[2 * i]));
    const Floats first = fma(two[1], s2, two[0]), second = fma(two[3], s2, two[2]), third = fma(two[5], s2, two[4]);
    return fma(near, fma(fma(fma(two[6], s4, third), s4, second), s4, first), splat(0.5F));
}

}  // namespace
}  // namespace quintet::cpu
