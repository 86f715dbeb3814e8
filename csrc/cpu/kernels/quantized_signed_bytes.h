// The core of quantized_body.h for weights and inputs of 8 bits without products of four bytes: two at once, in 16 bits.
//
// The including file defines, beside what quantized_words.h asks for, kSignedRows and kSignedPairs; flip_bits(Bytes, Ints);
// product_pairs(Ints, Bytes), products of bytes without and with a sign, added by pairs in 16 bits; add_pairs(Sums,
// Halfwords); and put_flipped(Ints, at).
#pragma once

namespace quintet::cpu {
namespace {

// A quad's inputs are stored as four magnitudes, then as the bits that its weights are flipped with. A stored weight w + 128
// becomes w by its highest bit, and -w - 1 by all others: that meets the magnitude of a negative input. The sum lacks these
// magnitudes, and begins with them. Two products are at most 2 * 127 * 128 < 2^15.
struct SignedBytes {
    static constexpr long kBytes = 8, kRows = kSignedRows, kPairs = kSignedPairs, kAlone = kWordAlone, kFew = kWordFew,
                          kSums = kWordSums;
    static constexpr bool kFlips = true;
    using Sum = Sums;
    using Part = Sum;
    using Weights = Bytes;
    struct Inputs {
        Ints magnitudes, flips;
    };
    static Weights weights(const uint8_t* at) { return load_bytes(at); }
    using Table = quintet::cpu::Table;
    static Table table(const uint8_t* at) { return table_at(at); }
    static void weights_of_table(const uint8_t* at, const Table& table, Weights (&w)[2]) {
        const Bytes bytes = load_bytes(at);
        w[0] = low_found(table, bytes);
        w[1] = high_found(table, bytes);
    }
    static Inputs inputs(const uint8_t* at) { return {ints(quad_at(at)), ints(quad_at(at + 4))}; }
    static Sum start(int32_t x) { return (Sum)ints(x); }
    static Sum resume(Floats x) { return (Sum)x; }
    static void step(Sum& sum, const Weights& w, const Inputs& x) {
        sum = add_pairs(sum, product_pairs(x.magnitudes, flip_bits(w, x.flips)));
    }
    static Ints total(Sum sum) { return (Ints)sum; }
    static void put(Ints x, uint8_t* at) { put_flipped(x, at); }
};

}  // namespace
}  // namespace quintet::cpu
