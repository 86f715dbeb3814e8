// Vectors of AVX2, FMA and F16C for quantized_body.h and quantized_pack_body.h.
#pragma once

#include <immintrin.h>
#include <stdint.h>

namespace quintet::cpu {
namespace {

constexpr long kLanes = 8;
using Floats = __m256;
using Ints = __m256i;

inline Floats zeros() { return _mm256_setzero_ps(); }
inline Floats splat(float x) { return _mm256_set1_ps(x); }
inline Floats load(const float* at) { return _mm256_loadu_ps(at); }
inline void store(float* at, Floats x) { _mm256_storeu_ps(at, x); }
inline Floats add(Floats a, Floats b) { return _mm256_add_ps(a, b); }
inline Floats sub(Floats a, Floats b) { return _mm256_sub_ps(a, b); }
inline Floats mul(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
inline Floats fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
inline Floats to_floats(Ints x) { return _mm256_cvtepi32_ps(x); }
inline Floats as_floats(Ints x) { return _mm256_castsi256_ps(x); }
inline Ints as_ints(Floats x) { return _mm256_castps_si256(x); }
inline Ints rounded(Floats x) { return _mm256_cvtps_epi32(x); }  // ties to even
inline Ints ints(int32_t x) { return _mm256_set1_epi32(x); }
inline Ints add_ints(Ints a, Ints b) { return _mm256_add_epi32(a, b); }
inline Ints larger(Ints a, Ints b) { return _mm256_max_epi32(a, b); }
inline Ints smaller(Ints a, Ints b) { return _mm256_min_epi32(a, b); }
[[maybe_unused]] inline int32_t highest_lane(Ints x) {
    __m128i most = _mm_max_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    most = _mm_max_epi32(most, _mm_shuffle_epi32(most, _MM_SHUFFLE(1, 0, 3, 2)));
    return _mm_cvtsi128_si32(_mm_max_epi32(most, _mm_shuffle_epi32(most, _MM_SHUFFLE(2, 3, 0, 1))));
}
[[maybe_unused]] inline int32_t sum_of_lanes(Ints x) {
    __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, _MM_SHUFFLE(1, 0, 3, 2)));
    return _mm_cvtsi128_si32(_mm_add_epi32(sum, _mm_shuffle_epi32(sum, _MM_SHUFFLE(2, 3, 0, 1))));
}
inline Ints magnitude_bits(Floats x) { return _mm256_and_si256(as_ints(x), ints(0x7FFFFFFF)); }
inline void store_ints(int32_t* at, Ints x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(at), x); }
inline __m128i load_halves(const uint16_t* at) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(at)); }
inline Floats widen_half(const uint16_t* at) { return _mm256_cvtph_ps(load_halves(at)); }
inline Floats widen_bytes(const uint8_t* at) {
    return to_floats(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(at))));
}
[[maybe_unused]] inline Floats widen_signed(const int8_t* at) {
    return to_floats(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(at))));
}
inline uint16_t half_of(float x) { return static_cast<uint16_t>(_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT)); }
inline float float_of(uint16_t x) { return _cvtsh_ss(x); }

inline void store_bytes(uint8_t* at, Ints x) {  // each 0..255
    const __m256i words = _mm256_packs_epi32(x, x), bytes = _mm256_packus_epi16(words, words);
    const __m128i both = _mm_unpacklo_epi32(_mm256_castsi256_si128(bytes), _mm256_extracti128_si256(bytes, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(at), both);
}

struct Singles {
    using Element = float;
    static Floats widen(const float* at) { return load(at); }
    static void round(Floats x, float* out) { store(out, x); }
};

struct Brains {
    using Element = uint16_t;
    static Floats widen(const uint16_t* at) {
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_halves(at)), 16));
    }
    static void round(Floats x, uint16_t* out) {  // to nearest, ties to even
        const __m256i bits = as_ints(x), last = _mm256_and_si256(_mm256_srli_epi32(bits, 16), ints(1));
        const __m256i sum = _mm256_add_epi32(bits, _mm256_add_epi32(last, ints(0x7FFF)));
        const __m256i nan = as_ints(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
        const __m256i high = _mm256_blendv_epi8(_mm256_srli_epi32(sum, 16), ints(0x7FC0), nan);
        const __m128i halves = _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(out), halves);
    }
};

struct Halves {
    using Element = uint16_t;
    static Floats widen(const uint16_t* at) { return widen_half(at); }
    static void round(Floats x, uint16_t* out) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
    }
};

}  // namespace
}  // namespace quintet::cpu
