// Linear with AVX2, FMA and F16C.
#include "cpu/kernels/linear.h"

#include <immintrin.h>

namespace quintet::cpu {
namespace {

constexpr long kLanes = 8;
using Floats = __m256;

inline Floats zeros() { return _mm256_setzero_ps(); }
inline Floats load(const float* at) { return _mm256_loadu_ps(at); }
inline void store(float* at, Floats x) { _mm256_storeu_ps(at, x); }
inline Floats add(Floats a, Floats b) { return _mm256_add_ps(a, b); }

inline void round_to_bfloat16(Floats x, uint16_t* out) {  // to nearest, ties to even
    const __m256i bits = _mm256_castps_si256(x), last = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i sum = _mm256_add_epi32(bits, _mm256_add_epi32(last, _mm256_set1_epi32(0x7FFF)));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    const __m256i high = _mm256_blendv_epi8(_mm256_srli_epi32(sum, 16), _mm256_set1_epi32(0x7FC0), nan);
    const __m128i halves = _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), halves);
}

inline void round_to_float16(Floats x, uint16_t* out) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}

struct OfFloat32 {
    using Element = float;
    using Weights = __m256;
    using Inputs = __m256;
    static constexpr long kPair = 1, kRows = 6, kVectors = 2, kAlone = 8;
    static Weights weights(const float* at) { return _mm256_loadu_ps(at); }
    static Inputs inputs(const float* at) { return _mm256_set1_ps(*at); }
    static Floats step(Floats sum, Weights w, Inputs x) { return _mm256_fmadd_ps(w, x, sum); }
    static float widened(float x) { return x; }
    static void round(Floats x, float* out) { store(out, x); }
};

struct OfFloat16 {
    using Element = uint16_t;
    using Weights = __m256;
    using Inputs = __m256;
    static constexpr long kPair = 1, kRows = 6, kVectors = 2, kAlone = 8;
    static Weights weights(const uint16_t* at) {
        return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
    }
    static Inputs inputs(const uint16_t* at) { return _mm256_cvtph_ps(_mm_set1_epi16(static_cast<short>(*at))); }
    static Floats step(Floats sum, Weights w, Inputs x) { return _mm256_fmadd_ps(w, x, sum); }
    static float widened(uint16_t x) { return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(x))); }
    static void round(Floats x, uint16_t* out) { round_to_float16(x, out); }
};

struct Widened {
    __m256 first, second;
};

inline Widened widen_pairs(__m256i pairs) {
    return {_mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)),
            _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(-65536)))};
}

struct OfBfloat16 {
    using Element = uint16_t;
    using Weights = Widened;
    using Inputs = Widened;
    static constexpr long kPair = 2, kRows = 4, kVectors = 2, kAlone = 8;
    static Weights weights(const uint16_t* at) {
        return widen_pairs(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
    }
    static Inputs inputs(const uint16_t* at) {
        int bits;
        __builtin_memcpy(&bits, at, sizeof bits);
        return widen_pairs(_mm256_set1_epi32(bits));
    }
    static Floats step(Floats sum, const Weights& w, const Inputs& x) {
        return _mm256_fmadd_ps(w.second, x.second, _mm256_fmadd_ps(w.first, x.first, sum));
    }
    static float widened(uint16_t x) { return _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128(x << 16))); }
    static void round(Floats x, uint16_t* out) { round_to_bfloat16(x, out); }
};

}  // namespace
}  // namespace quintet::cpu

#include "cpu/kernels/linear_body.h"

namespace quintet::cpu {

const LinearKernels kLinearAvx2 = {{multiply<OfFloat32>, multiply<OfBfloat16>, multiply<OfFloat16>}};

}  // namespace quintet::cpu
