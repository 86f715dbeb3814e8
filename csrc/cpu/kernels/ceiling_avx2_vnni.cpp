// Ceilings with AVX2 and AVX-VNNI.
#include "cpu/kernels/ceiling_avx2_vectors.h"

namespace quintet::cpu {
namespace {

// Four products of bytes in each lane. The sums wrap around.
struct InBytes {
    using Sum = int32_t __attribute__((vector_size(32)));
    static constexpr size_t kAdds = 32;
    Ints ones = _mm256_set1_epi32(0x01010101);
    static Sum start(size_t i) { return (Sum)_mm256_set1_epi32(static_cast<int>(i)); }
    Sum step(Sum sum) const { return (Sum)_mm256_dpbusd_avx_epi32((Ints)sum, ones, ones); }
    static float total(Sum sum) { return static_cast<float>(fold((Ints)sum) & 0xffff) + 1.0F; }
};

}  // namespace

const CeilingKernels kCeilingAvx2Vnni = {read_loop, {kLoop<InFloats>, kLoop<InFloats>, kLoop<InBytes>}};

}  // namespace quintet::cpu
