// The dot products of AVX512 in the loops of ceiling_body.h.
#pragma once

#include "cpu/kernels/ceiling_avx512_vectors.h"

namespace quintet::cpu {
namespace {

// Two products of bfloat16 in each lane. The sums stop growing where one more is below half of their last bit.
struct InPairs {
    using Sum = Floats;
    static constexpr size_t kAdds = 32;
    __m512bh ones = (__m512bh)_mm512_set1_epi32(0x3f803f80);
    static Sum start(size_t i) { return broadcast(static_cast<float>(i)); }
    Sum step(Sum sum) const { return _mm512_dpbf16_ps(sum, ones, ones); }
    static float total(Sum sum) { return add_lanes(sum); }
};

// Four products of bytes in each lane. The sums wrap around.
struct InBytes {
    using Sum = int32_t __attribute__((vector_size(64)));
    static constexpr size_t kAdds = 64;
    Ints ones = _mm512_set1_epi32(0x01010101);
    static Sum start(size_t i) { return (Sum)_mm512_set1_epi32(static_cast<int>(i)); }
    Sum step(Sum sum) const { return (Sum)_mm512_dpbusd_epi32((Ints)sum, ones, ones); }
    static float total(Sum sum) { return static_cast<float>(fold((Ints)sum) & 0xffff) + 1.0F; }
};

}  // namespace
}  // namespace quintet::cpu
