// What the loops of attention_body.h hold in memory while they go through a context. Needs what that says.
#pragma once

#include "cpu/kernels/attention_math.h"

namespace quintet::cpu {
namespace {

constexpr float kNothing = -1e30F;  // a maximum over no scores; finite, so that differences with it are not NaN
constexpr long kWide = 8;           // rows from which on a block is widened once for all of them
constexpr long kLine = 64;          // bytes in a cache line

// What load() of a cache's type leaves for later to multiply with, and bytes behind a row that say what else.
template <typename E>
constexpr float kUnit = 1.0F;
template <>
constexpr float kUnit<Float8> = 256.0F;
template <typename E>
constexpr long kTail = 0;
template <>
constexpr long kTail<Int8> = kScaleBytes;
// Rows of groups, which are always copied in float32.
template <typename E>
constexpr bool kGrouped = false;
template <>
constexpr bool kGrouped<Int4> = true;
template <typename E>
constexpr bool kScaled = kUnit<E> != 1.0F || kTail<E> != 0;

constexpr long padded(long count) { return (count + kLanes - 1) / kLanes * kLanes; }

// Elements of a row of the cache.
template <typename E>
constexpr long row_size(long head_dim) {
    return kGrouped<E> ? int4_row_bytes(head_dim) : head_dim + kTail<E>;
}

// Asks for a row of a cache that is read soon: the processor's own guesses end at each page of 4 KiB.
template <typename E>
inline void fetch(const E* row, long width) {
    const char* const at = reinterpret_cast<const char*>(row);
    for (long i = 0; i < width * static_cast<long>(sizeof(E)); i += kLine) __builtin_prefetch(at + i, 0, 2);
}

// Of one row in the block at hand.
struct Range {
    long first, last;  // positions that it sees, counted from the block's first
};

// What any of `count` rows sees.
inline Range seen_by(const Range* rows, long count) {
    Range all = {kAttentionBlock, 0};
    for (long r = 0; r < count; ++r) {
        if (rows[r].first >= rows[r].last) continue;
        all.first = rows[r].first < all.first ? rows[r].first : all.first;
        all.last = rows[r].last > all.last ? rows[r].last : all.last;
    }
    return all;
}

// How many rows from the first on go together, of `count`, if they must see the same: 4, 2 or 1.
inline long alike(const Range* rows, long count) {
    const auto same = [&](long i) { return rows[i].first == rows->first && rows[i].last == rows->last; };
    if (count < 2 || !same(1)) return 1;
    return count < 4 || !same(2) || !same(3) ? 2 : 4;
}

// What a stretch of context gives, or several.
struct Partial {
    float* acc;    // [rows, width], values times their weights
    float* best;   // [rows], largest score, which weights are relative to
    float* total;  // [rows], sum of weights
};

struct Scratch {
    float* q;       // [rows, width]
    Partial now;    // of the stretch at hand
    Partial all;    // of those before
    float* scores;  // [rows, kAttentionBlock], then the weights
    float* raised;  // [rows], the largest score so far, then the block's sum of weights
    float* k;       // [kAttentionBlock, width], widened, or Bfloat16 in the order of attention_pairs.h
    float* v;
    Bfloat16* weights;  // [rows, kAttentionBlock], where they are rounded
    float* shrink;  // [rows], what the block at hand multiplies earlier sums with
    Range* seen;    // [rows]
    float* zeros;   // [width]
    float* slopes;  // [rows], or null
    float* places;  // [rows], positions
    float* k_unit;  // [kAttentionBlock], what the block's scores are multiplied with; or null
    float* v_unit;  // the same for its values
    long start;     // position of the block at hand
    bool turned;    // whether k holds the queries of few rows as attention_tiles.h turns them
};

// A multiple of kLine: partials stand side by side.
inline size_t partial_bytes(long rows, long head_dim) {
    const long bytes = (rows * padded(head_dim) + 2 * padded(rows)) * static_cast<long>(sizeof(float));
    return static_cast<size_t>((bytes + kLine - 1) / kLine * kLine);
}

inline size_t scratch_bytes(long rows, long head_dim) {
    const long width = padded(head_dim);
    const long floats = rows * (width + kAttentionBlock + kAttentionBlock / 2) + 8 * padded(rows) +
                        (2 * kAttentionBlock + 1) * width + 2 * kAttentionBlock;
    return 2 * partial_bytes(rows, head_dim) + static_cast<size_t>(floats + 2 * kLanes) * sizeof(float);
}

inline Partial partial_at(float* at, long rows, long width) {
    return {at, at + rows * width, at + rows * width + padded(rows)};
}

inline Scratch divided(void* memory, long rows, long width) {
    Scratch s;
    float* at = static_cast<float*>(memory);
    const auto take = [&at](long count) {
        float* const taken = at;
        at += padded(count);
        return taken;
    };
    s.q = take(rows * width);
    s.now = partial_at(take(rows * width + 2 * padded(rows)), rows, width);
    s.all = partial_at(take(rows * width + 2 * padded(rows)), rows, width);
    s.scores = take(rows * kAttentionBlock);
    s.weights = reinterpret_cast<Bfloat16*>(take(rows * kAttentionBlock / 2));
    s.raised = take(rows);
    s.k = take(kAttentionBlock * width);
    s.v = take(kAttentionBlock * width);
    s.zeros = take(width);
    s.shrink = take(rows);
    s.seen = reinterpret_cast<Range*>(take(4 * padded(rows)));
    s.slopes = take(rows);
    s.places = take(rows);
    s.k_unit = take(kAttentionBlock);
    s.v_unit = take(kAttentionBlock);
    s.start = 0;
    s.turned = false;
    return s;
}

template <typename E>
inline void widen(const E* from, float* to, long count, long width) {
    long i = 0;
    for (; i + kLanes <= count; i += kLanes) store(to + i, load(from + i));
    if (i < width) {
        E rest[kLanes] = {};
        __builtin_memcpy(rest, from + i, static_cast<size_t>(count - i) * sizeof(E));
        store(to + i, load(rest));
    }
}

}  // namespace
}  // namespace quintet::cpu
