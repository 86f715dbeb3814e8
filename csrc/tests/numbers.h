// Numbers that every type holds exactly, for the tests of products.
#pragma once

#include <cstdint>

#include "cpu/kernels/linear.h"

namespace {

// Small whole numbers, which every type and every order of adding holds exactly.
inline long whole(long i) { return (i * 7 + i / 3) % 5 - 2; }

inline uint32_t bits_of(long value, quintet::cpu::LinearType type) {
    const float x = static_cast<float>(value);
    uint32_t bits;
    __builtin_memcpy(&bits, &x, sizeof bits);
    if (type == quintet::cpu::kLinearFloat32) return bits;
    if (type == quintet::cpu::kLinearBfloat16) return bits >> 16;
    return value == 0 ? 0 : (bits >> 16 & 0x8000) | ((bits & 0x7FFFFFFF) - (112U << 23)) >> 13;
}

}  // namespace
