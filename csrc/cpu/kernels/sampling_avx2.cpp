// Sampling with AVX2 and FMA.
#include "cpu/kernels/sampling.h"

#include <immintrin.h>

namespace quintet::cpu {
namespace {

constexpr long kLanes = 8;
using Floats = __m256;
using Ints = uint32_t __attribute__((vector_size(32)));
using Words = int32_t __attribute__((vector_size(32)));
using Halves = int16_t __attribute__((vector_size(32)));
using Doubles = double __attribute__((vector_size(64)));
using Mask = __m256;
template <int by>
struct Rotation {};

inline Floats splat(float x) { return _mm256_set1_ps(x); }
inline Floats fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
inline Floats load(const float* at) { return _mm256_loadu_ps(at); }
inline Ints lane_numbers() { return Ints{0, 1, 2, 3, 4, 5, 6, 7}; }
inline Floats larger(Floats most, Floats x) { return _mm256_max_ps(x, most); }
inline Halves larger(Halves a, Halves b) { return (Halves)_mm256_max_epi16((__m256i)a, (__m256i)b); }
inline Words larger(Words a, Words b) { return (Words)_mm256_max_epi32((__m256i)a, (__m256i)b); }

inline float largest_of(Floats x) {
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}

inline Mask no_lane() { return _mm256_setzero_ps(); }
inline Mask either(Mask a, Mask b) { return _mm256_or_ps(a, b); }
inline bool any(Mask mask) { return _mm256_movemask_ps(mask) != 0; }
inline Mask unordered(Floats a, Floats b) { return _mm256_cmp_ps(a, b, _CMP_UNORD_Q); }
inline Mask reaches(Floats x, float bar) { return _mm256_cmp_ps(x, _mm256_set1_ps(bar), _CMP_GE_OQ); }
inline Mask reaches(Ints x, uint32_t bar) { return (Mask)(x >= Ints{} + bar); }

template <int by>
inline Ints rotate(Ints x, Rotation<by>) {
    return x << by | x >> (32 - by);
}

}  // namespace
}  // namespace quintet::cpu

#include "cpu/kernels/sampling_body.h"

namespace quintet::cpu {

const SamplingKernels kSamplingAvx2 = QUINTET_SAMPLING_KERNELS;

}  // namespace quintet::cpu
