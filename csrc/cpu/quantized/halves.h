// Numbers of two bytes, outside of kernels.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>

#include "cpu/kernels/floats.h"

namespace quintet::cpu {

// Of a half that is finite.
inline float float_of(uint16_t half) {
    const uint32_t size = static_cast<uint32_t>(half & 0x7FFF) << 13, sign = static_cast<uint32_t>(half & 0x8000) << 16;
    float x;
    std::memcpy(&x, &size, sizeof x);
    x *= 0x1p112F;  // scales are finite
    return sign ? -x : x;
}

inline float widened(uint16_t bits, FloatType type) {
    if (type == FloatType::bfloat16) return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
    const uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16, size = static_cast<uint32_t>(bits & 0x7FFF) << 13;
    const float finite = std::bit_cast<float>(size) * 0x1p112F;  // subnormals come out right, too
    const uint32_t special = (bits & 0x7C00) == 0x7C00 ? 0x7F800000 : 0;
    return std::bit_cast<float>(std::bit_cast<uint32_t>(finite) | special | sign);
}

}  // namespace quintet::cpu
