// Products with 8-bit floats by AVX2, FMA and F16C.
#include "cpu/kernels/float8_tables.h"
#include "cpu/kernels/vectors_avx2.h"

namespace quintet::cpu {
namespace {

inline Floats one(float x) { return splat(x); }
inline Floats one(Bfloat16 x) { return (Floats)_mm256_set1_epi32(x.bits << 16); }
inline Floats one(Float16 x) { return _mm256_cvtph_ps(_mm_set1_epi16(static_cast<short>(x.bits))); }

template <Float8Format Format>
struct Widener {
    using Bits = Float8Bits<Format>;

    static void widen(const uint8_t* at, Ints& first, Ints& second) {
        const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)), low = _mm256_bslli_epi128(high, 1);
        first = (Ints)normal(high);
        second = (Ints)normal(low);
        const __m256i size = _mm256_and_si256(high, _mm256_set1_epi8(Bits::kNormal));
        if (__builtin_expect(_mm256_movemask_epi8(_mm256_cmpeq_epi8(size, _mm256_setzero_si256())) != 0, 0)) {
            first = (Ints)mended((__m256i)first, high);
            second = (Ints)mended((__m256i)second, low);
        }
    }

private:
    static __m256i words(int x) { return _mm256_set1_epi16(static_cast<short>(x)); }

    // Of the high bytes of words.
    static __m256i normal(__m256i x) {
        const __m256i kept = _mm256_and_si256(_mm256_srai_epi16(x, Bits::kShift), words(Bits::kKept));
        return _mm256_add_epi16(kept, words(Bits::kAdded));
    }

    // At most eight numbers are looked up, by the low bytes of words: bytes beyond give zeros.
    static __m256i mended(__m256i wide, __m256i x) {
        const __m256i size = _mm256_and_si256(x, words(Bits::kNormal << 8));
        const __m256i tiny = _mm256_cmpeq_epi16(size, _mm256_setzero_si256());
        const __m256i at = _mm256_and_si256(_mm256_srli_epi16(x, 7), words(0x0E));  // of the first of two bytes
        const __m256i both = _mm256_or_si256(_mm256_or_si256(at, _mm256_slli_epi16(at, 8)), words(0x0100));
        const __m256i table = _mm256_broadcastsi128_si256(
            _mm_load_si128(reinterpret_cast<const __m128i*>(kKnown<Format>.bits)));
        const __m256i known = _mm256_or_si256(_mm256_shuffle_epi8(table, both), _mm256_and_si256(x, words(0x8000)));
        return _mm256_blendv_epi8(wide, known, tiny);
    }
};

}  // namespace
}  // namespace quintet::cpu

#include "cpu/kernels/float8_body.h"

namespace quintet::cpu {

constexpr Float8Kernels kFloat8Avx2 =
    float8_kernels<Singly<float, 4, 2, 1>, Singly<Bfloat16, 4, 2, 1>, Singly<Float16, 4, 2, 1>>();

}  // namespace quintet::cpu
