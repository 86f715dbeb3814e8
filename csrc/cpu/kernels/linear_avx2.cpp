// Linear with AVX2, FMA and F16C.
#include "cpu/kernels/linear.h"
#include "cpu/kernels/vectors_avx2.h"

namespace quintet::cpu {
namespace {

inline Floats zeros() { return _mm256_setzero_ps(); }
inline Floats add(Floats a, Floats b) { return _mm256_add_ps(a, b); }

struct OfFloat32 {
    using Element = float;
    using Weights = __m256;
    using Inputs = __m256;
    static constexpr long kPair = 1, kRows = 6, kVectors = 2, kAlone = 8;
    static Weights weights(const float* at) { return load(at); }
    static Inputs inputs(const float* at) { return _mm256_set1_ps(*at); }
    static Floats step(Floats sum, Weights w, Inputs x) { return _mm256_fmadd_ps(w, x, sum); }
    static float widened(float x) { return x; }
    static void round(Floats x, float* out) { store(out, x); }
};

struct OfFloat16 {
    using Wide = OfFloat32;
    using Element = Float16;
    using Weights = __m256;
    using Inputs = __m256;
    static constexpr long kPair = 1, kRows = 6, kVectors = 2, kAlone = 8;
    static Weights weights(const Float16* at) { return load(at); }
    static Inputs inputs(const Float16* at) { return _mm256_cvtph_ps(_mm_set1_epi16(static_cast<short>(at->bits))); }
    static Floats step(Floats sum, Weights w, Inputs x) { return _mm256_fmadd_ps(w, x, sum); }
    static float widened(Float16 x) { return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(x.bits))); }
    static void round(Floats x, Float16* out) { store(out, x); }
    static void widen_weights(const Float16* at, float* to) { store(to, load(at)); }
    static void widen_inputs(const Float16* at, float* to) { store(to, load(at)); }
};

struct Widened {
    __m256 first, second;
};

inline Widened widen_pairs(__m256i pairs) {
    return {_mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)),
            _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(-65536)))};
}

struct OfBfloat16 {
    using Wide = OfFloat32;
    using Element = Bfloat16;
    using Weights = Widened;
    using Inputs = Widened;
    static constexpr long kPair = 2, kRows = 4, kVectors = 2, kAlone = 8;
    static Weights weights(const Bfloat16* at) {
        return widen_pairs(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
    }
    static Inputs inputs(const Bfloat16* at) {
        int bits;
        __builtin_memcpy(&bits, at, sizeof bits);
        return widen_pairs(_mm256_set1_epi32(bits));
    }
    static Floats step(Floats sum, const Weights& w, const Inputs& x) {
        return _mm256_fmadd_ps(w.second, x.second, _mm256_fmadd_ps(w.first, x.first, sum));
    }
    static float widened(Bfloat16 x) { return _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128(x.bits << 16))); }
    static void round(Floats x, Bfloat16* out) { store(out, x); }
    static void widen_weights(const Bfloat16* at, float* to) {
        const Widened pairs = weights(at);
        store(to, pairs.first);
        store(to + kLinearColumns, pairs.second);
    }
    static void widen_inputs(const Bfloat16* at, float* to) { store(to, load(at)); }
};

}  // namespace
}  // namespace quintet::cpu

#include "cpu/kernels/linear_body.h"

namespace quintet::cpu {

const LinearKernels kLinearAvx2 = {{multiply<OfFloat32>, multiply_widened<OfBfloat16>, multiply_widened<OfFloat16>},
                                   {nullptr, widen<OfBfloat16>, widen<OfFloat16>}};

}  // namespace quintet::cpu
