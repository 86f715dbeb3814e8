// What 8-bit floats are in bfloat16: whole, and by the parts that shuffles look up.
#pragma once

#include "cpu/kernels/float8.h"

namespace quintet::cpu {
namespace {

constexpr int mantissa_bits(Float8Format f) { return f == kE4m3fn ? 3 : 2; }
constexpr int exponent_bias(Float8Format f) { return f == kE4m3fn ? 7 : 15; }

// Of a finite number; bit 7 is its sign.
constexpr uint16_t bfloat16_of(Float8Format f, unsigned bits) {
    const unsigned places = static_cast<unsigned>(mantissa_bits(f)), one = 1U << places;
    unsigned mantissa = bits & (one - 1);
    int exponent = static_cast<int>((bits & 0x7F) >> places);
    if (exponent == 0) {
        if (mantissa == 0) return static_cast<uint16_t>((bits & 0x80) << 8);
        for (exponent = 1; mantissa < one; mantissa <<= 1) --exponent;
        mantissa -= one;
    }
    const unsigned biased = static_cast<unsigned>(exponent + 127 - exponent_bias(f));
    return static_cast<uint16_t>((bits & 0x80) << 8 | biased << 7 | mantissa << (7 - places));
}

// Numbers from the smallest normal one on are bfloat16's with fewer bits: with the sign 16 - kShift bits higher, kKept of it
// stay, and kAdded brings the exponent where it belongs. Those below (none of kNormal is set) are looked up.
template <Float8Format Format>
struct Float8Bits {
    static constexpr int kShift = Format == kE4m3fn ? 4 : 3;  // of a number in the high byte of 16 bits, its sign repeated
    static constexpr int kKept = Format == kE4m3fn ? 0x87F0 : 0x8FE0;
    static constexpr int kAdded = (127 - exponent_bias(Format)) << 7;
    static constexpr int kNormal = Format == kE4m3fn ? 0x78 : 0x7C;
};

// All numbers, and first of them those that are not normal.
struct Known {
    alignas(64) uint16_t bits[256];
};

constexpr Known all_of(Float8Format format) {
    Known known{};
    for (unsigned i = 0; i < 256; ++i) known.bits[i] = bfloat16_of(format, i);
    return known;
}

template <Float8Format Format>
constexpr Known kKnown = all_of(Format);

}  // namespace
}  // namespace quintet::cpu
