// The cores of quantized_body.h for NEON with products of bytes, four at once: of two bytes with a sign (dotprod), or of one
// without and one with a sign (i8mm). Weights have none.
#pragma once

#include "cpu/kernels/quantized.h"
#include "cpu/kernels/quantized_baseline_vectors.h"

namespace quintet::cpu {
namespace {

using Bytes = uint8x16_t;
using Sums = uint32_t __attribute__((vector_size(16)));  // they may wrap around

inline int8x16_t signed_quad(const uint8_t* at) {
    uint32_t bits;
    __builtin_memcpy(&bits, at, sizeof bits);
    return vreinterpretq_s8_u32(vdupq_n_u32(bits));
}

inline Sums add_signed(Sums sum, int8x16_t w, int8x16_t x) { return (Sums)vdotq_s32((int32x4_t)sum, w, x); }

// Four inputs, and what their products with weights of 8 bits lack: dotprod takes these for numbers with a sign, less by 128.
struct Quad {
    int8x16_t x;
#if !defined(__ARM_FEATURE_MATMUL_INT8)
    Sums lacking;
#endif
};

#if defined(__ARM_FEATURE_MATMUL_INT8)
inline Quad quad_of(const uint8_t* at) { return {signed_quad(at)}; }
inline Sums add_products(Sums sum, Bytes w, const Quad& q) { return (Sums)vusdotq_s32((int32x4_t)sum, w, q.x); }
#else
inline Quad quad_of(const uint8_t* at) {
    const int8x16_t x = signed_quad(at);
    return {x, Sums{} - add_signed(Sums{}, vdupq_n_s8(-128), x)};
}
inline Sums add_products(Sums sum, Bytes w, const Quad& q) {
    return add_signed(sum + q.lacking, vreinterpretq_s8_u8(veorq_u8(w, vdupq_n_u8(128))), q.x);
}
#endif

struct ByteWeights {
    using Weights = Bytes;
    static Weights weights(const uint8_t* at) { return vld1q_u8(at); }
    static void weights_of_nibbles(const uint8_t* at, Weights (&w)[2]) {
        const Bytes bytes = vld1q_u8(at);
        w[0] = vandq_u8(bytes, vdupq_n_u8(15));
        w[1] = vshrq_n_u8(bytes, 4);
    }
    template <int Bits>
    static void weights_with(const uint8_t* at, const uint8_t* plane, int height, Weights (&w)[2]) {
        const Bytes above = vshlq_u8(vld1q_u8(plane), vdupq_n_s8(static_cast<int8_t>(-height)));
        weights_of_nibbles(at, w);
        w[0] = vorrq_u8(w[0], vandq_u8(vshlq_n_u8(above, 4), vdupq_n_u8(bits_above_four<Bits>)));
        w[1] = vorrq_u8(w[1], vandq_u8(vshlq_n_u8(above, 4 - Bits), vdupq_n_u8(bits_above_four<Bits>)));
    }
    using Table = Bytes;
    static Table table(const uint8_t* at) { return vld1q_u8(at); }
    static void weights_of_table(const uint8_t* at, const Table& table, Weights (&w)[2]) {
        weights_of_nibbles(at, w);
        w[0] = vqtbl1q_u8(table, w[0]);
        w[1] = vqtbl1q_u8(table, w[1]);
    }
};

// Inputs in 8 bits.
struct OneByte : ByteWeights {
    static constexpr long kBytes = 4, kRows = 4, kPairs = 2, kAlone = 4, kFew = 4, kSums = 16;
    using Sum = Sums;
    using Part = Sum;
    using Inputs = Quad;
    static Inputs inputs(const uint8_t* at) { return quad_of(at); }
    static Sum start(int32_t x) { return (Sum)ints(x); }
    static Sum resume(Floats x) { return (Sum)x; }
    static void step(Sum& sum, const Weights& w, const Inputs& x) { sum = add_products(sum, w, x); }
    static Ints total(Sum sum) { return (Ints)sum; }
    static void put(Ints x, uint8_t* at) {
        for (long i = 0; i < kLanes; ++i) at[i] = static_cast<uint8_t>(x[i]);
    }
};

// The same by weights of 4 and 6 bits, which have the same value with a sign.
struct SmallByOneByte : OneByte {
    using Inputs = int8x16_t;
    static Inputs inputs(const uint8_t* at) { return signed_quad(at); }
    static void step(Sum& sum, const Weights& w, const Inputs& x) { sum = add_signed(sum, vreinterpretq_s8_u8(w), x); }
};

// Inputs in 16 bits, 256 * high + low: a quad's low bytes, then its high bytes, each with a sign.
struct TwoBytes : ByteWeights {
    static constexpr long kBytes = 8, kRows = 4, kPairs = 1, kAlone = 4, kFew = 3, kSums = 8;
    struct Sum {
        Sums low, high;
    };
    using Part = Sum;
    struct Inputs {
        Quad low, high;
    };
    static Inputs inputs(const uint8_t* at) { return {quad_of(at), quad_of(at + 4)}; }
    static Sum start(int32_t x) { return {(Sums)ints(x), Sums{}}; }
    static void step(Sum& sum, const Weights& w, const Inputs& x) {
        sum.low = add_products(sum.low, w, x.low);
        sum.high = add_products(sum.high, w, x.high);
    }
    static Ints total(const Sum& sum) { return (Ints)(sum.low + (sum.high << 8)); }
    static void put(Ints x, uint8_t* at) {
        for (long i = 0; i < kLanes; ++i) {
            at[i] = static_cast<uint8_t>(x[i]);
            at[i + 4] = static_cast<uint8_t>((x[i] + 128) >> 8);
        }
    }
};

}  // namespace
}  // namespace quintet::cpu

#include "cpu/kernels/quantized_body.h"
