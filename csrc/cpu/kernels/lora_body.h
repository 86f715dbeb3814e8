// The loops of lora.h, written once over the vectors of one instruction set. After vectors_*.h.
#pragma once

#include "cpu/kernels/lora.h"

namespace quintet::cpu {
namespace {

constexpr long kWide = 2 * kLanes;             // numbers that are loaded at once
constexpr long kLine = 64;                     // bytes in a cache line
constexpr long kMostRows = 8, kMostWides = 4;  // of a tile: enough chains for one token alone
constexpr long kTokens = 4;                    // of a tile
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr long kSums = 16;  // vectors of sums in a tile, of 32 registers
#else
constexpr long kSums = 8;  // of 16
#endif
constexpr long kStreams = 4;                         // rows of B that are read side by side
constexpr long kPacked = 32, kMostPackedRows = 64;  // columns and rows of B that are widened for several tiles: 8 KiB

// kWide numbers in two vectors: of bfloat16 those with even and those with odd numbers, which costs least.
struct Wide {
    Floats first, second;
};

template <typename E>
inline Wide load_wide(const E* at) {
    return {load(at), load(at + kLanes)};
}
inline Wide load_wide(const Bfloat16* at) {  // the first of a pair is the lower half: every processor here is little-endian
    Ints pairs;
    __builtin_memcpy(&pairs, at, sizeof pairs);
    return {(Floats)(pairs << 16), (Floats)(pairs & 0xFFFF0000)};
}

template <typename E>
inline void store_wide(E* at, const Wide& x) {
    store(at, x.first);
    store(at + kLanes, x.second);
}
inline void store_wide(Bfloat16* at, const Wide& x) {
    const Ints pairs = (Ints)rounded(x.first, Bfloat16{}) >> 16 | (Ints)rounded(x.second, Bfloat16{});
    __builtin_memcpy(at, &pairs, sizeof pairs);
}

// The first `count` numbers, then zeros.
template <bool Whole, typename E>
inline Wide load_first(const E* at, [[maybe_unused]] long count) {
    if constexpr (Whole) {
        return load_wide(at);
    } else {
        E some[kWide] = {};
        __builtin_memcpy(some, at, static_cast<size_t>(count) * sizeof(E));
        return load_wide(some);
    }
}

template <typename E>
inline void store_first(E* at, const Wide& x, long count) {
    E some[kWide];
    store_wide(some, x);
    __builtin_memcpy(at, some, static_cast<size_t>(count) * sizeof(E));
}

inline Wide grown(Floats by, const Wide& x, const Wide& sum) { return {fma(by, x.first, sum.first), fma(by, x.second, sum.second)}; }
inline Wide added(const Wide& a, const Wide& b) { return {a.first + b.first, a.second + b.second}; }
inline Floats dot(const Wide& a, const Wide& b, Floats sum) { return fma(a.second, b.second, fma(a.first, b.first, sum)); }

// How many of `most` a tile has beside so many tokens: a power of two.
constexpr long beside(long tokens, long most, long sums) {
    while (most > 1 && most * sums * tokens > kSums) most /= 2;
    return most;
}

template <typename E, long Tokens, long Rows, bool Whole>
inline void grow_down(Floats (&sums)[Rows][Tokens], const LoraDown& call, const E* a, long k) {
    const long left = call.inputs - k;
    const auto x = [&](long t) { return load_first<Whole>(static_cast<const E*>(call.x[t]) + k, left); };
    const auto row = [&](long r) {
        const E* const at = a + r * call.inputs + k;
        if constexpr (Whole && Tokens > 1) __builtin_prefetch(at + Rows * call.inputs);  // the next tile's: see grow_up
        return load_first<Whole>(at, left);
    };
    if constexpr (Rows >= Tokens) {  // what there is less of stays in registers
        Wide xs[Tokens];
#pragma GCC unroll 8
        for (long t = 0; t < Tokens; ++t) xs[t] = x(t);
#pragma GCC unroll 8
        for (long r = 0; r < Rows; ++r) {
            const Wide each = row(r);
#pragma GCC unroll 8
            for (long t = 0; t < Tokens; ++t) sums[r][t] = dot(each, xs[t], sums[r][t]);
        }
    } else {
        Wide rows[Rows];
#pragma GCC unroll 8
        for (long r = 0; r < Rows; ++r) rows[r] = row(r);
#pragma GCC unroll 8
        for (long t = 0; t < Tokens; ++t) {
            const Wide each = x(t);
#pragma GCC unroll 8
            for (long r = 0; r < Rows; ++r) sums[r][t] = dot(rows[r], each, sums[r][t]);
        }
    }
}

template <typename E, long Tokens, long Rows>
inline void down_tile(const LoraDown& call, long row) {
    Floats sums[Rows][Tokens] = {};
    const E* const a = static_cast<const E*>(call.a) + row * call.inputs;
    long k = 0;
    for (; k + kWide <= call.inputs; k += kWide) grow_down<E, Tokens, Rows, true>(sums, call, a, k);
    if (k < call.inputs) grow_down<E, Tokens, Rows, false>(sums, call, a, k);
    for (long r = 0; r < Rows; ++r) {
        for (long t = 0; t < Tokens; ++t) call.low[t][row + r] = sum_across(sums[r][t]);
    }
}

template <typename E, long Tokens, long Rows>
inline void down_rows(const LoraDown& call, long row) {
    for (; row + Rows <= call.rows; row += Rows) down_tile<E, Tokens, Rows>(call, row);
    if constexpr (Rows > 1) down_rows<E, Tokens, Rows / 2>(call, row);
}

template <typename E, long Tokens>
inline void down_tiles(const LoraDown& call) {
    if constexpr (Tokens > 1) {
        if (call.tokens < Tokens) return down_tiles<E, Tokens - 1>(call);
    }
    down_rows<E, Tokens, beside(Tokens, kMostRows, 1)>(call, 0);
}

// The call for `count` of its tokens.
template <typename Call>
inline Call part_of(const Call& call, long first, long count) {
    Call part = call;
    part.tokens = count;
    for (long t = 0; t < count; ++t) {
        part.low[t] = call.low[first + t];
        if constexpr (requires { part.x; }) part.x[t] = call.x[first + t];
        if constexpr (requires { part.y; }) part.y[t] = call.y[first + t];
    }
    return part;
}

template <typename E>
void down(const LoraDown& call) {
    for (long t = 0; t < call.tokens; t += kTokens) {
        const long left = call.tokens - t;
        down_tiles<E, kTokens>(part_of(call, t, left < kTokens ? left : kTokens));
    }
}

// Tokens beside columns of B that were widened: [rows, kPacked].
template <typename E, long Tokens, long Wides>
inline void up_tile(const LoraUp& call, long column, const float* b) {
    Wide sums[Tokens][Wides] = {};
    for (long r = 0; r < call.rows; ++r) {
        Wide row[Wides];
#pragma GCC unroll 4
        for (long w = 0; w < Wides; ++w) row[w] = load_wide(b + r * kPacked + w * kWide);
#pragma GCC unroll 4
        for (long t = 0; t < Tokens; ++t) {
            const Floats low = splat(call.low[t][r]);
#pragma GCC unroll 4
            for (long w = 0; w < Wides; ++w) sums[t][w] = grown(low, row[w], sums[t][w]);
        }
    }
#pragma GCC unroll 4
    for (long t = 0; t < Tokens; ++t) {
#pragma GCC unroll 4
        for (long w = 0; w < Wides; ++w) {
            E* const at = static_cast<E*>(call.y[t]) + column + w * kWide;
            store_wide(at, added(load_wide(at), sums[t][w]));
        }
    }
}

template <typename E, long Tokens>
inline void up_packed(const LoraUp& call, long column, const float* b) {
    if constexpr (Tokens > 1) {
        if (call.tokens < Tokens) return up_packed<E, Tokens - 1>(call, column, b);
    }
    constexpr long kAll = kPacked / kWide, kMost = beside(Tokens, kMostWides, 2), kWides = kMost < kAll ? kMost : kAll;
#pragma GCC unroll 4
    for (long w = 0; w < kAll; w += kWides) up_tile<E, Tokens, kWides>(call, column + w * kWide, b + w * kWide);
}

// Rows of B, from row r on, added to `sums` [Tokens] of the columns at `b`.
template <typename E, long Tokens, long Rows, bool Whole>
inline void grow_up(float* sums, const LoraUp& call, const E* b, long r, long left) {
    Wide total[Tokens];
#pragma GCC unroll 4
    for (long t = 0; t < Tokens; ++t) total[t] = load_wide(sums + t * kWide);
#pragma GCC unroll 8
    for (long i = 0; i < Rows; ++i) {
        const Wide row = load_first<Whole>(b + i * call.stride, left);
        // The next rows, while sums take the time: for one token the processor's own prefetching is as fast.
        if constexpr (Whole && Tokens > 1) __builtin_prefetch(b + (i + Rows) * call.stride);
#pragma GCC unroll 4
        for (long t = 0; t < Tokens; ++t) total[t] = grown(splat(call.low[t][r + i]), row, total[t]);
    }
#pragma GCC unroll 4
    for (long t = 0; t < Tokens; ++t) store_wide(sums + t * kWide, total[t]);
}

template <typename E, long Tokens, long Rows>
inline void up_rows(float* sums, const LoraUp& call, long r) {
    const E* const b = static_cast<const E*>(call.b) + r * call.stride;
    long column = 0;
    for (; column + kWide <= call.columns; column += kWide) {
        grow_up<E, Tokens, Rows, true>(sums + column * Tokens, call, b + column, r, 0);
    }
    if (column < call.columns) {
        grow_up<E, Tokens, Rows, false>(sums + column * Tokens, call, b + column, r, call.columns - column);
    }
}

// Few tokens: reading B is what takes time. A few rows at once are read along all columns, as the processor's own
// prefetching follows them; sums wait in the first cache meanwhile.
template <typename E, long Tokens>
inline void up_direct(const LoraUp& call) {
    if constexpr (Tokens > 1) {
        if (call.tokens < Tokens) return up_direct<E, Tokens - 1>(call);
    }
    alignas(64) float sums[Tokens * (kLoraColumns + kWide)];  // [columns / kWide, Tokens, kWide]
    __builtin_memset(sums, 0, static_cast<size_t>((call.columns + kWide - 1) / kWide * kWide * Tokens) * sizeof(float));
    long r = 0;
    if constexpr (Tokens == 1) {  // whose sums leave registers for more rows
        for (; r + 2 * kStreams <= call.rows; r += 2 * kStreams) up_rows<E, Tokens, 2 * kStreams>(sums, call, r);
    }
    for (; r + kStreams <= call.rows; r += kStreams) up_rows<E, Tokens, kStreams>(sums, call, r);
    for (; r < call.rows; ++r) up_rows<E, Tokens, 1>(sums, call, r);
    for (long t = 0; t < Tokens; ++t) {
        E* const y = static_cast<E*>(call.y[t]);
        const float* const sum = sums + t * kWide;
        long column = 0;
        for (; column + kWide <= call.columns; column += kWide) {
            store_wide(y + column, added(load_wide(y + column), load_wide(sum + column * Tokens)));
        }
        if (const long left = call.columns - column; left > 0) {
            const Wide last = added(load_first<false>(y + column, left), load_wide(sum + column * Tokens));
            store_first(y + column, last, left);
        }
    }
}

// Asks for what the next tiles are added to: rows of y may lie in one set of the cache, which holds few of them.
template <typename E>
inline void prefetch_outputs(const LoraUp& call, long column) {
    constexpr long kBytes = kPacked * static_cast<long>(sizeof(E));
    for (long t = 0; t < call.tokens; ++t) {
        const char* const y = static_cast<const char*>(call.y[t]) + column * static_cast<long>(sizeof(E));
        for (long byte = 0; byte < kBytes; byte += kLine) __builtin_prefetch(y + byte, 1);
    }
}

template <typename E>
void up(const LoraUp& call) {
    long column = 0;
    LoraUp parts[kLoraTokens / kTokens];
    if (call.tokens > kTokens && call.rows <= kMostPackedRows) {
        alignas(64) float b[kMostPackedRows * kPacked];
        const long count = (call.tokens + kTokens - 1) / kTokens;
        for (long i = 0; i < count; ++i) {
            const long left = call.tokens - i * kTokens;
            parts[i] = part_of(call, i * kTokens, left < kTokens ? left : kTokens);
        }
        for (; column + kPacked <= call.columns; column += kPacked) {
            const E* const rows = static_cast<const E*>(call.b) + column;
            for (long r = 0; r < call.rows; ++r) {
                const E* const row = rows + r * call.stride;
#pragma GCC unroll 4
                for (long w = 0; w < kPacked; w += kWide) store_wide(b + r * kPacked + w, load_wide(row + w));
                __builtin_prefetch(row + kPacked);  // rows are far apart, which the processor's own prefetching does not follow
            }
            for (long i = 0; i < count; ++i) {
                if (i + 1 < count) prefetch_outputs<E>(parts[i + 1], column);
                up_packed<E, kTokens>(parts[i], column, b);
            }
        }
    }
    for (long t = 0; column < call.columns && t < call.tokens; t += kTokens) {
        const long left = call.tokens - t;
        LoraUp part = part_of(call, t, left < kTokens ? left : kTokens);
        part.b = static_cast<const E*>(call.b) + column;
        part.columns -= column;
        for (long i = 0; i < part.tokens; ++i) part.y[i] = static_cast<E*>(part.y[i]) + column;
        up_direct<E, kTokens>(part);
    }
}

template <typename E>
void scale(const LoraScale& call) {
    for (long i = 0; i < call.columns; i += kLanes) {
        const long left = call.columns - i;
        E* const y = static_cast<E*>(call.y) + i;
        store_some(y, fma(load_some(y, left), load_some(call.gains + i, left), load_some(call.offsets + i, left)), left);
    }
}

}  // namespace
}  // namespace quintet::cpu

#define QUINTET_LORA_KERNELS \
    {{{down<float>, down<Bfloat16>, down<Float16>}}, \
     {{up<float>, up<Bfloat16>, up<Float16>}},       \
     {{scale<float>, scale<Bfloat16>, scale<Float16>}}}
