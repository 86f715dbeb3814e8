// Quantized products with AVX2, FMA and F16C.
#include "cpu/kernels/quantized.h"
#include "cpu/kernels/quantized_avx2_vectors.h"

namespace quintet::cpu {
namespace {

constexpr long kWordRows = 4, kWordPairs = 1, kWordAlone = 4, kWordFew = 4, kWordSums = 8;
constexpr long kSignedRows = 2, kSignedPairs = 2;
using Bytes = __m256i;
using Sums = uint32_t __attribute__((vector_size(32)));  // they may wrap around

inline int32_t quad_at(const uint8_t* at) {
    int32_t bits;
    __builtin_memcpy(&bits, at, sizeof bits);
    return bits;
}

inline Bytes load_bytes(const uint8_t* at) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)); }
inline Ints even_words(Bytes x) { return _mm256_and_si256(x, _mm256_set1_epi16(0xFF)); }
inline Ints odd_words(Bytes x) { return _mm256_srli_epi16(x, 8); }
inline Ints low_even(Bytes x) { return _mm256_and_si256(x, _mm256_set1_epi16(15)); }
inline Ints low_odd(Bytes x) { return low_even(_mm256_srli_epi16(x, 8)); }
inline Ints high_even(Bytes x) { return low_even(_mm256_srli_epi16(x, 4)); }
inline Ints high_odd(Bytes x) { return _mm256_srli_epi16(x, 12); }
inline Bytes lower(Bytes x, int bits) { return _mm256_srl_epi16(x, _mm_cvtsi32_si128(bits)); }
template <int Bits>
inline Bytes low_with(Bytes low, Bytes above) {
    const Bytes more = _mm256_and_si256(_mm256_slli_epi16(above, 4), _mm256_set1_epi8(bits_above_four<Bits>));
    return _mm256_or_si256(_mm256_and_si256(low, _mm256_set1_epi8(15)), more);
}
template <int Bits>
inline Bytes high_with(Bytes high, Bytes above) {
    return low_with<Bits>(_mm256_srli_epi16(high, 4), _mm256_srli_epi16(above, Bits));
}
using Table = __m256i;
inline Table table_at(const uint8_t* at) {
    return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
}
inline Bytes low_found(Table table, Bytes x) {
    return _mm256_shuffle_epi8(table, _mm256_and_si256(x, _mm256_set1_epi8(15)));
}
inline Bytes high_found(Table table, Bytes x) { return low_found(table, _mm256_srli_epi16(x, 4)); }
inline Sums add_products(Sums sum, Ints a, Ints b) { return sum + (Sums)_mm256_madd_epi16(a, b); }

inline Bytes low_four(Bytes x) { return _mm256_and_si256(x, _mm256_set1_epi8(15)); }
inline Bytes high_four(Bytes x) { return low_four(_mm256_srli_epi16(x, 4)); }
template <int Bits>
inline Bytes bits_above(Bytes x, int height) {
    const Bytes moved = height < 4 ? _mm256_slli_epi16(x, 4 - height) : height > 4 ? _mm256_srli_epi16(x, height - 4) : x;
    return _mm256_and_si256(moved, _mm256_set1_epi8(bits_above_four<Bits>));
}
using Halfwords = __m256i;
inline Halfwords add_byte_products(Halfwords sum, Bytes w, Ints x) {
    sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(w, x));
    __asm__("" ::"x"(sum));  // a use, or GCC keeps all products of a part, to add them up in another order
    return sum;
}
inline Sums add_pairs(Sums sum, Halfwords x) { return sum + (Sums)_mm256_madd_epi16(x, _mm256_set1_epi16(1)); }
inline Bytes flip_bits(Bytes w, Ints flips) { return _mm256_xor_si256(w, flips); }
inline Halfwords product_pairs(Ints x, Bytes w) { return _mm256_maddubs_epi16(x, w); }
inline void put_flipped(Ints x, uint8_t* at) {
    const __m256i flips = _mm256_add_epi32(_mm256_set1_epi32(128), _mm256_srai_epi32(x, 31));  // 127 for what is negative
    const __m256i words = _mm256_packs_epi32(_mm256_abs_epi32(x), flips), quads = _mm256_packus_epi16(words, words);
    const __m128i both = _mm_unpacklo_epi64(_mm256_castsi256_si128(quads), _mm256_extracti128_si256(quads, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(at), both);
}
inline void put_bytes(Ints x, uint8_t* at) {
    const __m256i words = _mm256_packs_epi32(x, x), bytes = _mm256_packs_epi16(words, words);
    const __m128i both = _mm_unpacklo_epi32(_mm256_castsi256_si128(bytes), _mm256_extracti128_si256(bytes, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(at), both);
}

inline void put_words(Ints x, uint8_t* at) {
    constexpr int kEvenFirst = _MM_SHUFFLE(3, 1, 2, 0);
    const __m256i words = _mm256_shufflelo_epi16(_mm256_packs_epi32(x, x), kEvenFirst);
    const __m256i quads = _mm256_permute4x64_epi64(words, _MM_SHUFFLE(3, 1, 2, 0));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(at), _mm256_castsi256_si128(quads));
}

}  // namespace
}  // namespace quintet::cpu

#include "cpu/kernels/quantized_body.h"
#include "cpu/kernels/quantized_byte_pairs.h"
#include "cpu/kernels/quantized_signed_bytes.h"
#include "cpu/kernels/quantized_words.h"

namespace quintet::cpu {

constexpr QuantizedKernels kQuantizedAvx2 = quantized_kernels<Words, SignedBytes, BytePairs>();

}  // namespace quintet::cpu
