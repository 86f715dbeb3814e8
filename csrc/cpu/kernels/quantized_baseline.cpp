// Quantized products with what every processor of the architecture has.
#include "cpu/kernels/quantized.h"
#include "cpu/kernels/quantized_baseline_vectors.h"

namespace quintet::cpu {
namespace {

constexpr long kWordRows = 4, kWordPairs = 1, kWordAlone = 1, kWordFew = 1, kWordSums = 8;
using Bytes = uint16_t __attribute__((vector_size(16)));
using Sums = uint32_t __attribute__((vector_size(16)));  // they may wrap around

inline int32_t quad_at(const uint8_t* at) {
    int32_t bits;
    __builtin_memcpy(&bits, at, sizeof bits);
    return bits;
}

inline Bytes load_bytes(const uint8_t* at) {  // every processor here is little-endian
    Bytes x;
    __builtin_memcpy(&x, at, sizeof x);
    return x;
}
inline Ints even_words(Bytes x) { return (Ints)(x & 0xFF); }
inline Ints odd_words(Bytes x) { return (Ints)(x >> 8); }
inline Ints low_even(Bytes x) { return (Ints)(x & 15); }
inline Ints low_odd(Bytes x) { return (Ints)(x >> 8 & 15); }
inline Ints high_even(Bytes x) { return (Ints)(x >> 4 & 15); }
inline Ints high_odd(Bytes x) { return (Ints)(x >> 12); }
inline Bytes lower(Bytes x, int bits) { return x >> static_cast<uint16_t>(bits); }
template <int Bits>
inline Bytes low_with(Bytes low, Bytes above) {
    return (low & 0x0F0F) | (above << 4 & static_cast<uint16_t>(bits_above_four<Bits> * 0x0101));
}
template <int Bits>
inline Bytes high_with(Bytes high, Bytes above) { return low_with<Bits>(high >> 4, above >> Bits); }

struct Table {
    uint8_t bytes[16];
};
inline Table table_at(const uint8_t* at) {
    Table table;
    __builtin_memcpy(&table, at, sizeof table);
    return table;
}
inline Bytes found(const Table& table, Bytes places) {  // each byte 0..15
    uint8_t bytes[sizeof places];
    __builtin_memcpy(bytes, &places, sizeof places);
    for (uint8_t& byte : bytes) byte = table.bytes[byte];
    return load_bytes(bytes);
}
inline Bytes low_found(const Table& table, Bytes x) { return found(table, x & 0x0F0F); }
inline Bytes high_found(const Table& table, Bytes x) { return found(table, x >> 4 & 0x0F0F); }

inline Sums add_products(Sums sum, Ints a, Ints b) {
#if defined(__SSE2__)
    return sum + (Sums)_mm_madd_epi16((__m128i)a, (__m128i)b);
#elif defined(__aarch64__)
    const int16x8_t x = (int16x8_t)a, y = (int16x8_t)b;
    return sum + (Sums)vpaddq_s32(vmull_s16(vget_low_s16(x), vget_low_s16(y)), vmull_high_s16(x, y));
#else
    using Words = int16_t __attribute__((vector_size(16)));
    const Words x = (Words)a, y = (Words)b;
    Ints products;
    for (long i = 0; i < kLanes; ++i) products[i] = x[2 * i] * y[2 * i] + x[2 * i + 1] * y[2 * i + 1];
    return sum + (Sums)products;
#endif
}

inline void put_words(Ints x, uint8_t* at) {
    const int16_t words[] = {static_cast<int16_t>(x[0]), static_cast<int16_t>(x[2]), static_cast<int16_t>(x[1]),
                             static_cast<int16_t>(x[3])};
    __builtin_memcpy(at, words, sizeof words);
}

}  // namespace
}  // namespace quintet::cpu

#include "cpu/kernels/quantized_body.h"
#include "cpu/kernels/quantized_words.h"

namespace quintet::cpu {

constexpr QuantizedKernels kQuantizedBaseline = quantized_kernels<Words, Words>();

}  // namespace quintet::cpu
