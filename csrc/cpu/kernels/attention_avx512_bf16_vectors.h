// Vectors of AVX512 with its products of bfloat16 in pairs, for attention_body.h.
#pragma once

#include "cpu/kernels/attention_avx512_vectors.h"

#define QUINTET_DOT

namespace quintet::cpu {
namespace {

using Pairs = __m512bh;

inline Pairs load_pairs(const Bfloat16* at) { return (Pairs)_mm512_loadu_si512(at); }
inline void store_pairs(Bfloat16* at, Pairs x) { _mm512_storeu_si512(at, (__m512i)x); }
inline Floats dot(Floats sum, Pairs a, Pairs b) { return _mm512_dpbf16_ps(sum, a, b); }

inline Pairs splat_pair(const Bfloat16* at) {
    int32_t both;
    __builtin_memcpy(&both, at, sizeof both);
    return (Pairs)_mm512_set1_epi32(both);
}

inline Pairs splat_ones() { return (Pairs)_mm512_set1_epi16(0x3F80); }
inline Pairs narrow_both(Floats low, Floats high) { return _mm512_cvtne2ps_pbh(high, low); }
inline float largest_quickly(Floats x) { return _mm512_reduce_max_ps(x); }
inline float sum_quickly(Floats x) { return _mm512_reduce_add_ps(x); }

// Pairs of an element of `even` and the same of `odd`.
inline void interleave(const Bfloat16* even, const Bfloat16* odd, Pairs& low, Pairs& high) {
    const Ints both = lane_numbers() * 0x10001 + (32 << 16);
    const __m512i a = _mm512_loadu_si512(even), b = _mm512_loadu_si512(odd);
    low = (Pairs)_mm512_permutex2var_epi16(a, (__m512i)both, b);
    high = (Pairs)_mm512_permutex2var_epi16(a, (__m512i)(both + 0x100010), b);
}

inline bool all_finite(Pairs x) {
    const __m512i power = _mm512_set1_epi16(0x7F80);
    return _mm512_cmpeq_epi16_mask(_mm512_and_si512((__m512i)x, power), power) == 0;
}

// Sixteen rows' pairs from `at` on become sixteen rows of the i-th pair of each, `stride` elements apart.
inline void turn(const Bfloat16* const* from, long at, Bfloat16* to, long stride) {
    __m512i a[16], b[16];
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        const __m512i even = _mm512_loadu_si512(from[i] + at), odd = _mm512_loadu_si512(from[i + 1] + at);
        a[i] = _mm512_unpacklo_epi32(even, odd);
        a[i + 1] = _mm512_unpackhi_epi32(even, odd);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
        b[i] = _mm512_unpacklo_epi64(a[i], a[i + 2]);
        b[i + 1] = _mm512_unpackhi_epi64(a[i], a[i + 2]);
        b[i + 2] = _mm512_unpacklo_epi64(a[i + 1], a[i + 3]);
        b[i + 3] = _mm512_unpackhi_epi64(a[i + 1], a[i + 3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {  // quarter q of b[i], of b[4 + i] ...: column 4q + i
        const __m512i low = _mm512_shuffle_i32x4(b[i], b[4 + i], 0x44);
        const __m512i high = _mm512_shuffle_i32x4(b[i], b[4 + i], 0xEE);
        const __m512i low2 = _mm512_shuffle_i32x4(b[8 + i], b[12 + i], 0x44);
        const __m512i high2 = _mm512_shuffle_i32x4(b[8 + i], b[12 + i], 0xEE);
        _mm512_storeu_si512(to + i * stride, _mm512_shuffle_i32x4(low, low2, 0x88));
        _mm512_storeu_si512(to + (4 + i) * stride, _mm512_shuffle_i32x4(low, low2, 0xDD));
        _mm512_storeu_si512(to + (8 + i) * stride, _mm512_shuffle_i32x4(high, high2, 0x88));
        _mm512_storeu_si512(to + (12 + i) * stride, _mm512_shuffle_i32x4(high, high2, 0xDD));
    }
}

// e**x for x <= 0, to 2**-18 of it: it is rounded to 2**-9. 2**-127, which that makes 0, below -88.
inline Floats coarse_exp_of(Floats x) {
    const Floats power = _mm512_max_ps(splat(-127.0F), x * 1.44269504F);  // NaN stays
    const Floats whole = _mm512_roundscale_ps(power, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const Floats rest = power - whole;
    Floats sum = splat(9.5828532e-3F);
    sum = fma(sum, rest, splat(5.5906425e-2F));
    sum = fma(sum, rest, splat(2.4024099e-1F));
    sum = fma(sum, rest, splat(6.9312419e-1F));
    return _mm512_scalef_ps(fma(sum, rest, splat(1.0F)), whole);
}

}  // namespace
}  // namespace quintet::cpu
