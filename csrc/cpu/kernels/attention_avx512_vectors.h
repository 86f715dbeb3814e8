// Vectors of AVX512 for attention_body.h.
#pragma once

#include "cpu/kernels/intrinsics.h"

#include "cpu/kernels/attention_types.h"

namespace quintet::cpu {
namespace {

constexpr long kLanes = 16;
constexpr long kTile = 16;  // of thirty-two registers
using Floats = __m512;
using Ints = uint32_t __attribute__((vector_size(64)));

inline Floats splat(float x) { return _mm512_set1_ps(x); }
inline Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline Floats load(const float* at) { return _mm512_loadu_ps(at); }
inline void store(float* at, Floats x) { _mm512_storeu_ps(at, x); }

inline Floats load(const Bfloat16* at) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

inline Floats load(const Float16* at) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
}

inline Floats load(const Int8* at) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at))));
}

inline Floats load(const Float8* at) {
    const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
    const __m256i bits = _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(static_cast<short>(0xBFFF)));
    const __m256i size = _mm256_slli_epi16(wide, 9);  // without the sign
    const __mmask16 nan = _mm256_cmpeq_epi16_mask(size, _mm256_set1_epi16(static_cast<short>(0xFE00)));
    return _mm512_cvtph_ps(_mm256_mask_blend_epi16(nan, bits, _mm256_set1_epi16(0x7E00)));
}

inline Floats load(const Float8Wide* at) {
    const __m256i wide = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
    return _mm512_cvtph_ps(_mm256_slli_epi16(wide, 8));
}

inline Ints lane_numbers() { return Ints{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}; }

inline __m512 add_two(__m512 a, __m512 b) { return _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)); }

inline __m512 add_four(__m512 ab, __m512 cd) {
    const __m512d x = _mm512_castps_pd(ab), y = _mm512_castps_pd(cd);
    return _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)), _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
}

inline __m512 add_quarters(__m512 a, __m512 b) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xDD));
}

inline Floats add_across(const Floats (&x)[kLanes]) {
    Floats fours[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        fours[i] = add_four(add_two(x[4 * i], x[4 * i + 1]), add_two(x[4 * i + 2], x[4 * i + 3]));
    }
    return add_quarters(add_quarters(fours[0], fours[1]), add_quarters(fours[2], fours[3]));
}

}  // namespace
}  // namespace quintet::cpu
