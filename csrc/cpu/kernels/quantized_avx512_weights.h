// Weights of a block as bytes without a sign, by AVX512, for the cores of quantized_body.h.
#pragma once

#include "cpu/kernels/quantized.h"
#include "cpu/kernels/quantized_avx512_vectors.h"

namespace quintet::cpu {
namespace {

struct ByteWeights {
    using Weights = __m512i;
    static Weights weights(const uint8_t* at) { return _mm512_loadu_si512(at); }
    static void weights_of_nibbles(const uint8_t* at, Weights (&w)[2]) {
        const __m512i bytes = _mm512_loadu_si512(at), low = _mm512_set1_epi8(15);
        w[0] = _mm512_and_si512(bytes, low);
        w[1] = _mm512_and_si512(_mm512_srli_epi16(bytes, 4), low);
    }
    template <int Bits>
    static void weights_with(const uint8_t* at, const uint8_t* plane, int height, Weights (&w)[2]) {
        const __m512i low = _mm512_loadu_si512(at), above = _mm512_loadu_si512(plane);
        const __m512i first = _mm512_set1_epi8(bits_above_four<Bits>);
        const __m512i both = _mm512_srl_epi16(above, _mm_cvtsi32_si128(height)), nibble = _mm512_set1_epi8(15);
        w[0] = _mm512_or_si512(_mm512_and_si512(low, nibble), _mm512_and_si512(_mm512_slli_epi16(both, 4), first));
        w[1] = _mm512_or_si512(_mm512_and_si512(_mm512_srli_epi16(low, 4), nibble),
                               _mm512_and_si512(_mm512_slli_epi16(both, 4 - Bits), first));
    }
    using Table = __m512i;
    static Table table(const uint8_t* at) {
        return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
    }
    static void weights_of_table(const uint8_t* at, const Table& table, Weights (&w)[2]) {
        weights_of_nibbles(at, w);
        w[0] = _mm512_shuffle_epi8(table, w[0]);
        w[1] = _mm512_shuffle_epi8(table, w[1]);
    }
};

}  // namespace
}  // namespace quintet::cpu
