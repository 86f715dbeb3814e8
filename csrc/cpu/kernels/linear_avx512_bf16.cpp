// Linear with AVX512 and its dot product of bfloat16 pairs, which takes subnormal numbers for zeros.
#include "cpu/kernels/linear.h"
#include "cpu/kernels/linear_avx512_vectors.h"
#include "cpu/kernels/linear_body.h"

namespace quintet::cpu {
namespace {

struct OfPairs {
    using Element = uint16_t;
    using Weights = __m512bh;
    using Inputs = __m512bh;
    static constexpr long kPair = 2, kRows = 6, kVectors = 4, kAlone = 4;
    static Weights weights(const uint16_t* at) { return (__m512bh)_mm512_loadu_si512(at); }
    static Inputs inputs(const uint16_t* at) { return (__m512bh)_mm512_set1_epi32(both(at)); }
    static Floats step(Floats sum, Weights w, Inputs x) { return _mm512_dpbf16_ps(sum, w, x); }
    static float widened(uint16_t x) { return OfBfloat16::widened(x); }
    static void round(Floats x, uint16_t* out) { round_to_bfloat16(x, out); }
};

}  // namespace

const LinearKernels kLinearAvx512Bf16 = {{multiply<OfFloat32>, multiply<OfPairs>, multiply<OfFloat16>}, {}};

}  // namespace quintet::cpu
