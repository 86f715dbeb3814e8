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
constexpr long kDirect = kSums / 4;                  // tokens of a tile that reads B where it lies: a tile is a line wide
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

template <bool Whole, typename E>
inline void store_first(E* at, const Wide& x, [[maybe_unused]] long count) {
    if constexpr (Whole) {
        store_wide(at, x);
    } else {
        E some[kWide];
        store_wide(some, x);
        __builtin_memcpy(at, some, static_cast<size_t>(count) * sizeof(E));
    }
}

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
    const auto row = [&](long r) { return load_first<Whole>(a + r * call.inputs + k, left); };
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

// Rows of B where they lie, from a column on.
template <typename E, bool Whole>
struct Direct {
    const E* at;
    long stride, left;

    Wide operator()(long r, long w) const { return load_first<Whole>(at + r * stride + w * kWide, left); }
    // The next tile's: rows are far apart, which the processor's own prefetching does not follow.
    void prefetch(long r, long wides) const {
        const char* const next = reinterpret_cast<const char*>(at + r * stride + wides * kWide);
        for (long i = 0; i < wides * kWide * static_cast<long>(sizeof(E)); i += kLine) __builtin_prefetch(next + i);
    }
};

// Rows of B that were widened.
struct Packed {
    const float* at;  // [rows, kPacked]

    Wide operator()(long r, long w) const { return load_wide(at + r * kPacked + w * kWide); }
    void prefetch(long, long) const {}
};

template <typename E, long Tokens, long Wides, bool Whole, typename Rows>
inline void up_tile(const LoraUp& call, long column, const Rows& b) {
    Wide sums[Tokens][Wides] = {};
    for (long r = 0; r < call.rows; ++r) {
        Wide row[Wides];
#pragma GCC unroll 4
        for (long w = 0; w < Wides; ++w) row[w] = b(r, w);
        b.prefetch(r, Wides);
#pragma GCC unroll 4
        for (long t = 0; t < Tokens; ++t) {
            const Floats low = splat(call.low[t][r]);
#pragma GCC unroll 4
            for (long w = 0; w < Wides; ++w) {
                sums[t][w] = {fma(low, row[w].first, sums[t][w].first), fma(low, row[w].second, sums[t][w].second)};
            }
        }
    }
    const long left = call.columns - column;
#pragma GCC unroll 4
    for (long t = 0; t < Tokens; ++t) {
#pragma GCC unroll 4
        for (long w = 0; w < Wides; ++w) {
            E* const at = static_cast<E*>(call.y[t]) + column + w * kWide;
            const Wide y = load_first<Whole>(at, left);
            store_first<Whole>(at, {y.first + sums[t][w].first, y.second + sums[t][w].second}, left);
        }
    }
}

template <typename E, long Tokens, long Wides>
inline void up_columns(const LoraUp& call, long column) {
    const E* const b = static_cast<const E*>(call.b);
    for (; column + Wides * kWide <= call.columns; column += Wides * kWide) {
        up_tile<E, Tokens, Wides, true>(call, column, Direct<E, true>{b + column, call.stride, 0});
    }
    if constexpr (Wides > 1) {
        up_columns<E, Tokens, Wides / 2>(call, column);
    } else if (column < call.columns) {
        up_tile<E, Tokens, 1, false>(call, column, Direct<E, false>{b + column, call.stride, call.columns - column});
    }
}

template <typename E, long Tokens>
inline void up_direct(const LoraUp& call, long column) {
    if constexpr (Tokens > 1) {
        if (call.tokens < Tokens) return up_direct<E, Tokens - 1>(call, column);
    }
    up_columns<E, Tokens, beside(Tokens, kMostWides, 2)>(call, column);
}

template <typename E, long Tokens>
inline void up_packed(const LoraUp& call, long column, const float* b) {
    if constexpr (Tokens > 1) {
        if (call.tokens < Tokens) return up_packed<E, Tokens - 1>(call, column, b);
    }
    constexpr long kAll = kPacked / kWide, kMost = beside(Tokens, kMostWides, 2), kWides = kMost < kAll ? kMost : kAll;
#pragma GCC unroll 4
    for (long w = 0; w < kAll; w += kWides) {
        up_tile<E, Tokens, kWides, true>(call, column + w * kWide, Packed{b + w * kWide});
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
            const Direct<E, true> rows{static_cast<const E*>(call.b) + column, call.stride, 0};
            for (long r = 0; r < call.rows; ++r) {
#pragma GCC unroll 4
                for (long w = 0; w < kPacked / kWide; ++w) store_wide(b + r * kPacked + w * kWide, rows(r, w));
                rows.prefetch(r, kPacked / kWide);
            }
            for (long i = 0; i < count; ++i) {
                if (i + 1 < count) prefetch_outputs<E>(parts[i + 1], column);
                up_packed<E, kTokens>(parts[i], column, b);
            }
        }
    }
    for (long t = 0; column < call.columns && t < call.tokens; t += kDirect) {
        const long left = call.tokens - t;
        up_direct<E, kDirect>(part_of(call, t, left < kDirect ? left : kDirect), column);
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
