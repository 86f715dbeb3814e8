// Needs of whoever includes it: kLanes, Floats, Ints (uint32_t), Halves and Words (int16_t and int32_t, signed, of the
// same bytes), Doubles (kLanes of them), Mask, and the few functions on them that the compiler's vectors lack.
#pragma once

#include "cpu/kernels/attention_math.h"  // exp_of

namespace quintet::cpu {
namespace {

constexpr float kNever = -__builtin_inff();
constexpr long kStretch = 1024;  // elements between two looks at the largest so far
constexpr long kSumLanes = 16;
constexpr long kChains = 4;      // of random words at once: each waits for itself
constexpr uint32_t kParity = 0x1BD11BDA;

static_assert(kSamplingBlock % (2 * kChains * kLanes) == 0);

template <typename To, typename From>
inline To read_as(const From* at) {
    To x;
    __builtin_memcpy(&x, at, sizeof x);
    return x;
}

// ------------------------------------------------------------------------------------------------------------- greedy

template <typename Signed>
constexpr Signed kMost = static_cast<Signed>((1U << (8 * sizeof(Signed) - 1)) - 1);

template <typename Signed, typename Lanes>
inline Lanes key_of(Lanes x, Lanes& size) {
    const Lanes negative = x >> static_cast<Signed>(8 * sizeof(Signed) - 1);  // -1 or 0; both zeros have the key 0
    size = x & kMost<Signed>;
    return (size ^ negative) - negative;
}

template <typename Signed>
inline long first_of(const Signed* row, long count, Signed key) {
    for (long i = 0; i < count; ++i) {
        const int size = row[i] & kMost<Signed>;
        if ((row[i] < 0 ? -size : size) == key) return i;
    }
    return -1;
}

// Vectors at i, i + n, ... of a row; the last one is filled up with its first element.
template <typename Lanes, typename Signed>
inline Lanes some_of(const Signed* row, long count, long i) {
    constexpr long lanes = sizeof(Lanes) / sizeof(Signed);
    if (count - i >= lanes) return read_as<Lanes>(row + i);
    Signed rest[lanes];
    for (long j = 0; j < lanes; ++j) rest[j] = row[i + j < count ? i + j : i];
    return read_as<Lanes>(rest);
}

template <typename Signed, typename Lanes>
inline int highest(Lanes x) {
    Signed each[sizeof(Lanes) / sizeof(Signed)];
    __builtin_memcpy(each, &x, sizeof x);
    int most = each[0];
    for (const int number : each) most = number > most ? number : most;
    return most;
}

template <typename Lanes, typename Signed>
Largest largest(const Signed* row, long count) {
    constexpr long lanes = sizeof(Lanes) / sizeof(Signed);
    int key = -kMost<Signed> - 1;
    long from = 0;  // the first stretch that holds the largest
    Lanes sizes{};
    for (long first = 0; first < count; first += kStretch) {
        const long end = count - first < kStretch ? count : first + kStretch;
        Lanes own, keys = key_of<Signed>(some_of<Lanes>(row, end, first), own);
        for (long i = first; i < end; i += lanes) {
            keys = larger(keys, key_of<Signed>(some_of<Lanes>(row, end, i), own));
            sizes = larger(sizes, own);
        }
        const int most = highest<Signed>(keys);
        if (most > key) {
            key = most;
            from = first;
        }
    }
    const long at = from + first_of(row + from, count - from, static_cast<Signed>(key));
    return {key, static_cast<uint32_t>(highest<Signed>(sizes)), at};
}

Largest largest16(const int16_t* row, long count) { return largest<Halves>(row, count); }
Largest largest32(const int32_t* row, long count) { return largest<Words>(row, count); }

// ------------------------------------------------------------------------------------------------------------- maxima

// The block at `first`, where it is whole; else a copy that ends in tokens that nobody can draw.
inline const float* block_of(const float* row, long count, long first, float* copy) {
    if (count - first >= kSamplingBlock) return row + first;
    for (long i = 0; i < kSamplingBlock; ++i) copy[i] = first + i < count ? row[first + i] : kNever;
    return copy;
}

bool maxima(const float* row, long count, float* out) {
    float copy[kSamplingBlock];
    Mask bad = no_lane();
    for (long first = 0; first < count; first += kSamplingBlock) {
        const float* const block = block_of(row, count, first, copy);
        Floats most = splat(kNever), other = most;
        for (long i = 0; i < kSamplingBlock; i += 2 * kLanes) {
            const Floats a = load(block + i), b = load(block + i + kLanes);
            most = larger(most, a);
            other = larger(other, b);
            bad = either(bad, unordered(a, b));
        }
        out[first / kSamplingBlock] = largest_of(larger(most, other));
    }
    return !any(bad);
}

// --------------------------------------------------------------------------------------------------------------- sums

struct Sums {
    Doubles lanes[kSumLanes / kLanes];
};

inline double total(const Sums& sums) {
    double sum = 0.0;
    for (const Doubles& part : sums.lanes) {
        for (long i = 0; i < kLanes; ++i) sum += part[i];
    }
    return sum;
}

// body(i, x, n) for each vector of a row, in order; the last may hold n < kLanes tokens and -inf after them.
template <typename Body>
inline double summed(const float* row, long count, const Body& body) {
    Sums sums{};
    long first = 0;
    for (; first + kSumLanes <= count; first += kSumLanes) {
        for (long j = 0; j < kSumLanes / kLanes; ++j) {
            const long i = first + j * kLanes;
            sums.lanes[j] += __builtin_convertvector(body(i, load(row + i), kLanes), Doubles);
        }
    }
    float rest[kSumLanes];
    for (long i = 0; i < kSumLanes; ++i) rest[i] = first + i < count ? row[first + i] : kNever;
    for (long j = 0; j < kSumLanes / kLanes; ++j) {
        const long i = first + j * kLanes, left = count - i;
        if (left > 0) {
            const long n = left < kLanes ? left : kLanes;
            sums.lanes[j] += __builtin_convertvector(body(i, load(rest + j * kLanes), n), Doubles);
        }
    }
    return total(sums);
}

double exp_sum(const float* row, long count, float largest) {
    const Floats top = splat(largest);
    return summed(row, count, [&](long, Floats x, long) { return exp_of(x - top); });
}

inline void put(float* at, Floats x, long n) {
    if (n == kLanes) {
        __builtin_memcpy(at, &x, sizeof x);
    } else {
        for (long i = 0; i < n; ++i) at[i] = x[i];
    }
}

double masses(const float* row, long count, float temperature, float least, float largest, float* mass) {
    const Floats by = splat(temperature), bar = splat(least), top = splat(largest), never = splat(kNever);
    return summed(row, count, [&](long i, Floats x, long n) {
        const Floats scaled = x / by;
        const Floats each = exp_of((scaled >= bar ? scaled : never) - top);
        put(mass + i, each, n);
        return each;
    });
}

// -------------------------------------------------------------------------------------------------------------- random

// The words of tokens 2i and 2i + 1 for counters i, kLanes in each chain: threefry2x32 with 20 rounds.
inline void random_words(const NoiseOf& noise, uint32_t counter, Ints (&even)[kChains], Ints (&odd)[kChains]) {
    const uint32_t schedule[3] = {noise.key[0], noise.key[1], noise.key[0] ^ noise.key[1] ^ kParity};
    for (long c = 0; c < kChains; ++c) {
        even[c] = Ints{} + (noise.position + schedule[0]);
        odd[c] = lane_numbers() + (counter + static_cast<uint32_t>(c * kLanes) + schedule[1]);
    }
    const auto round = [&]<int by>(Rotation<by> rotation) {
        for (long c = 0; c < kChains; ++c) {
            even[c] += odd[c];
            odd[c] = rotate(odd[c], rotation) ^ even[c];
        }
    };
    const auto inject = [&](uint32_t group) {
        for (long c = 0; c < kChains; ++c) {
            even[c] += schedule[group % 3];
            odd[c] += schedule[(group + 1) % 3] + group;
        }
    };
    const auto four = [&] { round(Rotation<13>{}), round(Rotation<15>{}), round(Rotation<26>{}), round(Rotation<6>{}); };
    const auto more = [&] { round(Rotation<17>{}), round(Rotation<29>{}), round(Rotation<16>{}), round(Rotation<24>{}); };
    four(), inject(1), more(), inject(2), four(), inject(3), more(), inject(4), four(), inject(5);
}

long hits(const float* row, long count, long first, const NoiseOf& noise, const Bar& bar, Hit* found) {
    constexpr long tokens = 2 * kChains * kLanes;
    float copy[kSamplingBlock];
    const float* const block = block_of(row, count, first, copy);
    long n = 0;
    for (long start = 0; start < kSamplingBlock; start += tokens) {
        Mask live = no_lane();
        for (long i = 0; i < tokens; i += kLanes) live = either(live, reaches(load(block + start + i), bar.logit));
        if (!any(live)) continue;
        Ints words[2][kChains];
        random_words(noise, static_cast<uint32_t>((first + start) / 2), words[0], words[1]);
        live = no_lane();
        for (long c = 0; c < kChains; ++c) {
            live = either(live, either(reaches(words[0][c], bar.word), reaches(words[1][c], bar.word)));
        }
        if (!any(live)) continue;
        uint32_t flat[2][kChains * kLanes];
        __builtin_memcpy(flat, words, sizeof flat);
        for (long i = 0; i < tokens; ++i) {
            const uint32_t word = flat[i % 2][i / 2];
            if (word >= bar.word && block[start + i] >= bar.logit && first + start + i < count) {
                found[n++] = {static_cast<int32_t>(first + start + i), word};
            }
        }
    }
    return n;
}

}  // namespace
}  // namespace quintet::cpu

#define QUINTET_SAMPLING_KERNELS {largest16, largest32, maxima, exp_sum, masses, hits}
