// Scales in float16, outside of kernels.
#pragma once

#include <cstdint>
#include <cstring>

namespace quintet::cpu {

// Of a half that is finite.
inline float float_of(uint16_t half) {
    const uint32_t size = static_cast<uint32_t>(half & 0x7FFF) << 13, sign = static_cast<uint32_t>(half & 0x8000) << 16;
    float x;
    std::memcpy(&x, &size, sizeof x);
    x *= 0x1p112F;  // scales are finite
    return sign ? -x : x;
}

}  // namespace quintet::cpu
