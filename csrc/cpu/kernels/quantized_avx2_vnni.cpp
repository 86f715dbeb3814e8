// Quantized products with AVX2 and AVX-VNNI, four products of bytes at once: rows in 8 bits. Rows in 16 bits, and what
// begins and ends a product, are AVX2's.
#include "cpu/kernels/quantized.h"
#include "cpu/kernels/quantized_avx2_vectors.h"

namespace quintet::cpu {
namespace {

using Sums = int32_t __attribute__((vector_size(32)));

inline int32_t quad_at(const uint8_t* at) {
    int32_t bits;
    __builtin_memcpy(&bits, at, sizeof bits);
    return bits;
}

// Twelve sums, two vectors of weights and one of inputs are in the sixteen registers.
struct OneByte {
    static constexpr long kBytes = 4, kRows = 6, kPairs = 1, kAlone = 4, kFew = 4, kSums = 12;
    using Sum = Sums;
    using Part = Sum;
    using Weights = __m256i;
    using Inputs = __m256i;
    static Weights weights(const uint8_t* at) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)); }
    static void weights_of_nibbles(const uint8_t* at, Weights (&w)[2]) {
        const __m256i bytes = weights(at), low = _mm256_set1_epi8(15);
        w[0] = _mm256_and_si256(bytes, low);
        w[1] = _mm256_and_si256(_mm256_srli_epi16(bytes, 4), low);
    }
    template <int Bits>
    static void weights_with(const uint8_t* at, const uint8_t* plane, int height, Weights (&w)[2]) {
        const __m256i both = _mm256_srl_epi16(weights(plane), _mm_cvtsi32_si128(height));
        const __m256i above = _mm256_set1_epi8(bits_above_four<Bits>);
        weights_of_nibbles(at, w);
        w[0] = _mm256_or_si256(w[0], _mm256_and_si256(_mm256_slli_epi16(both, 4), above));
        w[1] = _mm256_or_si256(w[1], _mm256_and_si256(_mm256_slli_epi16(both, 4 - Bits), above));
    }
    using Table = __m256i;
    static Table table(const uint8_t* at) {
        return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
    }
    static void weights_of_table(const uint8_t* at, const Table& table, Weights (&w)[2]) {
        weights_of_nibbles(at, w);
        w[0] = _mm256_shuffle_epi8(table, w[0]);
        w[1] = _mm256_shuffle_epi8(table, w[1]);
    }
    static Inputs inputs(const uint8_t* at) { return ints(quad_at(at)); }
    static Sum start(int32_t x) { return (Sum)ints(x); }
    static Sum resume(Floats x) { return (Sum)x; }
    static void step(Sum& sum, Weights w, Inputs x) { sum = (Sum)_mm256_dpbusd_avx_epi32((__m256i)sum, w, x); }
    static Ints total(Sum sum) { return (Ints)sum; }
    static void put(Ints x, uint8_t* at) {
        const __m256i words = _mm256_packs_epi32(x, x), bytes = _mm256_packs_epi16(words, words);
        const __m128i both = _mm_unpacklo_epi32(_mm256_castsi256_si128(bytes), _mm256_extracti128_si256(bytes, 1));
        _mm_storel_epi64(reinterpret_cast<__m128i*>(at), both);
    }
};

}  // namespace
}  // namespace quintet::cpu

#include "cpu/kernels/quantized_body.h"

namespace quintet::cpu {

constexpr QuantizedKernels kQuantizedAvx2Vnni = kernels_of_bytes<OneByte>();

}  // namespace quintet::cpu
