// 8-bit floats widened with AVX512, and numbers for all lanes. For float8_body.h.
#pragma once

#include "cpu/kernels/float8_tables.h"
#include "cpu/kernels/vectors_avx512.h"

namespace quintet::cpu {
namespace {

inline Floats one(float x) { return splat(x); }
inline Floats one(Bfloat16 x) { return (Floats)_mm512_set1_epi32(x.bits << 16); }
inline Floats one(Float16 x) { return _mm512_cvtph_ps(_mm256_set1_epi16(static_cast<short>(x.bits))); }

template <Float8Format Format>
struct Widener {
    using Bits = Float8Bits<Format>;

    static void widen(const uint8_t* at, Ints& first, Ints& second) {
        const __m512i high = _mm512_loadu_si512(at), low = _mm512_bslli_epi128(high, 1);
        first = (Ints)normal(high);
        second = (Ints)normal(low);
        const __mmask64 tiny = _mm512_testn_epi8_mask(high, _mm512_set1_epi8(Bits::kNormal));
        if (__builtin_expect(tiny != 0, 0)) {
            first = (Ints)mended((__m512i)first, high);
            second = (Ints)mended((__m512i)second, low);
        }
    }

private:
    static __m512i words(int x) { return _mm512_set1_epi16(static_cast<short>(x)); }

    // Of the high bytes of words.
    static __m512i normal(__m512i x) {
        const __m512i kept = _mm512_and_si512(_mm512_srai_epi16(x, Bits::kShift), words(Bits::kKept));
        return _mm512_add_epi16(kept, words(Bits::kAdded));
    }

    static __m512i mended(__m512i wide, __m512i x) {
        const __mmask32 tiny = _mm512_testn_epi16_mask(x, words(Bits::kNormal << 8));
        const __m512i known = _mm512_permutexvar_epi16(_mm512_srli_epi16(x, 8), _mm512_load_si512(kKnown<Format>.bits));
        const __m512i sign = _mm512_and_si512(x, words(0x8000));
        return _mm512_mask_mov_epi16(wide, tiny, _mm512_or_si512(known, sign));
    }
};

}  // namespace
}  // namespace quintet::cpu
