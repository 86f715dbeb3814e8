// Ceilings with what every processor of the architecture has: SSE2 on x86-64, NEON on aarch64, plain C++ elsewhere.
#include "cpu/kernels/ceiling.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace quintet::cpu {
namespace {

#if defined(__x86_64__)

using Floats = __m128;
using Ints = __m128i;

constexpr size_t kChains = 12;  // sixteen registers hold them and the two constants

Floats broadcast(float x) { return _mm_set1_ps(x); }
Floats fma(Floats a, Floats b, Floats c) { return _mm_add_ps(_mm_mul_ps(a, b), c); }  // SSE2 has no fused form
Ints load(const char* at) { return _mm_load_si128(reinterpret_cast<const Ints*>(at)); }

float add_lanes(Floats x) {
    float lanes[4];
    _mm_storeu_ps(lanes, x);
    return lanes[0] + lanes[1] + lanes[2] + lanes[3];
}

uint64_t fold(Ints x) {
    uint64_t lanes[2];
    _mm_storeu_si128(reinterpret_cast<Ints*>(lanes), x);
    return lanes[0] ^ lanes[1];
}

#elif defined(__aarch64__)

using Floats = float32x4_t;
using Ints = uint64x2_t;

constexpr size_t kChains = 24;  // 4 units x 4 cycles is 16; thirty-two registers

Floats broadcast(float x) { return vdupq_n_f32(x); }
Floats fma(Floats a, Floats b, Floats c) { return vfmaq_f32(c, a, b); }
Ints load(const char* at) { return vld1q_u64(reinterpret_cast<const uint64_t*>(at)); }
float add_lanes(Floats x) { return vaddvq_f32(x); }
uint64_t fold(Ints x) { return vgetq_lane_u64(x, 0) ^ vgetq_lane_u64(x, 1); }

#else

using Floats = float;
using Ints = uint64_t;

constexpr size_t kChains = 12;

Floats broadcast(float x) { return x; }
Floats fma(Floats a, Floats b, Floats c) { return a * b + c; }
Ints load(const char* at) { return *reinterpret_cast<const Ints*>(at); }
float add_lanes(Floats x) { return x; }
uint64_t fold(Ints x) { return x; }

#endif

}  // namespace
}  // namespace quintet::cpu

#include "cpu/kernels/ceiling_body.h"

namespace quintet::cpu {
namespace {

#if defined(__x86_64__)

// Products of quantized numbers, widened to 16 bits.
struct InWords {
    using Sum = int32_t __attribute__((vector_size(16)));
    static constexpr size_t kAdds = 8;
    Ints words = _mm_set1_epi32(0x00030005);
    static Sum start(size_t i) { return (Sum)_mm_set1_epi32(static_cast<int>(i)); }
    Sum step(Sum sum) const { return (Sum)_mm_madd_epi16((Ints)sum, words) + (Sum)words; }
    static float total(Sum sum) { return static_cast<float>(fold((Ints)sum) & 0xffff) + 1.0F; }
};

#else

using InWords = InFloats;

#endif

}  // namespace

const CeilingKernels kCeilingBaseline = {read_loop, {kLoop<InFloats>, kLoop<InFloats>, kLoop<InWords>}};

}  // namespace quintet::cpu
