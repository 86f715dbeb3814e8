// Ceilings with AVX2; compiled with -mavx2 -mfma, run only where features() has them.
#include "cpu/kernels/ceiling.h"

#include <immintrin.h>

namespace quintet::cpu {
namespace {

using Floats = __m256;
using Ints = __m256i;

constexpr size_t kChains = 12;  // sixteen registers hold them and the two constants

Floats broadcast(float x) { return _mm256_set1_ps(x); }
Floats fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
Ints load(const char* at) { return _mm256_load_si256(reinterpret_cast<const Ints*>(at)); }

float add_lanes(Floats x) {
    float lanes[8];
    _mm256_storeu_ps(lanes, x);
    float total = 0.0F;
    for (const float lane : lanes) total += lane;
    return total;
}

uint64_t fold(Ints x) {
    uint64_t lanes[4], digest = 0;
    _mm256_storeu_si256(reinterpret_cast<Ints*>(lanes), x);
    for (const uint64_t lane : lanes) digest ^= lane;
    return digest;
}

}  // namespace
}  // namespace quintet::cpu

#include "cpu/kernels/ceiling_body.h"

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
