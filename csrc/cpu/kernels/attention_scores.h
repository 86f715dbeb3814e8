// Queries times keys. Needs what attention_body.h says.
#pragma once

#include "cpu/kernels/attention_scratch.h"

namespace quintet::cpu {
namespace {

// Rows x kLanes / Rows scores: each is a vector of sums over every kLanes-th element, added up at the end as a tree.
template <long Rows, typename E>
inline void score_tile(const float* q, const E* const* k, long width, float* scores) {
    constexpr long kColumns = kLanes / Rows;
    Floats sums[kLanes] = {};
    for (long i = 0; i < width; i += kLanes) {
        Floats row[Rows];
#pragma GCC unroll 16
        for (long r = 0; r < Rows; ++r) row[r] = load(q + r * width + i);
#pragma GCC unroll 16
        for (long c = 0; c < kColumns; ++c) {
            const Floats key = load(k[c] + i);
#pragma GCC unroll 16
            for (long r = 0; r < Rows; ++r) sums[r * kColumns + c] = fma(row[r], key, sums[r * kColumns + c]);
        }
    }
    float all[kLanes];
    store(all, add_across(sums));
    for (long r = 0; r < Rows; ++r) {
        __builtin_memcpy(scores + r * kAttentionBlock, all + r * kColumns, kColumns * sizeof(float));
    }
}

#if defined(QUINTET_DOT)
// The same in pairs of elements; q stands in the processor's own type.
template <long Rows>
inline void score_tile(const Bfloat16* q, const Bfloat16* const* k, long width, float* scores) {
    constexpr long kColumns = kLanes / Rows;
    Floats sums[kLanes] = {};
    for (long i = 0; i < width; i += 2 * kLanes) {
        Pairs row[Rows];
#pragma GCC unroll 16
        for (long r = 0; r < Rows; ++r) row[r] = load_pairs(q + r * width + i);
#pragma GCC unroll 16
        for (long c = 0; c < kColumns; ++c) {
            const Pairs key = load_pairs(k[c] + i);
#pragma GCC unroll 16
            for (long r = 0; r < Rows; ++r) sums[r * kColumns + c] = dot(sums[r * kColumns + c], row[r], key);
        }
    }
    float all[kLanes];
    store(all, add_across(sums));
    for (long r = 0; r < Rows; ++r) {
        __builtin_memcpy(scores + r * kAttentionBlock, all + r * kColumns, kColumns * sizeof(float));
    }
}
#endif

template <long Rows, typename Q, typename E>
inline void score_rows(const Q* q, const E* const* k, long width, Range span, float* scores, const E* const* ahead,
                       long ahead_width) {
    constexpr long kColumns = kLanes / Rows;
    for (long c = span.first / kColumns * kColumns; c < span.last; c += kColumns) {
        for (long i = 0; ahead && i < kColumns; ++i) fetch(ahead[c + i], ahead_width);
        score_tile<Rows>(q, k + c, width, scores + c);
    }
}

// `ahead`: rows to ask for meanwhile, so many numbers of each; or null.
template <typename Q, typename E>
inline void score(const Q* q, long rows, const E* const* k, long width, const Scratch& s, const E* const* ahead,
                  long ahead_width) {
    for (long r = 0, together = 0; r < rows; r += together, ahead = nullptr) {
        together = rows - r >= 4 ? 4 : rows - r >= 2 ? 2 : 1;
        const Range span = seen_by(s.seen + r, together);
        const Q* const first = q + r * width;
        float* const to = s.scores + r * kAttentionBlock;
        if (together == 4) score_rows<4>(first, k, width, span, to, ahead, ahead_width);
        if (together == 2) score_rows<2>(first, k, width, span, to, ahead, ahead_width);
        if (together == 1) score_rows<1>(first, k, width, span, to, ahead, ahead_width);
    }
}

}  // namespace
}  // namespace quintet::cpu
