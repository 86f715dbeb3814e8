// exp and tanh of a vector: a value gives the same bits in whatever lane. Needs Floats, Ints, fma() and splat().
#pragma once

namespace quintet::cpu {
namespace {

// e**x for x <= 0, to 2 units in the last place; 0 below -87. After Moshier's Cephes (expf).
inline Floats exp_of(Floats x) {
    const Floats low = splat(-87.0F), magic = splat(12582912.0F);  // 1.5 * 2**23: adding it rounds to a whole number
    const Floats clamped = x < low ? low : x;
    const Floats shifted = fma(clamped, splat(1.44269504088896341F), magic);
    const Floats whole = shifted - magic;
    const Floats rest = fma(whole, splat(2.12194440e-4F), fma(whole, splat(-0.693359375F), clamped));
    Floats sum = splat(1.9875691500e-4F);
    sum = fma(sum, rest, splat(1.3981999507e-3F));
    sum = fma(sum, rest, splat(8.3334519073e-3F));
    sum = fma(sum, rest, splat(4.1665795894e-2F));
    sum = fma(sum, rest, splat(1.6666665459e-1F));
    sum = fma(sum, rest, splat(5.0000001201e-1F));
    sum = fma(fma(sum, rest, splat(1.0F)), rest, splat(1.0F));
    const Ints power = ((Ints)shifted << 23) + (127 << 23);
    const Floats result = sum * (Floats)power;
    return x < low ? splat(0.0F) : result;
}

// After Cephes (tanhf).
inline Floats tanh_of(Floats x) {
    const Floats size = x < 0.0F ? -x : x;
    const Floats square = x * x;
    Floats near = splat(-5.70498872745e-3F);
    near = fma(near, square, splat(2.06390887954e-2F));
    near = fma(near, square, splat(-5.37397155531e-2F));
    near = fma(near, square, splat(1.33314422036e-1F));
    near = fma(near, square, splat(-3.33332819422e-1F));
    near = fma(near * square, x, x);
    const Floats small = exp_of(size * -2.0F);
    const Floats far = (1.0F - small) / (1.0F + small);
    return size < 0.625F ? near : (x < 0.0F ? -far : far);
}

}  // namespace
}  // namespace quintet::cpu
