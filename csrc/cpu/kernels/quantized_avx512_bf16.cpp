// Quantized products with AVX512 and its products of bytes, four at once. Whoever has bfloat16's dot product has them.
#include "cpu/kernels/quantized.h"
#include "cpu/kernels/quantized_avx512_weights.h"

namespace quintet::cpu {
namespace {

// Sums are of the type that the product's builtin has: with __m512i GCC 12 keeps two copies of each in its loops.
using Sums = int32_t __attribute__((vector_size(64)));

inline Sums add_products(Sums sum, __m512i w, __m512i x) { return (Sums)_mm512_dpbusd_epi32((__m512i)sum, w, x); }

// Inputs in 8 bits.
struct OneByte : ByteWeights {
    static constexpr long kBytes = 4, kRows = 6, kPairs = 2, kGroupPairs = 1, kAlone = 2, kFew = 6, kSums = 24;
    using Sum = Sums;
    using Part = Sum;
    using Inputs = __m512i;
    static Inputs inputs(const uint8_t* at) { return ints(quad_at(at)); }
    static Sum start(int32_t x) { return (Sums)ints(x); }
    static Sum resume(Floats x) { return (Sums)x; }
    static void step(Sum& sum, Weights w, Inputs x) { sum = add_products(sum, w, x); }
    static Ints total(Sum sum) { return (Ints)sum; }
    static void put(Ints x, uint8_t* at) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(at), _mm512_cvtepi32_epi8(x));
    }
};

// Inputs in 16 bits, 256 * high + low: a quad's low bytes, then its high bytes. The sums of a group of 128 are, high:
// 255 * 128 * 128 < 2^22, and with the weights' offset taken off at most 2^21, so that 256 times that fits.
struct TwoBytes : ByteWeights {
    static constexpr long kBytes = 8, kRows = 6, kPairs = 1, kAlone = 2, kFew = 3, kSums = 12;
    struct Sum {
        Sums low, high;
    };
    using Part = Sum;
    struct Inputs {
        __m512i low, high;
    };
    static Inputs inputs(const uint8_t* at) { return {ints(quad_at(at)), ints(quad_at(at + 4))}; }
    static Sum start(int32_t x) { return {(Sums)ints(x), Sums{}}; }
    static void step(Sum& sum, Weights w, const Inputs& x) {
        sum.low = add_products(sum.low, w, x.low);
        sum.high = add_products(sum.high, w, x.high);
    }
    static Ints total(const Sum& sum) { return add_ints((Ints)sum.low, _mm512_slli_epi32((Ints)sum.high, 8)); }
    static void put(Ints x, uint8_t* at) {
        const __m128i low = _mm512_cvtepi32_epi8(x);  // the byte as it is: -128..127
        const __m128i high = _mm512_cvtepi32_epi8(_mm512_srai_epi32(add_ints(x, ints(128)), 8));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(at), _mm_unpacklo_epi32(low, high));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(at) + 1, _mm_unpackhi_epi32(low, high));
    }
};

}  // namespace
}  // namespace quintet::cpu

#include "cpu/kernels/quantized_body.h"

namespace quintet::cpu {

constexpr QuantizedKernels kQuantizedAvx512Vnni = quantized_kernels<TwoBytes, OneByte>();

}  // namespace quintet::cpu
