// Attention with AVX2, FMA and F16C.
#include "cpu/kernels/attention.h"

#include <immintrin.h>

#include "cpu/kernels/attention_types.h"

namespace quintet::cpu {
namespace {

constexpr long kLanes = 8;
constexpr long kTile = 8;  // of sixteen registers
using Floats = __m256;
using Ints = uint32_t __attribute__((vector_size(32)));

inline Floats splat(float x) { return _mm256_set1_ps(x); }
inline Floats fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
inline Floats load(const float* at) { return _mm256_loadu_ps(at); }
inline void store(float* at, Floats x) { _mm256_storeu_ps(at, x); }

inline Floats load(const Bfloat16* at) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}

inline Floats load(const Float16* at) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at))); }

inline Floats load(const Int8* at) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(at))));
}

inline Floats load(const Float8* at) {
    const __m128i wide = _mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(at)));
    const __m128i bits = _mm_and_si128(_mm_slli_epi16(wide, 7), _mm_set1_epi16(static_cast<short>(0xBFFF)));
    const __m128i size = _mm_slli_epi16(wide, 9);  // without the sign
    const __m128i nan = _mm_cmpeq_epi16(size, _mm_set1_epi16(static_cast<short>(0xFE00)));
    return _mm256_cvtph_ps(_mm_or_si128(bits, _mm_and_si128(nan, _mm_set1_epi16(0x7E00))));
}

inline Floats load(const Float8Wide* at) {
    const __m128i wide = _mm_cvtepu8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(at)));
    return _mm256_cvtph_ps(_mm_slli_epi16(wide, 8));
}

inline Ints lane_numbers() { return Ints{0, 1, 2, 3, 4, 5, 6, 7}; }

inline __m256 add_two(__m256 a, __m256 b) { return _mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b)); }

inline __m256 add_four(__m256 ab, __m256 cd) {
    const __m256d x = _mm256_castps_pd(ab), y = _mm256_castps_pd(cd);
    return _mm256_add_ps(_mm256_castpd_ps(_mm256_unpacklo_pd(x, y)), _mm256_castpd_ps(_mm256_unpackhi_pd(x, y)));
}

inline Floats add_across(const Floats (&x)[kLanes]) {
    const __m256 low = add_four(add_two(x[0], x[1]), add_two(x[2], x[3]));
    const __m256 high = add_four(add_two(x[4], x[5]), add_two(x[6], x[7]));
    return _mm256_add_ps(_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31));
}

}  // namespace
}  // namespace quintet::cpu

#include "cpu/kernels/attention_body.h"

namespace quintet::cpu {

const AttentionKernels kAttentionAvx2 = QUINTET_ATTENTION_KERNELS;

}  // namespace quintet::cpu
