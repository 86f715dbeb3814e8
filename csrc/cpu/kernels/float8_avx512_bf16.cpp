// Products with 8-bit floats by AVX512 and its dot product of bfloat16 pairs, which takes subnormal numbers for zeros:
// none of those that 8 bits hold is one in bfloat16.
#include "cpu/kernels/float8_avx512_vectors.h"
#include "cpu/kernels/float8_body.h"

namespace quintet::cpu {
namespace {

struct Pairs {
    using Element = Bfloat16;
    using Weights = __m512bh;
    using Inputs = __m512bh;
    static constexpr long kRows = 6, kVectors = 4, kFew = 6;
    static Weights weights(Ints pairs) { return (__m512bh)pairs; }
    static Inputs inputs(const Bfloat16* at) {
        int both;
        __builtin_memcpy(&both, at, sizeof both);
        return (__m512bh)_mm512_set1_epi32(both);
    }
    static Floats step(Floats sum, Weights w, Inputs x) { return _mm512_dpbf16_ps(sum, w, x); }
};

}  // namespace

constexpr Float8Kernels kFloat8Avx512Bf16 = float8_kernels<Singly<float, 4, 4, 2>, Pairs, Singly<Float16, 4, 4, 2>>();

}  // namespace quintet::cpu
