// The core of quantized_body.h for processors without byte products: weights and inputs in 16 bits, two products at once.
//
// The including file defines, beside its vectors, kWordRows, kWordPairs, kWordAlone, kWordFew and kWordSums; Bytes, a vector of kLanes * 4 bytes,
// and load_bytes(at); low_with<Bits>(Bytes, Bytes) and high_with<Bits>(Bytes, Bytes), low or high bits of the first with so many
// lowest bits of the second, or those after them, above; lower(Bytes, int), their bits so much lower; even_words(Bytes) and odd_words(Bytes), bytes 0, 2, .. and 1, 3, .. in 16 bits; low_even, low_odd,
// high_even, high_odd, the same of low and high bits of bytes; Table, table_at(at) of 16 bytes and low_found(Table, Bytes)
// and high_found(Table, Bytes), low and high bits of bytes looked up there; Sums, kLanes numbers that may wrap around, and
// add_products(Sums, Ints, Ints); put_words(Ints, at).
#pragma once

namespace quintet::cpu {
namespace {

// A quad's inputs are stored as 0, 2, 1, 3: its even ones face even bytes of the weights. With weights up to 255 and inputs
// up to 32639 a group of 128 stays below 128 * 255 * 32639 < 2^31.
struct Words {
    static constexpr long kBytes = 8, kRows = kWordRows, kPairs = kWordPairs, kAlone = kWordAlone, kFew = kWordFew,
                          kSums = kWordSums;
    using Sum = Sums;
    using Part = Sum;
    struct Weights {
        Ints even, odd;
    };
    struct Inputs {
        Ints even, odd;
    };
    static Weights weights(const uint8_t* at) {
        const Bytes bytes = load_bytes(at);
        return {even_words(bytes), odd_words(bytes)};
    }
    static Weights ready(const uint8_t* at) { return {(Ints)load_bytes(at), (Ints)load_bytes(at + sizeof(Ints))}; }
    static void weights_of_nibbles(const uint8_t* at, Weights (&w)[2]) {
        const Bytes bytes = load_bytes(at);
        w[0] = {low_even(bytes), low_odd(bytes)};
        w[1] = {high_even(bytes), high_odd(bytes)};
    }
    template <int Bits>
    static void weights_with(const uint8_t* at, const uint8_t* plane, int height, Weights (&w)[2]) {
        const Bytes bytes = load_bytes(at), above = lower(load_bytes(plane), height);
        const Bytes low = low_with<Bits>(bytes, above), high = high_with<Bits>(bytes, above);
        w[0] = {even_words(low), odd_words(low)};
        w[1] = {even_words(high), odd_words(high)};
    }
    using Table = quintet::cpu::Table;
    static Table table(const uint8_t* at) { return table_at(at); }
    static void weights_of_table(const uint8_t* at, const Table& table, Weights (&w)[2]) {
        const Bytes bytes = load_bytes(at), low = low_found(table, bytes), high = high_found(table, bytes);
        w[0] = {even_words(low), odd_words(low)};
        w[1] = {even_words(high), odd_words(high)};
    }
    static Inputs inputs(const uint8_t* at) { return {ints(quad_at(at)), ints(quad_at(at + 4))}; }
    static Sum start(int32_t x) { return (Sum)ints(x); }
    static Sum resume(Floats x) { return (Sum)x; }
    static void step(Sum& sum, const Weights& w, const Inputs& x) {
        sum = add_products(add_products(sum, w.even, x.even), w.odd, x.odd);
    }
    static Ints total(Sum sum) { return (Ints)sum; }
    static void put(Ints x, uint8_t* at) { put_words(x, at); }
};

}  // namespace
}  // namespace quintet::cpu
