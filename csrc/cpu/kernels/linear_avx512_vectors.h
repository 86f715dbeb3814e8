// Vectors of AVX512 for linear_body.h: float32, and the halves widened to it.
#pragma once

#include "cpu/kernels/intrinsics.h"

namespace quintet::cpu {
namespace {

constexpr long kLanes = 16;
using Floats = __m512;

inline Floats zeros() { return _mm512_setzero_ps(); }
inline Floats load(const float* at) { return _mm512_loadu_ps(at); }
inline void store(float* at, Floats x) { _mm512_storeu_ps(at, x); }
inline Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }

inline void round_to_bfloat16(Floats x, uint16_t* out) {  // to nearest, ties to even
    const __m512i bits = _mm512_castps_si512(x), last = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i sum = _mm512_add_epi32(bits, _mm512_add_epi32(last, _mm512_set1_epi32(0x7FFF)));
    const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    const __m512i high = _mm512_mask_mov_epi32(_mm512_srli_epi32(sum, 16), nan, _mm512_set1_epi32(0x7FC0));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm512_cvtepi32_epi16(high));
}

inline void round_to_float16(Floats x, uint16_t* out) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

inline int both(const uint16_t* at) {
    int bits;
    __builtin_memcpy(&bits, at, sizeof bits);
    return bits;
}

struct OfFloat32 {
    using Element = float;
    using Weights = __m512;
    using Inputs = __m512;
    static constexpr long kPair = 1, kRows = 6, kVectors = 4, kAlone = 4;
    static Weights weights(const float* at) { return _mm512_loadu_ps(at); }
    static Inputs inputs(const float* at) { return _mm512_set1_ps(*at); }
    static Floats step(Floats sum, Weights w, Inputs x) { return _mm512_fmadd_ps(w, x, sum); }
    static float widened(float x) { return x; }
    static void round(Floats x, float* out) { store(out, x); }
};

struct OfFloat16 {
    using Element = uint16_t;
    using Weights = __m512;
    using Inputs = __m512;
    static constexpr long kPair = 1, kRows = 6, kVectors = 4, kAlone = 4;
    static Weights weights(const uint16_t* at) {
        return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
    }
    static Inputs inputs(const uint16_t* at) {
        return _mm512_cvtph_ps(_mm256_set1_epi16(static_cast<short>(*at)));
    }
    static Floats step(Floats sum, Weights w, Inputs x) { return _mm512_fmadd_ps(w, x, sum); }
    static float widened(uint16_t x) { return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(x))); }
    static void round(Floats x, uint16_t* out) { round_to_float16(x, out); }
};

struct Widened {
    __m512 first, second;
};

inline Widened widen_pairs(__m512i pairs) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)),
            _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(-65536)))};
}

struct OfBfloat16 {
    using Element = uint16_t;
    using Weights = Widened;
    using Inputs = Widened;
    static constexpr long kPair = 2, kRows = 4, kVectors = 4, kAlone = 4;
    static Weights weights(const uint16_t* at) { return widen_pairs(_mm512_loadu_si512(at)); }
    static Inputs inputs(const uint16_t* at) { return widen_pairs(_mm512_set1_epi32(both(at))); }
    static Floats step(Floats sum, const Weights& w, const Inputs& x) {
        return _mm512_fmadd_ps(w.second, x.second, _mm512_fmadd_ps(w.first, x.first, sum));
    }
    static float widened(uint16_t x) { return _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128(x << 16))); }
    static void round(Floats x, uint16_t* out) { round_to_bfloat16(x, out); }
};

}  // namespace
}  // namespace quintet::cpu
