// Linear with what every processor of the architecture has, by the compiler's vectors of four.
#include "cpu/kernels/linear.h"
#include "cpu/kernels/vectors_baseline.h"

namespace quintet::cpu {
namespace {

inline Floats zeros() { return Floats{}; }
inline Floats add(Floats a, Floats b) { return a + b; }

struct OfFloat32 {
    using Element = float;
    using Weights = Floats;
    using Inputs = Floats;
    static constexpr long kPair = 1, kRows = 4, kVectors = 2, kAlone = 8;
    static Weights weights(const float* at) { return load(at); }
    static Inputs inputs(const float* at) { return splat(*at); }
    static Floats step(Floats sum, Weights w, Inputs x) { return fma(w, x, sum); }
    static float widened(float x) { return x; }
    static void round(Floats x, float* out) { store(out, x); }
};

struct OfFloat16 {
    using Element = Float16;
    using Weights = Floats;
    using Inputs = Floats;
    static constexpr long kPair = 1, kRows = 4, kVectors = 2, kAlone = 8;
    static Weights weights(const Float16* at) { return load(at); }
    static Inputs inputs(const Float16* at) { return from_float16(Ints{at->bits, at->bits, at->bits, at->bits}); }
    static Floats step(Floats sum, Weights w, Inputs x) { return fma(w, x, sum); }
    static float widened(Float16 x) { return from_float16(Ints{x.bits, 0, 0, 0})[0]; }
    static void round(Floats x, Float16* out) { store(out, x); }
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
    static void round(Floats x, Bfloat16* out) { store(out, x); }
};

}  // namespace
}  // namespace quintet::cpu

#include "cpu/kernels/linear_body.h"

namespace quintet::cpu {

const LinearKernels kLinearBaseline = {{multiply<OfFloat32>, multiply<OfBfloat16>, multiply<OfFloat16>}, {}};

}  // namespace quintet::cpu
