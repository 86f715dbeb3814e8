// Linear with what every processor of the architecture has, by the compiler's vectors of four.
#include "cpu/kernels/linear.h"

#if defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "cpu/kernels/attention_types.h"

namespace quintet::cpu {
namespace {

constexpr long kLanes = 4;
using Floats = float __attribute__((vector_size(16)));
using Ints = uint32_t __attribute__((vector_size(16)));

inline Floats zeros() { return Floats{}; }
inline Floats splat(float x) { return Floats{x, x, x, x}; }
inline Floats add(Floats a, Floats b) { return a + b; }
inline void store(float* at, Floats x) { __builtin_memcpy(at, &x, sizeof x); }
inline Floats load(const float* at) {
    Floats x;
    __builtin_memcpy(&x, at, sizeof x);
    return x;
}

// No product stands beside a sum elsewhere: a compiler may join the two in one copy of a loop and not in another.
#if defined(__aarch64__)
inline Floats fma(Floats a, Floats b, Floats c) { return (Floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b); }
#else
inline Floats fma(Floats a, Floats b, Floats c) { return a * b + c; }  // SSE2 has no fused form
#endif

template <typename E>
inline void narrowed(Floats x, E* out) {
    for (long i = 0; i < kLanes; ++i) narrow(x[i], out + i);
}

struct OfFloat32 {
    using Element = float;
    using Weights = Floats;
    using Inputs = Floats;
    static constexpr long kPair = 1, kRows = 4, kVectors = 2, kAlone = 8;
    static Weights weights(const float* at) { return load(at); }
    static Inputs inputs(const float* at) { return splat(*at); }
    static Floats step(Floats sum, Weights w, Inputs x) { return fma(w, x, sum); }
    static float widened(float x) { return x; }
    static void round(Floats x, float* out) { narrowed(x, out); }
};

struct OfFloat16 {
    using Element = Float16;
    using Weights = Floats;
    using Inputs = Floats;
    static constexpr long kPair = 1, kRows = 4, kVectors = 2, kAlone = 8;
    static Floats widen(Ints bits) {
        const Floats size = (Floats)((bits & 0x7FFF) << 13) * 0x1p112F;  // subnormals come out right, too
        const Ints special = (Ints)((bits & 0x7C00) == 0x7C00) & 0x7F800000;
        return (Floats)((Ints)size | special | (bits & 0x8000) << 16);
    }
    static Weights weights(const Float16* at) { return widen(Ints{at[0].bits, at[1].bits, at[2].bits, at[3].bits}); }
    static Inputs inputs(const Float16* at) { return widen(Ints{at->bits, at->bits, at->bits, at->bits}); }
    static Floats step(Floats sum, Weights w, Inputs x) { return fma(w, x, sum); }
    static float widened(Float16 x) { return widen(Ints{x.bits, 0, 0, 0})[0]; }
    static void round(Floats x, Float16* out) { narrowed(x, out); }
};

struct Widened {
    Floats first, second;
};

struct OfBfloat16 {
    using Element = Bfloat16;
    using Weights = Widened;
    using Inputs = Widened;
    static constexpr long kPair = 2, kRows = 4, kVectors = 2, kAlone = 8;
    static Widened widen(Ints pairs) {  // the first of a pair is the lower half: every processor here is little-endian
        return {(Floats)(pairs << 16), (Floats)(pairs & 0xFFFF0000)};
    }
    static Weights weights(const Bfloat16* at) {
        Ints pairs;
        __builtin_memcpy(&pairs, at, sizeof pairs);
        return widen(pairs);
    }
    static Inputs inputs(const Bfloat16* at) {
        uint32_t bits;
        __builtin_memcpy(&bits, at, sizeof bits);
        return widen(Ints{bits, bits, bits, bits});
    }
    static Floats step(Floats sum, const Weights& w, const Inputs& x) {
        return fma(w.second, x.second, fma(w.first, x.first, sum));
    }
    static float widened(Bfloat16 x) { return widen(Ints{x.bits, 0, 0, 0}).first[0]; }
    static void round(Floats x, Bfloat16* out) { narrowed(x, out); }
};

}  // namespace
}  // namespace quintet::cpu

#include "cpu/kernels/linear_body.h"

namespace quintet::cpu {

const LinearKernels kLinearBaseline = {{multiply<OfFloat32>, multiply<OfBfloat16>, multiply<OfFloat16>}};

}  // namespace quintet::cpu
