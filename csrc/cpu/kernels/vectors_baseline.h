// The compiler's vectors of four: float32 in registers, float32, bfloat16 and float16 in memory.
#pragma once

#if defined(__aarch64__)
#include <arm_neon.h>
#elif defined(__x86_64__)
#include <emmintrin.h>
#endif

#include "cpu/kernels/vectors_types.h"

namespace quintet::cpu {
namespace {

constexpr long kLanes = 4;
using Floats = float __attribute__((vector_size(16)));
using Ints = uint32_t __attribute__((vector_size(16)));

inline Floats rounded(Floats x, Bfloat16);

inline Floats splat(float x) { return Floats{x, x, x, x}; }

// No product stands beside a sum elsewhere: a compiler may join the two in one copy of a loop and not in another.
#if defined(__aarch64__)
inline Floats fma(Floats a, Floats b, Floats c) {
    return (Floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
}
inline float square_root(float x) { return vget_lane_f32(vsqrt_f32(vdup_n_f32(x)), 0); }
#else
inline Floats fma(Floats a, Floats b, Floats c) { return a * b + c; }  // SSE2 has no fused form
#if defined(__x86_64__)
inline float square_root(float x) { return _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(x))); }
#else
inline float square_root(float x) { return __builtin_sqrtf(x); }
#endif
#endif

inline float sum_across(Floats x) { return (x[0] + x[2]) + (x[1] + x[3]); }

inline Floats load(const float* at) {
    Floats x;
    __builtin_memcpy(&x, at, sizeof x);
    return x;
}

inline Floats load(const Bfloat16* at) { return (Floats)(Ints{at[0].bits, at[1].bits, at[2].bits, at[3].bits} << 16); }

inline Floats from_float16(Ints bits) {
    const Floats size = (Floats)((bits & 0x7FFF) << 13) * 0x1p112F;  // subnormals come out right, too
    const Ints special = (Ints)((bits & 0x7C00) == 0x7C00) & 0x7F800000;
    return (Floats)((Ints)size | special | (bits & 0x8000) << 16);
}

inline Floats load(const Float16* at) { return from_float16(Ints{at[0].bits, at[1].bits, at[2].bits, at[3].bits}); }

// To nearest, ties to even.
inline Ints to_float16(Floats x) {
    const Ints bits = (Ints)x, size = bits & 0x7FFFFFFF;
    const Ints subnormal = (Ints)((Floats)size + 0.5F) - 0x3F000000;  // adding 0.5 rounds where the bits end
    const Ints normal = (size - (112U << 23) + 0xFFF + (size >> 13 & 1)) >> 13;
    const Ints finite = size < 0x38800000 ? subnormal : normal;
    const Ints large = size > 0x7F800000 ? finite * 0 + 0x7E00 : finite * 0 + 0x7C00;  // NaN, or 65536 and above
    return (size >= 0x47800000 ? large : finite) | (bits >> 16 & 0x8000);
}

inline Floats rounded(Floats x, Float16) { return from_float16(to_float16(x)); }

inline void store(float* at, Floats x) { __builtin_memcpy(at, &x, sizeof x); }
// Past the caches, where an instruction does so.
inline void stream(float* at, Floats x) { store(at, x); }
inline void settled() {}

inline void store_low_halves(void* at, Ints x) {
    const uint16_t halves[kLanes] = {static_cast<uint16_t>(x[0]), static_cast<uint16_t>(x[1]), static_cast<uint16_t>(x[2]),
                                     static_cast<uint16_t>(x[3])};
    __builtin_memcpy(at, halves, sizeof halves);
}

inline void store(Bfloat16* at, Floats x) { store_low_halves(at, (Ints)rounded(x, Bfloat16{}) >> 16); }
inline void store(Float16* at, Floats x) { store_low_halves(at, to_float16(x)); }

}  // namespace
}  // namespace quintet::cpu

#include "cpu/kernels/vectors_body.h"
