// Rows of a 4-bit cache, as quintet.ops.pages.to_int4_rows() has them: values in groups of kGroup, the last perhaps
// smaller; each turned by a Hadamard matrix, then a code from 0 to 15 of each value, and behind all codes each group's
// scale and minimum in float16. Needs what attention_body.h says.
#pragma once

#include "cpu/kernels/attention_scratch.h"

namespace quintet::cpu {
namespace {

constexpr float kFloat16Most = 65504.0F, kFloat32Most = 3.4028234e38F;

// The product of x [size] and the Hadamard matrix; nothing where size is no power of two. Divided by 2 ** floor(k / 2),
// for the inverse by 2 ** ceil(k / 2): exact, so that a sum with it is rounded alike, joined or apart.
inline void turn_group(float* x, long size, bool inverse) {
    if (size & (size - 1)) return;
    long stages = 0;
    for (long step = 1; step < size; step *= 2, ++stages) {
        for (long first = 0; first < size; first += 2 * step) {
            for (long i = first; i < first + step; ++i) {
                const float low = x[i], high = x[i + step];
                x[i] = low + high;
                x[i + step] = low - high;
            }
        }
    }
    const float unit = 1.0F / static_cast<float>(1L << ((stages + inverse) / 2));
    for (long i = 0; i < size; ++i) x[i] *= unit;
}

inline long group_size(long first, long count) { return count - first < kGroup ? count - first : kGroup; }

// Of one row; there are some for each token, and none for each of its keys.
__attribute__((noinline)) void turn_groups(float* x, long count, bool inverse) {
    for (long first = 0; first < count; first += kGroup) turn_group(x + first, group_size(first, count), inverse);
}

// Codes of a whole group to numbers: byte j has the code of j in its low half, that of j + kGroup / 2 in the other.
inline void widen_group(const uint8_t* codes, Floats scale, Floats least, float* to) {
    using Bytes = uint8_t __attribute__((vector_size(kGroup / 2)));
    Bytes both;
    __builtin_memcpy(&both, codes, sizeof both);
    const Bytes halves[2] = {both & 15, both >> 4};
    Int8 numbers[kGroup];
    __builtin_memcpy(numbers, halves, sizeof halves);
#pragma GCC unroll 8
    for (long i = 0; i < kGroup; i += kLanes) store(to + i, fma(load(numbers + i), scale, least));
}

// Scale and minimum of each group in float32, to[2 * groups]. Vectors are read from the row's end: what is read twice
// stands before, and nothing behind the row is touched.
inline void widen_factors(const uint8_t* row, long count, float* to) {
    const long halves = (count + kGroup - 1) / kGroup * 2, bytes = int4_row_bytes(count);
    float last[kLanes];
    long left = halves;
    for (; left > 0 && bytes - 2 * (halves - left) >= 2 * kLanes; left -= kLanes) {
        const Floats some = load(reinterpret_cast<const Float16*>(row + bytes - 2 * (halves - left)) - kLanes);
        if (left >= kLanes) {
            store(to + left - kLanes, some);
        } else {
            store(last, some);
            for (long i = 0; i < left; ++i) to[i] = last[kLanes - left + i];
        }
    }
    if (left <= 0) return;
    Float16 few[kLanes] = {};  // a row that is shorter than a vector
    __builtin_memcpy(few, row + count / 2, static_cast<size_t>(2 * left));
    store(last, load(few));
    for (long i = 0; i < left; ++i) to[i] = last[i];
}

// A row's numbers, still turned, padded with zeros to `width`.
inline void widen(const Int4* from, float* to, long count, long width) {
    const uint8_t* const row = reinterpret_cast<const uint8_t*>(from);
    float factors[kMostInt4 / kGroup * 2];
    widen_factors(row, count, factors);
    const float* own = factors;
    for (long first = 0; first < count; first += kGroup, own += 2) {
        const long size = group_size(first, count);
        if (size == kGroup) {
            widen_group(row + first / 2, splat(own[0]), splat(own[1]), to + first);
            continue;
        }
        uint8_t codes[kGroup / 2] = {};  // of a whole group: the last one's halves are moved to where its are
        float numbers[kGroup];
        __builtin_memcpy(codes, row + first / 2, static_cast<size_t>(size / 2));
        widen_group(codes, splat(own[0]), splat(own[1]), numbers);
        for (long i = 0; i < size / 2; ++i) to[first + i] = numbers[i];
        for (long i = size / 2; i < size; ++i) to[first + i] = numbers[kGroup / 2 + i - size / 2];
        for (long i = first + size; i < width; ++i) to[i] = 0.0F;
    }
}

inline float wide(Float16 x) {
    Float16 pair[kLanes] = {x};
    float all[kLanes];
    store(all, load(pair));
    return all[0];
}

// One group of `size` values, turned by now: its codes, its scale and its minimum.
inline void store_group(const float* x, long size, uint8_t* codes, uint8_t* factors) {
    float low = x[0], high = x[0];
    bool finite = true;
    for (long i = 0; i < size; ++i) {
        finite &= x[i] >= -kFloat32Most && x[i] <= kFloat32Most;
        low = x[i] < low ? x[i] : low;
        high = x[i] > high ? x[i] : high;
    }
    if (!finite) low = high = 0.0F;
    const auto held = [](float number) { return number > kFloat16Most ? kFloat16Most : number; };
    Float16 least, scale;
    narrow(held(low < -kFloat16Most ? -kFloat16Most : low + 0.0F), &least);
    const float from = wide(least), step = (high - from) / 15.0F;
    narrow(held(step < 0.0F ? 0.0F : step), &scale);
    const float unit = wide(scale), magic = 12582912.0F;  // see exp_of()
    uint8_t all[kGroup];
    for (long i = 0; i < size; ++i) {
        float steps = finite && unit > 0.0F ? (x[i] - from) / unit : 0.0F;
        steps = steps < 0.0F ? 0.0F : steps > 15.0F ? 15.0F : steps;
        all[i] = static_cast<uint8_t>(bits_of(steps + magic) & 15);
    }
    for (long i = 0; i < size / 2; ++i) codes[i] = static_cast<uint8_t>(all[i] | all[i + size / 2] << 4);
    if (!finite) least.bits = scale.bits = 0x7E00;
    __builtin_memcpy(factors, &scale, sizeof scale);
    __builtin_memcpy(factors + sizeof scale, &least, sizeof least);
}

template <typename E>
void to_int4(const void* from, long head_dim, void* row) {
    uint8_t* const to = static_cast<uint8_t*>(row);
    for (long first = 0; first < head_dim; first += kGroup) {
        const long size = group_size(first, head_dim);
        float group[kGroup + kLanes];
        widen(static_cast<const E*>(from) + first, group, size, size);
        turn_group(group, size, false);
        store_group(group, size, to + first / 2, to + head_dim / 2 + first / kGroup * 4);
    }
}

}  // namespace
}  // namespace quintet::cpu
