// Vectors of AVX512 for quantized_body.h.
#pragma once

#include "cpu/kernels/linear_avx512_vectors.h"

namespace quintet::cpu {
namespace {

using Ints = __m512i;

inline Floats splat(float x) { return _mm512_set1_ps(x); }
inline Floats mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
inline Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline Floats to_floats(Ints x) { return _mm512_cvtepi32_ps(x); }
inline Floats as_floats(Ints x) { return _mm512_castsi512_ps(x); }
inline Ints as_ints(Floats x) { return _mm512_castps_si512(x); }
inline Ints rounded(Floats x) { return _mm512_cvtps_epi32(x); }  // ties to even
inline Ints ints(int32_t x) { return _mm512_set1_epi32(x); }
inline Ints add_ints(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
inline Ints larger(Ints a, Ints b) { return _mm512_max_epi32(a, b); }
inline int32_t highest_lane(Ints x) { return _mm512_reduce_max_epi32(x); }
inline int32_t sum_of_lanes(Ints x) { return _mm512_reduce_add_epi32(x); }
inline Ints magnitude_bits(Floats x) { return _mm512_and_si512(as_ints(x), ints(0x7FFFFFFF)); }
inline void store_ints(int32_t* at, Ints x) { _mm512_storeu_si512(at, x); }
inline __m256i load_halves(const uint16_t* at) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)); }
inline Floats widen_half(const uint16_t* at) { return _mm512_cvtph_ps(load_halves(at)); }

inline Floats sub(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
inline Floats widen_bytes(const uint8_t* at) {
    return to_floats(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at))));
}

inline Floats widen_signed(const int8_t* at) {
    return to_floats(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at))));
}

struct Singles {
    using Element = float;
    static Floats widen(const float* at) { return load(at); }
    static void round(Floats x, float* out) { store(out, x); }
};
struct Brains {
    using Element = uint16_t;
    static Floats widen(const uint16_t* at) {
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load_halves(at)), 16));
    }
    static void round(Floats x, uint16_t* out) { round_to_bfloat16(x, out); }
};
struct Halves {
    using Element = uint16_t;
    static Floats widen(const uint16_t* at) { return widen_half(at); }
    static void round(Floats x, uint16_t* out) { round_to_float16(x, out); }
};

inline int32_t quad_at(const uint8_t* at) {
    int32_t bits;
    __builtin_memcpy(&bits, at, sizeof bits);
    return bits;
}

}  // namespace
}  // namespace quintet::cpu
