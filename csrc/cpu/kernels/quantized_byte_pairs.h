// The core of quantized_body.h for weights of 4 to 6 bits by inputs of 8 without products of four bytes: two at once, in 16 bits.
//
// The including file defines, beside what quantized_words.h asks for, low_four(Bytes) and high_four(Bytes), low and high bits
// of bytes; bits_above<Bits>(Bytes, int), so many bits of each byte from that height on at places from 4 on; Halfwords, two of 16 bits for
// each lane, which may wrap around; add_byte_products(Halfwords, Bytes, Ints), of bytes without and with a sign;
// add_pairs(Sums, Halfwords); and put_bytes(Ints, at).
#pragma once

namespace quintet::cpu {
namespace {

// A lane of 16 bits holds two products of each quad: of 4 bits eight quads' are at most 8 * 2 * 15 * 127 < 2^15, of 6 bits two
// quads' at most 2 * 2 * 63 * 127 < 2^15.
struct BytePairs {
    static constexpr long kBytes = 4, kRows = kWordRows, kPairs = kWordPairs, kAlone = kWordAlone, kFew = kWordFew;
    static constexpr long kPartNibbles = 8, kSums = kWordSums;
    using Sum = Sums;
    using Part = Halfwords;
    using Weights = Bytes;
    using Inputs = Ints;
    static Weights weights(const uint8_t* at) { return load_bytes(at); }
    static void weights_of_nibbles(const uint8_t* at, Weights (&w)[2]) {
        const Bytes bytes = load_bytes(at);
        w[0] = low_four(bytes);
        w[1] = high_four(bytes);
    }
    template <int Bits>
    static void weights_with(const uint8_t* at, const uint8_t* plane, int height, Weights (&w)[2]) {
        const Bytes above = load_bytes(plane);
        weights_of_nibbles(at, w);
        w[0] |= bits_above<Bits>(above, height);
        w[1] |= bits_above<Bits>(above, height + Bits);
    }
    using Table = quintet::cpu::Table;
    static Table table(const uint8_t* at) { return table_at(at); }
    static Inputs inputs(const uint8_t* at) { return ints(quad_at(at)); }
    static Sum start(int32_t x) { return (Sum)ints(x); }
    static void step(Part& part, const Weights& w, const Inputs& x) { part = add_byte_products(part, w, x); }
    static void join(Sum& sum, const Part& part) { sum = add_pairs(sum, part); }
    static Ints total(Sum sum) { return (Ints)sum; }
    static void put(Ints x, uint8_t* at) { put_bytes(x, at); }
};

}  // namespace
}  // namespace quintet::cpu
