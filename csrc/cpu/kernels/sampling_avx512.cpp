// Sampling with AVX-512 (F, BW, DQ, VL).
#include "cpu/kernels/sampling.h"

#include "cpu/kernels/intrinsics.h"

namespace quintet::cpu {
namespace {

constexpr long kLanes = 16;
using Floats = __m512;
using Ints = uint32_t __attribute__((vector_size(64)));
using Words = int32_t __attribute__((vector_size(64)));
using Halves = int16_t __attribute__((vector_size(64)));
using Doubles = double __attribute__((vector_size(128)));
using Mask = __mmask16;
template <int by>
struct Rotation {};

inline Floats splat(float x) { return _mm512_set1_ps(x); }
inline Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline Floats load(const float* at) { return _mm512_loadu_ps(at); }
inline Ints lane_numbers() { return Ints{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}; }
inline Floats larger(Floats most, Floats x) { return _mm512_max_ps(x, most); }
inline Halves larger(Halves a, Halves b) { return (Halves)_mm512_max_epi16((__m512i)a, (__m512i)b); }
inline Words larger(Words a, Words b) { return (Words)_mm512_max_epi32((__m512i)a, (__m512i)b); }
inline float largest_of(Floats x) { return _mm512_reduce_max_ps(x); }

inline Mask no_lane() { return 0; }
inline Mask either(Mask a, Mask b) { return _kor_mask16(a, b); }
inline bool any(Mask mask) { return mask != 0; }
inline Mask unordered(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q); }
inline Mask reaches(Floats x, float bar) { return _mm512_cmp_ps_mask(x, _mm512_set1_ps(bar), _CMP_GE_OQ); }
inline Mask reaches(Ints x, uint32_t bar) {
    return _mm512_cmpge_epu32_mask((__m512i)x, _mm512_set1_epi32(static_cast<int>(bar)));
}

template <int by>
inline Ints rotate(Ints x, Rotation<by>) {
    return (Ints)_mm512_rol_epi32((__m512i)x, by);
}

}  // namespace
}  // namespace quintet::cpu

#include "cpu/kernels/sampling_body.h"

namespace quintet::cpu {

const SamplingKernels kSamplingAvx512 = QUINTET_SAMPLING_KERNELS;

}  // namespace quintet::cpu
