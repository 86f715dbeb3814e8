// Vectors of AVX2, FMA and F16C: float32 in registers, float32, bfloat16 and float16 in memory.
#pragma once

#include <immintrin.h>

#include "cpu/kernels/vectors_types.h"

namespace quintet::cpu {
namespace {

constexpr long kLanes = 8;
using Floats = __m256;
using Ints = uint32_t __attribute__((vector_size(32)));

inline Floats rounded(Floats x, Bfloat16);

inline Floats splat(float x) { return _mm256_set1_ps(x); }
inline Floats fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
inline float square_root(float x) { return _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(x))); }

// Halves added to each other until one number is left.
inline float sum_across(Floats x) {
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

inline Floats load(const float* at) { return _mm256_loadu_ps(at); }
inline Floats load(const Bfloat16* at) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}
inline Floats load(const Float16* at) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at))); }

inline __m128i to_float16(Floats x) { return _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT); }

inline Floats rounded(Floats x, Float16) { return _mm256_cvtph_ps(to_float16(x)); }

inline void store(float* at, Floats x) { _mm256_storeu_ps(at, x); }
// Past the caches, to an address that is a whole number of vectors; settled() comes before another thread reads it.
inline void stream(float* at, Floats x) { _mm256_stream_ps(at, x); }
inline void settled() { _mm_sfence(); }
inline void store(Bfloat16* at, Floats x) {
    const __m256i high = _mm256_srli_epi32(_mm256_castps_si256(rounded(x, Bfloat16{})), 16);
    const __m128i halves = _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(at), halves);
}
inline void store(Float16* at, Floats x) { _mm_storeu_si128(reinterpret_cast<__m128i*>(at), to_float16(x)); }

}  // namespace
}  // namespace quintet::cpu

#include "cpu/kernels/vectors_body.h"
