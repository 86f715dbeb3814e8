// Vectors of AVX512: float32 in registers, float32, bfloat16 and float16 in memory.
#pragma once

#include "cpu/kernels/intrinsics.h"

#include "cpu/kernels/vectors_types.h"

namespace quintet::cpu {
namespace {

constexpr long kLanes = 16;
using Floats = __m512;
using Ints = uint32_t __attribute__((vector_size(64)));

inline Floats rounded(Floats x, Bfloat16);

inline Floats splat(float x) { return _mm512_set1_ps(x); }
inline Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline float square_root(float x) { return _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(x))); }

// Halves added to each other until one number is left.
inline float sum_across(Floats x) {
    const __m256 upper = _mm512_extractf32x8_ps(x, 1), eight = _mm256_add_ps(_mm512_castps512_ps256(x), upper);
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

inline Floats load(const float* at) { return _mm512_loadu_ps(at); }
inline Floats load(const Bfloat16* at) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}
inline Floats load(const Float16* at) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
}

inline __m256i to_float16(Floats x) { return _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

inline Floats rounded(Floats x, Float16) { return _mm512_cvtph_ps(to_float16(x)); }

inline void store(float* at, Floats x) { _mm512_storeu_ps(at, x); }
// Past the caches, to an address that is a whole number of vectors; settled() comes before another thread reads it.
inline void stream(float* at, Floats x) { _mm512_stream_ps(at, x); }
inline void settled() { _mm_sfence(); }
inline void store(Bfloat16* at, Floats x) {
    const __m512i high = _mm512_srli_epi32(_mm512_castps_si512(rounded(x, Bfloat16{})), 16);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(at), _mm512_cvtepi32_epi16(high));
}
inline void store(Float16* at, Floats x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(at), to_float16(x)); }

}  // namespace
}  // namespace quintet::cpu

#include "cpu/kernels/vectors_body.h"
