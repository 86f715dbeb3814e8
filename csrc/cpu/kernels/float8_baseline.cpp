// Products with 8-bit floats by what every processor of the architecture has, by the compiler's vectors of four.
#include "cpu/kernels/float8_tables.h"
#include "cpu/kernels/vectors_baseline.h"

namespace quintet::cpu {
namespace {

inline Floats one(float x) { return splat(x); }
inline Floats one(Bfloat16 x) {
    const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
    return (Floats)Ints{bits, bits, bits, bits};
}
inline Floats one(Float16 x) { return from_float16(Ints{x.bits, x.bits, x.bits, x.bits}); }

template <Float8Format Format>
struct Widener {
    static void widen(const uint8_t* at, Ints& first, Ints& second) {
        first = pairs(at + 1);
        second = pairs(at);
    }

private:
    static Ints pairs(const uint8_t* at) { return Ints{pair(at), pair(at + 4), pair(at + 8), pair(at + 12)}; }
    static uint32_t pair(const uint8_t* at) {
        return kKnown<Format>.bits[at[0]] | static_cast<uint32_t>(kKnown<Format>.bits[at[2]]) << 16;
    }
};

}  // namespace
}  // namespace quintet::cpu

#include "cpu/kernels/float8_body.h"

namespace quintet::cpu {

constexpr Float8Kernels kFloat8Baseline =
    float8_kernels<Singly<float, 4, 2, 1>, Singly<Bfloat16, 4, 2, 1>, Singly<Float16, 4, 2, 1>>();

}  // namespace quintet::cpu
