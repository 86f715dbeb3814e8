// The small types of attention: one number, and how a float is rounded to those of 16 bits (nearest, ties to even).
#pragma once

#include <stdint.h>

namespace quintet::cpu {
namespace {

struct Bfloat16 {
    uint16_t bits;
};
struct Float16 {
    uint16_t bits;
};
struct Int8 {
    int8_t steps;
};
struct Float8 {  // e4m3fn
    uint8_t bits;
};
struct Int4 {  // a byte of a row of groups
    uint8_t bits;
};
struct Float8Wide {  // e5m2: the upper half of a Float16
    uint8_t bits;
};

uint32_t bits_of(float x) {
    uint32_t bits;
    __builtin_memcpy(&bits, &x, sizeof bits);
    return bits;
}

[[maybe_unused]] void narrow(float x, float* out) { *out = x; }

[[maybe_unused]] void narrow(float x, Bfloat16* out) {
    const uint32_t bits = bits_of(x);
    const uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    out->bits = static_cast<uint16_t>((bits & 0x7FFFFFFF) > 0x7F800000 ? 0x7FC0 : rounded);
}

[[maybe_unused]] void narrow(float x, Float16* out) {
    const uint32_t sign = bits_of(x) >> 16 & 0x8000, size = bits_of(x) & 0x7FFFFFFF;
    uint32_t half;
    if (size >= 0x47800000) {  // 65536 and above, or NaN
        half = size > 0x7F800000 ? 0x7E00 : 0x7C00;
    } else if (size < 0x38800000) {  // subnormal: adding 0.5 leaves the right bits at the end, rounded
        float magnitude;
        __builtin_memcpy(&magnitude, &size, sizeof magnitude);
        half = bits_of(magnitude + 0.5F) - 0x3F000000;
    } else {
        half = (size - (112U << 23) + 0xFFF + ((size >> 13) & 1)) >> 13;
    }
    out->bits = static_cast<uint16_t>(sign | half);
}

}  // namespace
}  // namespace quintet::cpu
