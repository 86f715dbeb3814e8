// Attention of bfloat16 in pairs of elements: K in pairs along the row, weights and V in pairs of positions 2n, 2n + 1.
// Needs what attention_body.h says under QUINTET_DOT.
//
// Few rows read K and V where they stand; more read a copy of the block in the order in which dot() takes it. A lane is
// given the same pairs in the same order in both, so that the bits are the same. Pairs that one way adds and the other
// does not have weights of 0: dot() takes subnormal sums for 0, but none is left after a row's own first pair, and the
// sign of a 0 is lost in the result.
#pragma once

#include "cpu/kernels/attention_scores.h"
#include "cpu/kernels/attention_weights.h"

namespace quintet::cpu {
namespace {

// Rows from which on the copies pay. On Zen 5, 8 rows: 0.7 of the time without them, 16: 0.8, 32 and more: 1.0.
constexpr long kManyPairs = 24;

struct Widths {
    long k, v;  // numbers of a row of K, and of V: fewer where V is the beginning of K; both of whole pairs of vectors
};

// ------------------------------------------------------------------------------------------------------ scores

// Turns K, kLanes rows at a time: of [kLanes rows][vectors][lanes] pairs it makes [lanes][vectors][kLanes rows].
// The columns outside `span` stay what they are.
__attribute__((noinline)) void turn_keys(const Bfloat16* const* k, long width, Range span, Bfloat16* to,
                                         const Bfloat16* const* ahead, long ahead_width) {
    const long vectors = width / (2 * kLanes);
    for (long c = span.first / kLanes * kLanes; c < span.last; c += kLanes) {
        for (long i = 0; ahead && i < kLanes; ++i) fetch(ahead[c + i], ahead_width);
        for (long i = 0; i < vectors; ++i) turn(k + c, 2 * kLanes * i, to + c * width + 2 * kLanes * i, width);
    }
}

// The sums of Rows rows and Columns times kLanes columns in the lanes `even` and `odd` of score_tile(), added up.
template <long Rows, long Columns>
inline void two_lanes(const Bfloat16* q, const Bfloat16* k, long width, long even, long odd,
                      Floats (&to)[Rows * Columns]) {
    Floats sums[2][Rows * Columns] = {};
    const long lanes[2] = {even, odd};
    for (long i = 0; i < width; i += 2 * kLanes) {
#pragma GCC unroll 2
        for (long n = 0; n < 2; ++n) {
            Pairs keys[Columns];
#pragma GCC unroll 2
            for (long c = 0; c < Columns; ++c) keys[c] = load_pairs(k + (c * kLanes + lanes[n]) * width + i);
#pragma GCC unroll 4
            for (long r = 0; r < Rows; ++r) {
                const Pairs query = splat_pair(q + r * width + i + 2 * lanes[n]);
#pragma GCC unroll 2
                for (long c = 0; c < Columns; ++c) {
                    sums[n][r * Columns + c] = dot(sums[n][r * Columns + c], keys[c], query);
                }
            }
        }
    }
#pragma GCC unroll 8
    for (long i = 0; i < Rows * Columns; ++i) to[i] = sums[0][i] + sums[1][i];
}

// What score_tile() makes of them: its lanes are vectors here, and its tree of sums is add_across()'s.
template <long Rows, long Columns>
inline void turned_tile(const Bfloat16* q, const Bfloat16* k, long width, float* scores) {
    constexpr long kQuarters = 4, kCount = Rows * Columns;
    Floats quarters[kQuarters][kCount];
#pragma GCC unroll 4
    for (long n = 0; n < kQuarters; ++n) {
        Floats rest[kCount];
        two_lanes<Rows, Columns>(q, k, width, 4 * n, 4 * n + 2, quarters[n]);
        two_lanes<Rows, Columns>(q, k, width, 4 * n + 1, 4 * n + 3, rest);
#pragma GCC unroll 8
        for (long i = 0; i < kCount; ++i) quarters[n][i] += rest[i];
    }
#pragma GCC unroll 8
    for (long i = 0; i < kCount; ++i) {
        store(scores + i / Columns * kAttentionBlock + i % Columns * kLanes,
              (quarters[0][i] + quarters[1][i]) + (quarters[2][i] + quarters[3][i]));
    }
}

template <long Rows>
inline void score_turned_rows(const Bfloat16* q, const Bfloat16* k, long width, Range span, float* scores) {
    long c = span.first / kLanes * kLanes;
    for (; c + kLanes < span.last; c += 2 * kLanes) turned_tile<Rows, 2>(q, k + c * width, width, scores + c);
    if (c < span.last) turned_tile<Rows, 1>(q, k + c * width, width, scores + c);
}

__attribute__((noinline)) void score_turned(const Bfloat16* q, long rows, const Bfloat16* k, long width,
                                            const Scratch& s) {
    for (long r = 0, together = 0; r < rows; r += together) {
        together = rows - r >= 4 ? 4 : rows - r >= 2 ? 2 : 1;
        const Range span = seen_by(s.seen + r, together);
        const Bfloat16* const first = q + r * width;
        float* const to = s.scores + r * kAttentionBlock;
        if (together == 4) score_turned_rows<4>(first, k, width, span, to);
        if (together == 2) score_turned_rows<2>(first, k, width, span, to);
        if (together == 1) score_turned_rows<1>(first, k, width, span, to);
    }
}

// ----------------------------------------------------------------------------------------------------- weights

// Weights of one row, relative to `best` and rounded; returns the sum of what they were rounded to, so that a row's
// shares of the values add up to one.
inline float round_weights(const float* scores, Range seen, float best, Bfloat16* weights) {
    constexpr uint32_t kLaneCount = kLanes;
    const uint32_t first = static_cast<uint32_t>(seen.first), count = static_cast<uint32_t>(seen.last - seen.first);
    const Floats shift = splat(best), zero = splat(0.0F);
    Floats sum = zero;
    Ints place = lane_numbers() - first;
    for (long i = 0; i < kAttentionBlock; i += 2 * kLanes, place += 2 * kLaneCount) {
        const Floats low = coarse_exp_of(load(scores + i) - shift);
        const Floats high = coarse_exp_of(load(scores + i + kLanes) - shift);
        const Pairs rounded = narrow_both(place < count ? low : zero, place + kLaneCount < count ? high : zero);
        sum = dot(sum, rounded, splat_ones());
        store_pairs(weights + i, rounded);
    }
    return sum_quickly(sum);
}

// As weigh(), of all rows, those too that see nothing here: rows that see different things are multiplied together.
__attribute__((noinline)) void weigh_pairs(const AttentionCall& call, long rows, Scratch& s) {
    for (long r = 0; r < rows; ++r) {
        const float highest = largest_quickly(raise(call, s.seen[r], s.scores + r * kAttentionBlock, s, r));
        s.raised[r] = highest > s.now.best[r] ? highest : s.now.best[r];
    }
    for (long r = 0; r < rows; r += kLanes) {
        const Floats best = load(s.raised + r);
        store(s.shrink + r, exp_of(load(s.now.best + r) - best));
        store(s.now.best + r, best);
    }
    for (long r = 0; r < rows; ++r) {
        s.raised[r] = round_weights(s.scores + r * kAttentionBlock, s.seen[r], s.now.best[r],
                                    s.weights + r * kAttentionBlock);
    }
    for (long r = 0; r < rows; r += kLanes) {
        store(s.now.total + r, fma(load(s.now.total + r), load(s.shrink + r), load(s.raised + r)));
    }
}

// ------------------------------------------------------------------------------------------------------ values

// V where it stands: positions beside each other are interleaved as they are read.
struct Standing {
    const Bfloat16* const* v;
    const Bfloat16* const* ahead;  // rows to ask for meanwhile, or null
    template <long Vectors>
    inline void load(long pair, long at, Pairs (&to)[Vectors]) const {
        const Bfloat16 *const even = v[2 * pair] + at, *const odd = v[2 * pair + 1] + at;
        const Bfloat16* const even_ahead = ahead ? ahead[2 * pair] + at : nullptr;
        const Bfloat16* const odd_ahead = ahead ? ahead[2 * pair + 1] + at : nullptr;
#pragma GCC unroll 8
        for (long i = 0; i < Vectors; i += 2) {
            if (ahead) {  // a line beside each that is read: many at once would fill the queue of misses
                fetch(even_ahead + i * kLanes, 2 * kLanes);
                fetch(odd_ahead + i * kLanes, 2 * kLanes);
            }
            interleave(even + i * kLanes, odd + i * kLanes, to[i], to[i + 1]);
        }
    }
};

// A copy of them, interleaved: [kAttentionBlock / 2, width] pairs.
struct Interleaved {
    const Bfloat16* v;
    long width;
    template <long Vectors>
    inline void load(long pair, long at, Pairs (&to)[Vectors]) const {
#pragma GCC unroll 8
        for (long i = 0; i < Vectors; ++i) to[i] = load_pairs(v + 2 * (pair * width + at + i * kLanes));
    }
};

// acc [Rows, Vectors * kLanes] = acc * shrink + weights @ v, one pair of positions after the other.
template <long Rows, long Vectors, typename Values>
inline void pair_tile(const Bfloat16* weights, const Values& v, long at, Range seen, const float* shrink, float* acc,
                      long width) {
    Floats sums[Rows * Vectors];
#pragma GCC unroll 16
    for (long r = 0; r < Rows; ++r) {
#pragma GCC unroll 16
        for (long i = 0; i < Vectors; ++i) {
            sums[r * Vectors + i] = load(acc + r * width + at + i * kLanes) * splat(shrink[r]);
        }
    }
    for (long pair = seen.first / 2; 2 * pair < seen.last; ++pair) {
        Pairs values[Vectors];
        v.load(pair, at, values);
#pragma GCC unroll 16
        for (long r = 0; r < Rows; ++r) {
            const Pairs weight = splat_pair(weights + r * kAttentionBlock + 2 * pair);
#pragma GCC unroll 16
            for (long i = 0; i < Vectors; ++i) sums[r * Vectors + i] = dot(sums[r * Vectors + i], values[i], weight);
        }
    }
#pragma GCC unroll 16
    for (long r = 0; r < Rows; ++r) {
#pragma GCC unroll 16
        for (long i = 0; i < Vectors; ++i) store(acc + r * width + at + i * kLanes, sums[r * Vectors + i]);
    }
}

template <long Rows, long Vectors, typename Values>
inline void pair_rows(const Scratch& s, long row, const Values& v, long at, Range seen, Widths widths) {
    for (; at + Vectors * kLanes <= widths.v; at += Vectors * kLanes) {
        pair_tile<Rows, Vectors>(s.weights + row * kAttentionBlock, v, at, seen, s.shrink + row,
                                 s.now.acc + row * widths.k, widths.k);
    }
    if constexpr (Vectors > 2) pair_rows<Rows, Vectors / 2>(s, row, v, at, seen, widths);
}

template <typename Values>
inline void add_pairs(const Scratch& s, long row, long together, const Values& v, Range seen, Widths widths) {
    if (together == 4) pair_rows<4, 4>(s, row, v, 0, seen, widths);
    if (together == 2) pair_rows<2, 8>(s, row, v, 0, seen, widths);
    if (together == 1) pair_rows<1, 8>(s, row, v, 0, seen, widths);
}

// A position that is not seen may hold anything, and 0 times it be NaN: where it shares a pair it is taken for zeros.
inline void cut(const Bfloat16* const* v, Range seen, const Bfloat16* zeros, const Bfloat16** to) {
    for (long i = 0; i < kAttentionBlock; ++i) to[i] = v[i];
    if (seen.first % 2) to[seen.first - 1] = zeros;
    if (seen.last % 2) to[seen.last] = zeros;
}

// Rows go together that see the same positions.
inline void add_standing(const Scratch& s, long rows, const Bfloat16* const* v, Widths widths,
                         const Bfloat16* const* ahead) {
    const Bfloat16* own[kAttentionBlock];
    for (long r = 0, together = 0; r < rows; r += together) {
        const Range seen = s.seen[r];
        together = alike(s.seen + r, rows - r);
        if (seen.first >= seen.last) continue;
        cut(v, seen, reinterpret_cast<const Bfloat16*>(s.zeros), own);
        add_pairs(s, r, together, Standing{own, ahead}, seen, widths);
        ahead = nullptr;
    }
}

// Whether rows that do not see all of `span` may multiply it by 0 all the same.
inline bool harmless(const Scratch& s, long rows, const Bfloat16* const* v, Range span, long width) {
    bool even = true;
    for (long r = 0; r < rows; ++r) even &= s.seen[r].first == span.first && s.seen[r].last == span.last;
    for (long p = span.first; !even && p < span.last; ++p) {
        for (long i = 0; i < width; i += 2 * kLanes) {
            if (!all_finite(load_pairs(v[p] + i))) return false;
        }
    }
    return true;
}

// Copies what `span` holds of a block of V in pairs.
__attribute__((noinline)) void pack_values(const Scratch& s, const Bfloat16* const* v, long width, Range span,
                                           const Bfloat16* const* ahead, Bfloat16* packed) {
    const Bfloat16* own[kAttentionBlock];
    cut(v, span, reinterpret_cast<const Bfloat16*>(s.zeros), own);
    const Standing standing{own, ahead};
    for (long pair = span.first / 2; 2 * pair < span.last; ++pair) {
        for (long at = 0; at < width; at += 2 * kLanes) {
            Pairs two[2];
            standing.load(pair, at, two);
            for (long i = 0; i < 2; ++i) store_pairs(packed + 2 * (pair * width + at + i * kLanes), two[i]);
        }
    }
}

// What a row does not see of the values that others see has a weight of 0, which changes no sum.
__attribute__((noinline)) void add_packed(const Scratch& s, long rows, const Bfloat16* packed, Widths widths) {
    for (long r = 0, together = 0; r < rows; r += together) {
        together = rows - r >= 4 ? 4 : rows - r >= 2 ? 2 : 1;
        const Range seen = seen_by(s.seen + r, together);
        if (seen.first < seen.last) add_pairs(s, r, together, Interleaved{packed, widths.v}, seen, widths);
    }
}

// ------------------------------------------------------------------------------------------------------- block

// `ahead`: K of the next block, or null.
inline void take_pairs(const AttentionCall& call, long rows, long width, const Bfloat16* const* k,
                       const Bfloat16* const* v, Range span, const Bfloat16* const* ahead, Scratch& s) {
    const Bfloat16* const q = reinterpret_cast<const Bfloat16*>(s.q);
    Bfloat16* const turned = reinterpret_cast<Bfloat16*>(s.k);
    const bool many = rows >= kManyPairs;
    constexpr long kStep = 2 * kLanes;
    const Widths widths = {width, (call.value_dim + kStep - 1) / kStep * kStep};
    // While scores are computed V is asked for; where it is in K, what the next block's K has behind its V.
    const Bfloat16* behind[kAttentionBlock];
    for (long i = 0; call.shared && ahead && i < kAttentionBlock; ++i) behind[i] = ahead[i] + widths.v;
    const Bfloat16* const* const soon = call.shared ? (ahead ? behind : nullptr) : v;
    const long soon_width = call.shared ? width - widths.v : width;
    if (many) {
        turn_keys(k, width, span, turned, soon, soon_width);
        score_turned(q, rows, turned, width, s);
    } else {
        score(q, rows, k, width, s, soon, soon_width);
    }
    weigh_pairs(call, rows, s);
    if (many && harmless(s, rows, v, span, widths.v)) {
        Bfloat16* const packed = reinterpret_cast<Bfloat16*>(s.v);
        pack_values(s, v, widths.v, span, ahead, packed);
        add_packed(s, rows, packed, widths);
    } else {
        add_standing(s, rows, v, widths, ahead);
    }
}

}  // namespace
}  // namespace quintet::cpu
