// Attention with what every processor of the architecture has, by the compiler's vectors of four.
#include "cpu/kernels/attention.h"

#if defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "cpu/kernels/attention_types.h"

namespace quintet::cpu {
namespace {

constexpr long kLanes = 4;
constexpr long kTile = 8;  // of sixteen registers
using Floats = float __attribute__((vector_size(16)));
using Ints = uint32_t __attribute__((vector_size(16)));

inline Floats splat(float x) { return Floats{x, x, x, x}; }

#if defined(__aarch64__)
inline Floats fma(Floats a, Floats b, Floats c) {
    return (Floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
}
#else
inline Floats fma(Floats a, Floats b, Floats c) { return a * b + c; }  // SSE2 has no fused form
#endif

template <typename To, typename From>
inline To read(const From* at) {
    To x;
    __builtin_memcpy(&x, at, sizeof x);
    return x;
}

inline Floats load(const float* at) { return read<Floats>(at); }
inline void store(float* at, Floats x) { __builtin_memcpy(at, &x, sizeof x); }
inline Floats load(const Bfloat16* at) {
    return (Floats)(Ints{at[0].bits, at[1].bits, at[2].bits, at[3].bits} << 16);
}

inline Floats of_halves(Ints bits) {
    const Floats size = (Floats)((bits & 0x7FFF) << 13) * 0x1p112F;  // subnormals come out right, too
    const Ints special = (Ints)((bits & 0x7C00) == 0x7C00) & 0x7F800000;
    return (Floats)((Ints)size | special | (bits & 0x8000) << 16);
}
inline Floats load(const Float16* at) { return of_halves(Ints{at[0].bits, at[1].bits, at[2].bits, at[3].bits}); }

inline Floats load(const Int8* at) {
    return Floats{static_cast<float>(at[0].steps), static_cast<float>(at[1].steps), static_cast<float>(at[2].steps),
                  static_cast<float>(at[3].steps)};
}

inline Floats load(const Float8* at) {
    const Ints bits = {at[0].bits, at[1].bits, at[2].bits, at[3].bits}, size = bits & 0x7F;
    const Ints nan = (Ints)(size == 0x7F) & 0x7FC00000;
    return (Floats)((Ints)((Floats)(size << 20) * 0x1p112F) | nan | (bits & 0x80) << 24);
}

inline Floats load(const Float8Wide* at) {
    return of_halves(Ints{at[0].bits, at[1].bits, at[2].bits, at[3].bits} << 8);
}

inline Ints lane_numbers() { return Ints{0, 1, 2, 3}; }

inline Floats add_across(const Floats (&x)[kLanes]) {
    Floats sums;
    for (long i = 0; i < kLanes; ++i) sums[i] = (x[i][0] + x[i][2]) + (x[i][1] + x[i][3]);
    return sums;
}

}  // namespace
}  // namespace quintet::cpu

#include "cpu/kernels/attention_body.h"

namespace quintet::cpu {

const AttentionKernels kAttentionBaseline = QUINTET_ATTENTION_KERNELS;

}  // namespace quintet::cpu
