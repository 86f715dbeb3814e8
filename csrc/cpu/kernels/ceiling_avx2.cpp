// Ceilings with AVX2; compiled with -mavx2 -mfma, run only where features() has them.
#include "cpu/kernels/ceiling_avx2_vectors.h"

namespace quintet::cpu {
namespace {

// Products of quantized numbers, widened to 16 bits.
struct InWords {
    using Sum = int32_t __attribute__((vector_size(32)));
    static constexpr size_t kAdds = 16;
    Ints words = _mm256_set1_epi32(0x00030005);
    static Sum start(size_t i) { return (Sum)_mm256_set1_epi32(static_cast<int>(i)); }
    Sum step(Sum sum) const { return (Sum)_mm256_madd_epi16((Ints)sum, words) + (Sum)words; }
    static float total(Sum sum) { return static_cast<float>(fold((Ints)sum) & 0xffff) + 1.0F; }
};

}  // namespace

const CeilingKernels kCeilingAvx2 = {read_loop, {kLoop<InFloats>, kLoop<InFloats>, kLoop<InWords>}};

}  // namespace quintet::cpu
