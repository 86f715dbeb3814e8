// The compiler's vectors of four for quantized_body.h and quantized_pack_body.h.
#pragma once

#include <stdint.h>

#if defined(__SSE2__)
#include <emmintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "cpu/kernels/attention_types.h"

namespace quintet::cpu {
namespace {

constexpr long kLanes = 4;
using Floats = float __attribute__((vector_size(16)));
using Ints = int32_t __attribute__((vector_size(16)));
using Bits = uint32_t __attribute__((vector_size(16)));

inline Floats zeros() { return Floats{}; }
inline Floats splat(float x) { return Floats{x, x, x, x}; }
inline Floats load(const float* at) {
    Floats x;
    __builtin_memcpy(&x, at, sizeof x);
    return x;
}
inline void store(float* at, Floats x) { __builtin_memcpy(at, &x, sizeof x); }
inline Floats add(Floats a, Floats b) { return a + b; }
inline Floats sub(Floats a, Floats b) { return a - b; }
inline Floats mul(Floats a, Floats b) { return a * b; }
inline Floats fma(Floats a, Floats b, Floats c) {  // rounded once, as everywhere; a call where the processor has none
#if defined(__aarch64__)
    return (Floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    Floats x;
    for (long i = 0; i < kLanes; ++i) x[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return x;
#endif
}
inline Ints as_ints(Floats x) { return (Ints)x; }
inline Floats as_floats(Ints x) { return (Floats)x; }
inline Floats to_floats(Ints x) { return __builtin_convertvector(x, Floats); }
inline Ints ints(int32_t x) { return Ints{x, x, x, x}; }
inline Ints add_ints(Ints a, Ints b) { return (Ints)((Bits)a + (Bits)b); }  // may wrap around
inline Ints larger(Ints a, Ints b) { return a > b ? a : b; }
inline Ints smaller(Ints a, Ints b) { return a < b ? a : b; }
[[maybe_unused]] inline int32_t highest_lane(Ints x) {
    int32_t most = x[0];
    for (long i = 1; i < kLanes; ++i) most = x[i] > most ? x[i] : most;
    return most;
}
[[maybe_unused]] inline int32_t sum_of_lanes(Ints x) { return x[0] + x[1] + x[2] + x[3]; }
inline Ints magnitude_bits(Floats x) { return as_ints(x) & 0x7FFFFFFF; }
inline void store_ints(int32_t* at, Ints x) { __builtin_memcpy(at, &x, sizeof x); }

inline Ints rounded(Floats x) {  // ties to even
#if defined(__SSE2__)
    return (Ints)_mm_cvtps_epi32((__m128)x);
#elif defined(__aarch64__)
    return (Ints)vcvtnq_s32_f32((float32x4_t)x);
#else
    Ints whole;
    for (long i = 0; i < kLanes; ++i) whole[i] = static_cast<int32_t>(__builtin_rintf(x[i]));
    return whole;
#endif
}

inline Floats widen_halves(Bits bits) {
    const Floats size = (Floats)((bits & 0x7FFF) << 13) * 0x1p112F;  // subnormals come out right, too
    const Bits special = (Bits)((bits & 0x7C00) == 0x7C00) & 0x7F800000;
    return (Floats)((Bits)size | special | (bits & 0x8000) << 16);
}
inline Floats widen_half(const uint16_t* at) {
#if defined(__aarch64__)
    return (Floats)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(at)));
#else
    return widen_halves(Bits{at[0], at[1], at[2], at[3]});
#endif
}
inline Floats widen_bytes(const uint8_t* at) { return to_floats(Ints{at[0], at[1], at[2], at[3]}); }
[[maybe_unused]] inline Floats widen_signed(const int8_t* at) { return to_floats(Ints{at[0], at[1], at[2], at[3]}); }
[[maybe_unused]] inline float float_of(uint16_t x) { return widen_halves(Bits{x, 0, 0, 0})[0]; }
[[maybe_unused]] inline uint16_t half_of(float x) {
    Float16 half;
    narrow(x, &half);
    return half.bits;
}

inline void store_bytes(uint8_t* at, Ints x) {  // each 0..255
    for (long i = 0; i < kLanes; ++i) at[i] = static_cast<uint8_t>(x[i]);
}

template <typename E>
inline void narrow_all(Floats x, void* out) {
    for (long i = 0; i < kLanes; ++i) narrow(x[i], static_cast<E*>(out) + i);
}

struct Singles {
    using Element = float;
    static Floats widen(const float* at) { return load(at); }
    static void round(Floats x, float* out) { narrow_all<float>(x, out); }
};
struct Brains {
    using Element = uint16_t;
    static Floats widen(const uint16_t* at) { return (Floats)(Bits{at[0], at[1], at[2], at[3]} << 16); }
    static void round(Floats x, uint16_t* out) { narrow_all<Bfloat16>(x, out); }
};
struct Halves {
    using Element = uint16_t;
    static Floats widen(const uint16_t* at) { return widen_half(at); }
    static void round(Floats x, uint16_t* out) { narrow_all<Float16>(x, out); }
};

}  // namespace
}  // namespace quintet::cpu
