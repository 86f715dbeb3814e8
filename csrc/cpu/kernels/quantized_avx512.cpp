// Quantized products with AVX512, without its byte products.
#include "cpu/kernels/quantized.h"
#include "cpu/kernels/quantized_avx512_vectors.h"

namespace quintet::cpu {
namespace {

constexpr long kWordRows = 4, kWordPairs = 2, kWordAlone = 2, kWordFew = 4, kWordSums = 16;
using Bytes = __m512i;
using Sums = uint32_t __attribute__((vector_size(64)));  // they may wrap around

inline Bytes load_bytes(const uint8_t* at) { return _mm512_loadu_si512(at); }
inline Ints even_words(Bytes x) { return _mm512_and_si512(x, _mm512_set1_epi16(0xFF)); }
inline Ints odd_words(Bytes x) { return _mm512_srli_epi16(x, 8); }
inline Ints low_even(Bytes x) { return _mm512_and_si512(x, _mm512_set1_epi16(15)); }
inline Ints low_odd(Bytes x) { return low_even(_mm512_srli_epi16(x, 8)); }
inline Ints high_even(Bytes x) { return low_even(_mm512_srli_epi16(x, 4)); }
inline Ints high_odd(Bytes x) { return _mm512_srli_epi16(x, 12); }
inline Bytes lower(Bytes x, int bits) { return _mm512_srl_epi16(x, _mm_cvtsi32_si128(bits)); }
template <int Bits>
inline Bytes low_with(Bytes low, Bytes above) {
    const Bytes more = _mm512_and_si512(_mm512_slli_epi16(above, 4), _mm512_set1_epi8(bits_above_four<Bits>));
    return _mm512_or_si512(_mm512_and_si512(low, _mm512_set1_epi8(15)), more);
}
template <int Bits>
inline Bytes high_with(Bytes high, Bytes above) {
    return low_with<Bits>(_mm512_srli_epi16(high, 4), _mm512_srli_epi16(above, Bits));
}
using Table = __m512i;
inline Table table_at(const uint8_t* at) {
    return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
}
inline Bytes low_found(Table table, Bytes x) {
    return _mm512_shuffle_epi8(table, _mm512_and_si512(x, _mm512_set1_epi8(15)));
}
inline Bytes high_found(Table table, Bytes x) { return low_found(table, _mm512_srli_epi16(x, 4)); }
inline Sums add_products(Sums sum, Ints a, Ints b) { return sum + (Sums)_mm512_madd_epi16(a, b); }

inline Bytes low_four(Bytes x) { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }
inline Bytes high_four(Bytes x) { return low_four(_mm512_srli_epi16(x, 4)); }
template <int Bits>
inline Bytes bits_above(Bytes x, int height) {
    const Bytes moved = height < 4   ? _mm512_sll_epi16(x, _mm_cvtsi32_si128(4 - height))
                        : height > 4 ? _mm512_srl_epi16(x, _mm_cvtsi32_si128(height - 4))
                                     : x;
    return _mm512_and_si512(moved, _mm512_set1_epi8(bits_above_four<Bits>));
}
using Halfwords = __m512i;
inline Halfwords add_byte_products(Halfwords sum, Bytes w, Ints x) {
    sum = _mm512_add_epi16(sum, _mm512_maddubs_epi16(w, x));
    __asm__("" ::"v"(sum));  // a use, or GCC keeps all products of a part, to add them up in another order
    return sum;
}
inline Sums add_pairs(Sums sum, Halfwords x) { return sum + (Sums)_mm512_madd_epi16(x, _mm512_set1_epi16(1)); }
inline void put_bytes(Ints x, uint8_t* at) { _mm_storeu_si128(reinterpret_cast<__m128i*>(at), _mm512_cvtepi32_epi8(x)); }

inline void put_words(Ints x, uint8_t* at) {
    const __m256i words = _mm512_cvtepi32_epi16(x);
    constexpr int kEvenFirst = _MM_SHUFFLE(3, 1, 2, 0);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(at),
                        _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(words, kEvenFirst), kEvenFirst));
}

}  // namespace
}  // namespace quintet::cpu

#include "cpu/kernels/quantized_body.h"
#include "cpu/kernels/quantized_byte_pairs.h"
#include "cpu/kernels/quantized_words.h"

namespace quintet::cpu {

constexpr QuantizedKernels kQuantizedAvx512 = quantized_kernels<Words, Words, BytePairs>();

}  // namespace quintet::cpu
