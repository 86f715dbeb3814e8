// Linear with NEON's dot product of bfloat16 pairs (ARMv8.6, or bf16 before it), which takes subnormal numbers for zeros.
//
// Its matrix product of two rows would multiply twice as much in an instruction, but add up in another order: one row alone
// would have other bits.
#include "cpu/kernels/linear.h"
#include "cpu/kernels/vectors_baseline.h"

namespace quintet::cpu {
namespace {

inline Floats zeros() { return Floats{}; }
inline Floats add(Floats a, Floats b) { return a + b; }

struct OfPairs {
    using Element = Bfloat16;
    using Weights = bfloat16x8_t;
    using Inputs = bfloat16x8_t;
    static constexpr long kPair = 2, kRows = 6, kVectors = 4, kAlone = 16;
    static Weights weights(const Bfloat16* at) {
        Ints pairs;
        __builtin_memcpy(&pairs, at, sizeof pairs);
        return vreinterpretq_bf16_u32((uint32x4_t)pairs);
    }
    static Inputs inputs(const Bfloat16* at) {
        uint32_t pair;
        __builtin_memcpy(&pair, at, sizeof pair);
        return vreinterpretq_bf16_u32(vdupq_n_u32(pair));
    }
    static Floats step(Floats sum, Weights w, Inputs x) { return (Floats)vbfdotq_f32((float32x4_t)sum, w, x); }
    static float widened(Bfloat16 x) { return ((Floats)(Ints{x.bits, 0, 0, 0} << 16))[0]; }
    static void round(Floats x, Bfloat16* out) { store(out, x); }
};

}  // namespace
}  // namespace quintet::cpu

#include "cpu/kernels/linear_body.h"

namespace quintet::cpu {

void (*const kLinearNeonBfloat16)(const LinearPanel& panel) = multiply<OfPairs>;

}  // namespace quintet::cpu
