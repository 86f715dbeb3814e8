// Weights in floats become whole numbers with scales: one block of quantized.h, over the vectors of one instruction set.
#pragma once

#include "cpu/kernels/quantized.h"

namespace quintet::cpu {
namespace {

constexpr float kLargestHalf = 65504.0F;

// What the weight of a group's largest magnitude may become in 4 bits. The end of the range, -8, is not the best for all:
// the others are a little coarser or finer. Of these the one with the least squared error is taken. Measured, against -8
// alone: 8 to 11% less of it for normal weights in groups of 32 to 128, 6 to 13% for heavy tails (Student's, 4 degrees).
constexpr float kExtremes[] = {-8.0F, -6.6F, -7.2F, -7.8F, -8.4F, -9.0F, -9.6F, -10.2F, -10.8F};

struct Group {
    alignas(64) float x[kLargestGroup];
    long count;        // inputs, up to kLanes of zeros past them
    float extreme;     // of the largest magnitude, with its sign
    bool finite;
};

template <typename Type>
void take(Group& group, const typename Type::Element* x, long count) {
    Ints most = ints(0), positive = ints(0);
    for (long i = 0; i < count; i += kLanes) {
        Floats numbers;
        if (count - i >= kLanes) {
            numbers = Type::widen(x + i);
        } else {
            typename Type::Element rest[kLanes] = {};
            __builtin_memcpy(rest, x + i, static_cast<size_t>(count - i) * sizeof rest[0]);
            numbers = Type::widen(rest);
        }
        store(group.x + i, numbers);
        most = larger(most, magnitude_bits(numbers));
        positive = larger(positive, as_ints(numbers));
    }
    int32_t lanes[kLanes], highest = 0;
    store_ints(lanes, most);
    for (long i = 0; i < kLanes; ++i) highest = lanes[i] > highest ? lanes[i] : highest;
    store_ints(lanes, positive);
    bool is_positive = false;
    for (long i = 0; i < kLanes; ++i) is_positive = is_positive || lanes[i] == highest;
    __builtin_memcpy(&group.extreme, &highest, sizeof highest);
    if (!is_positive) group.extreme = -group.extreme;
    group.finite = highest < 0x7F800000;
    group.count = count;
}

inline float inverse(float scale) { return scale == 0.0F ? 0.0F : 1.0F / scale; }

template <bool Nibbles>
inline Ints whole_numbers(const float* x, Floats stretch) {
    constexpr int32_t kLeast = Nibbles ? -8 : -127, kMost = Nibbles ? 7 : 127;
    return larger(smaller(rounded(mul(load(x), stretch)), ints(kMost)), ints(kLeast));
}

inline float squared_error(const Group& group, float scale) {
    const Floats stretch = splat(inverse(scale)), back = splat(scale);
    Floats sum = zeros();
    for (long i = 0; i < group.count; i += kLanes) {
        const Floats off = sub(load(group.x + i), mul(to_floats(whole_numbers<true>(group.x + i, stretch)), back));
        sum = add(sum, mul(off, off));
    }
    float lanes[kLanes], error = 0.0F;
    store(lanes, sum);
    for (long i = 0; i < kLanes; ++i) error += lanes[i];
    return error;
}

__attribute__((noinline)) uint16_t scale_of_nibbles(const Group& group) {
    uint16_t best = 0;
    float least = __builtin_inff();
    for (const float extreme : kExtremes) {
        const uint16_t scale = half_of(group.extreme / extreme);
        const float error = squared_error(group, float_of(scale));
        if (error < least) {
            least = error;
            best = scale;
        }
    }
    return best;
}

template <bool Nibbles>
__attribute__((noinline)) void put_group(const Group& group, float scale, uint8_t* bytes) {
    const Floats stretch = splat(inverse(scale));
    const Ints offset = ints(Nibbles ? 8 : 128);
    for (long i = 0; i < group.count; i += kLanes) {
        store_bytes(bytes + i, add_ints(whole_numbers<Nibbles>(group.x + i, stretch), offset));
    }
}

using Bytes64 = uint8_t[kLinearColumns][kLargestGroup];

// Columns' bytes, side by side as quantized.h wants them.
template <bool Nibbles>
__attribute__((noinline)) void interleave(const Bytes64& bytes, uint8_t* out, long quads) {
    constexpr long kVector = 16;  // columns
    for (long q = 0; q < quads; ++q) {
        for (long first = 0; first < kLinearColumns; first += Nibbles ? 2 * kVector : kVector) {
            for (long c = first; c < first + kVector; ++c) {
                uint32_t quad, other = 0;
                __builtin_memcpy(&quad, &bytes[c][q * kQuad], sizeof quad);
                if constexpr (Nibbles) __builtin_memcpy(&other, &bytes[c + kVector][q * kQuad], sizeof other);
                quad |= other << 4;
                __builtin_memcpy(out, &quad, sizeof quad);
                out += sizeof quad;
            }
        }
    }
}

template <typename Type, bool Nibbles>
bool pack_groups(const QuantizedBlock& block) {
    constexpr float kMost = kLargestHalf * (Nibbles ? 6.6F : 127.0F);
    const auto* const weight = static_cast<const typename Type::Element*>(block.weight);
    uint16_t* scales = static_cast<uint16_t*>(block.scales);
    alignas(64) Bytes64 bytes;
    __builtin_memset(bytes, Nibbles ? 8 : 128, sizeof bytes);
    Group group;
    bool good = true;
    for (long g = 0; g < block.groups; ++g) {
        for (long c = 0; c < block.columns; ++c) {
            take<Type>(group, weight + c * block.stride + g * block.group, block.group);
            good = good && group.finite && __builtin_fabsf(group.extreme) <= kMost;
            const uint16_t scale = Nibbles ? scale_of_nibbles(group) : half_of(__builtin_fabsf(group.extreme) / 127.0F);
            put_group<Nibbles>(group, float_of(scale), bytes[c]);
            scales[c] = scale;
        }
        for (long c = block.columns; c < kLinearColumns; ++c) scales[c] = 0;
        scales += kLinearColumns;
        const long quads = block.group / kQuad;
        interleave<Nibbles>(bytes, block.packed + g * quads * kLinearColumns * (Nibbles ? 2 : 4), quads);
    }
    return good;
}

template <typename Type>
bool pack_channels(const QuantizedBlock& block) {
    const auto* const weight = static_cast<const typename Type::Element*>(block.weight);
    float* const scales = static_cast<float*>(block.scales);
    alignas(64) Bytes64 bytes;
    Group group;
    bool good = true;
    for (long c = 0; c < kLinearColumns; ++c) {
        float peak = 0.0F;
        for (long i = 0; i < block.group && c < block.columns; i += kLargestGroup) {
            const long left = block.group - i;
            take<Type>(group, weight + c * block.stride + i, left < kLargestGroup ? left : kLargestGroup);
            good = good && group.finite;
            const float size = __builtin_fabsf(group.extreme);
            peak = size > peak ? size : peak;
        }
        scales[c] = peak / 127.0F;
    }
    uint8_t* out = block.packed;
    for (long i = 0; i < block.group; i += kLargestGroup) {
        const long left = block.group - i, count = left < kLargestGroup ? left : kLargestGroup;
        __builtin_memset(bytes, 128, sizeof bytes);
        for (long c = 0; c < block.columns; ++c) {
            take<Type>(group, weight + c * block.stride + i, count);
            put_group<false>(group, scales[c], bytes[c]);
        }
        interleave<false>(bytes, out, (count + kQuad - 1) / kQuad);
        out += kLargestGroup * kLinearColumns;
    }
    return good;
}

constexpr QuantizedPacking kPacking = {
    {{pack_groups<Singles, false>, pack_groups<Brains, false>, pack_groups<Halves, false>},
     {pack_groups<Singles, true>, pack_groups<Brains, true>, pack_groups<Halves, true>},
     {pack_channels<Singles>, pack_channels<Brains>, pack_channels<Halves>},
     {pack_groups<Singles, true>, pack_groups<Brains, true>, pack_groups<Halves, true>},
     {pack_groups<Singles, false>, pack_groups<Brains, false>, pack_groups<Halves, false>},
     {},
     {}}};

}  // namespace
}  // namespace quintet::cpu
