// Sampling with what every processor of the architecture has, by the compiler's vectors of four.
#include "cpu/kernels/sampling.h"

namespace quintet::cpu {
namespace {

constexpr long kLanes = 4;
using Floats = float __attribute__((vector_size(16)));
using Ints = uint32_t __attribute__((vector_size(16)));
using Words = int32_t __attribute__((vector_size(16)));
using Halves = int16_t __attribute__((vector_size(16)));
using Doubles = double __attribute__((vector_size(32)));
using Mask = Words;
template <int by>
struct Rotation {};

inline Floats splat(float x) { return Floats{x, x, x, x}; }
inline Floats fma(Floats a, Floats b, Floats c) { return a * b + c; }
inline Floats load(const float* at) {
    Floats x;
    __builtin_memcpy(&x, at, sizeof x);
    return x;
}
inline Ints lane_numbers() { return Ints{0, 1, 2, 3}; }

template <typename Lanes>
inline Lanes larger(Lanes most, Lanes x) {
    return x > most ? x : most;
}

inline float largest_of(Floats x) {
    float most = x[0];
    for (long i = 1; i < kLanes; ++i) most = x[i] > most ? x[i] : most;
    return most;
}

inline Mask no_lane() { return Mask{}; }
inline Mask either(Mask a, Mask b) { return a | b; }
inline bool any(Mask mask) { return (mask[0] | mask[1] | mask[2] | mask[3]) != 0; }
inline Mask unordered(Floats a, Floats b) { return (Mask)(a != a) | (Mask)(b != b); }
inline Mask reaches(Floats x, float bar) { return (Mask)(x >= splat(bar)); }
inline Mask reaches(Ints x, uint32_t bar) { return (Mask)(x >= Ints{} + bar); }

template <int by>
inline Ints rotate(Ints x, Rotation<by>) {
    return x << by | x >> (32 - by);
}

}  // namespace
}  // namespace quintet::cpu

#include "cpu/kernels/sampling_body.h"

namespace quintet::cpu {

const SamplingKernels kSamplingBaseline = QUINTET_SAMPLING_KERNELS;

}  // namespace quintet::cpu
