// The loops of ceiling.h, written once over the vectors of one instruction set.
//
// The including file defines: Floats, Ints (vector types of the same bytes), kChains, broadcast(float), fma(a, b, c),
// add_lanes(Floats), load(const char*), fold(Ints); and, beside InFloats, what else its products multiply in.
#pragma once

namespace quintet::cpu {
namespace {

constexpr size_t kLine = 64;    // bytes in a cache line
constexpr size_t kUnroll = 8;   // multiply-adds of each chain in a round, to amortise the loop

// Products of floats of 32 bits, or of what is widened to them. x = 0.999 x + 0.001 goes to 1.
struct InFloats {
    using Sum = Floats;
    static constexpr size_t kAdds = sizeof(Floats) / sizeof(float);
    Floats scale = broadcast(0.999F), shift = broadcast(0.001F);
    static Sum start(size_t i) { return broadcast(static_cast<float>(i)); }
    Sum step(Sum sum) const { return fma(sum, scale, shift); }
    static float total(Sum sum) { return add_lanes(sum); }
};

// kChains independent chains cover latency times throughput of every core that we know: 5 cycles x 2 units is 10.
template <typename Numbers>
float multiply_loop(size_t rounds) {
    const Numbers numbers;
    typename Numbers::Sum chain[kChains];
    for (size_t i = 0; i < kChains; ++i) chain[i] = Numbers::start(i);
    for (size_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 8
        for (size_t u = 0; u < kUnroll; ++u) {
#pragma GCC unroll 32
            for (size_t i = 0; i < kChains; ++i) chain[i] = numbers.step(chain[i]);
        }
    }
    float total = 0.0F;
    for (size_t i = 0; i < kChains; ++i) total += Numbers::total(chain[i]);
    return total;
}

template <typename Numbers>
constexpr MultiplyLoop kLoop = {multiply_loop<Numbers>, kUnroll * kChains * Numbers::kAdds};

// Four streams, a quarter of the buffer each: a core follows several better than one (about a tenth faster on Zen 3).
uint64_t read_loop(const void* data, size_t lines) {
    constexpr size_t kStreams = 4, kParts = kLine / sizeof(Ints);
    const char* from = static_cast<const char*>(data);
    const size_t stride = lines / kStreams * kLine;
    Ints digest[kStreams] = {};
    for (size_t at = 0; at < stride; at += kLine) {
#pragma GCC unroll 4
        for (size_t i = 0; i < kStreams; ++i) {
#pragma GCC unroll 8
            for (size_t part = 0; part < kParts; ++part) {
                digest[i] ^= load(from + i * stride + at + part * sizeof(Ints));
            }
        }
    }
    for (size_t at = kStreams * stride; at < lines * kLine; at += sizeof(Ints)) digest[0] ^= load(from + at);
    return fold(digest[0] ^ digest[1] ^ digest[2] ^ digest[3]);
}

}  // namespace
}  // namespace quintet::cpu
