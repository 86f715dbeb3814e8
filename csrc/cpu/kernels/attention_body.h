// The loops of attention.h, written once over the vectors of one instruction set.
//
// The including file defines: kLanes and kTile (how many sums stay in registers), Floats and Ints (vectors of kLanes
// floats, and of as many uint32_t; operators work on both), splat(float), fma(a, b, c), load(at) for float, Bfloat16,
// Float16, Int8 and Float8 (which gives a 256th of the number), store(float*, Floats), add_across(const Floats (&)[kLanes]) whose lane i is the sum of the i-th
// argument's lanes, and lane_numbers(). Where QUINTET_DOT is defined: Pairs, load_pairs(const Bfloat16*) and
// dot(Floats, Pairs, Pairs).
//
// No product stands beside a sum but in fma(): a compiler may join the two in one copy of a loop and not in another.
#pragma once

#include "cpu/kernels/attention_math.h"
#include "cpu/kernels/attention_store.h"

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
template <typename E>
constexpr bool kScaled = kUnit<E> != 1.0F || kTail<E> != 0;

constexpr long padded(long count) { return (count + kLanes - 1) / kLanes * kLanes; }

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
    float* k;       // [kAttentionBlock, width], widened
    float* v;
    float* shrink;  // [rows], what the block at hand multiplies earlier sums with
    Range* seen;    // [rows]
    float* zeros;   // [width]
    float* slopes;  // [rows], or null
    float* places;  // [rows], positions
    float* k_unit;  // [kAttentionBlock], what the block's scores are multiplied with; or null
    float* v_unit;  // the same for its values
    long start;     // position of the block at hand
};

// A multiple of kLine: partials stand side by side.
inline size_t partial_bytes(long rows, long head_dim) {
    const long bytes = (rows * padded(head_dim) + 2 * padded(rows)) * static_cast<long>(sizeof(float));
    return static_cast<size_t>((bytes + kLine - 1) / kLine * kLine);
}

inline size_t scratch_bytes(long rows, long head_dim) {
    const long width = padded(head_dim);
    const long floats = rows * (width + kAttentionBlock) + 7 * padded(rows) + (2 * kAttentionBlock + 1) * width +
                        2 * kAttentionBlock;
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

// ------------------------------------------------------------------------------------------------------ scores

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
inline void score_rows(const Q* q, const E* const* k, long width, Range span, float* scores, const E* const* ahead) {
    constexpr long kColumns = kLanes / Rows;
    for (long c = span.first / kColumns * kColumns; c < span.last; c += kColumns) {
        for (long i = 0; ahead && i < kColumns; ++i) fetch(ahead[c + i], width);
        score_tile<Rows>(q, k + c, width, scores + c);
    }
}

// `ahead`: rows to ask for meanwhile, or null.
template <typename Q, typename E>
inline void score(const Q* q, long rows, const E* const* k, long width, Range span, float* scores,
                  const E* const* ahead) {
    for (long r = 0, together = 0; r < rows; r += together, ahead = nullptr) {
        const Q* const first = q + r * width;
        float* const to = scores + r * kAttentionBlock;
        together = rows - r >= 4 ? 4 : rows - r >= 2 ? 2 : 1;
        if (together == 4) score_rows<4>(first, k, width, span, to, ahead);
        if (together == 2) score_rows<2>(first, k, width, span, to, ahead);
        if (together == 1) score_rows<1>(first, k, width, span, to, ahead);
    }
}

// ----------------------------------------------------------------------------------------------------- weights

inline float largest(Floats x) {
    float lanes[kLanes];
    store(lanes, x);
    float best = lanes[0];
    for (const float lane : lanes) best = lane > best ? lane : best;
    return best;
}

inline float sum_of(Floats x) {
    float lanes[kLanes];
    store(lanes, x);
    for (long step = kLanes / 2; step; step /= 2) {
        for (long i = 0; i < step; ++i) lanes[i] += lanes[i + step];
    }
    return lanes[0];
}

// i, i + 1, ...
inline Floats numbers(long i) {
    using Whole = int32_t __attribute__((vector_size(sizeof(Ints))));
    return __builtin_convertvector((Whole)lane_numbers() + static_cast<int32_t>(i), Floats);
}

// Scores of one row become weights relative to the maximum so far. Never a copy of this in another function: all rows
// go through the same instructions.
__attribute__((noinline)) void weigh(const AttentionCall& call, Range seen, float* scores, Scratch& s, long row) {
    constexpr uint32_t kLaneCount = kLanes;
    const uint32_t first = static_cast<uint32_t>(seen.first), count = static_cast<uint32_t>(seen.last - seen.first);
    const Floats scale = splat(call.scale), nothing = splat(kNothing);
    const float slope = s.slopes ? s.slopes[row] : 0.0F;
    const float distance = static_cast<float>(s.start) - s.places[row];
    Floats top = nothing;
    Ints place = lane_numbers() - first;  // below `first` it wraps to something large
    for (long i = 0; i < kAttentionBlock; i += kLanes, place += kLaneCount) {
        Floats x = load(scores + i);
        if (s.k_unit) x = x * load(s.k_unit + i);
        x = x * scale;
        if (call.softcap > 0.0F) x = tanh_of(x / call.softcap) * call.softcap;
        if (s.slopes) x = fma(splat(slope), numbers(i) + distance, x);
        x = place < count ? x : nothing;
        top = x > top ? x : top;
        store(scores + i, x);
    }
    const float before = s.now.best[row], highest = largest(top);
    const float best = highest > before ? highest : before;
    const Floats shift = splat(best);
    Floats sum = splat(0.0F);
    place = lane_numbers() - first;
    for (long i = 0; i < kAttentionBlock; i += kLanes, place += kLaneCount) {
        const Floats weight = exp_of(load(scores + i) - shift);
        const Floats kept = place < count ? weight : splat(0.0F);
        sum += kept;
        store(scores + i, s.v_unit ? kept * load(s.v_unit + i) : kept);
    }
    float shrink[kLanes];
    store(shrink, exp_of(splat(before) - shift));
    s.now.best[row] = best;
    s.shrink[row] = shrink[0];
    float total[kLanes];
    store(total, fma(splat(s.now.total[row]), splat(shrink[0]), splat(sum_of(sum))));
    s.now.total[row] = total[0];
}

// ------------------------------------------------------------------------------------------------------ values

// acc [Rows, Vectors * kLanes] = acc * shrink + weights @ v, one position after the other.
template <long Rows, long Vectors, typename E>
inline void value_tile(const float* weights, const E* const* v, long at, Range seen, const float* shrink, float* acc,
                       long width, const E* const* ahead) {
    Floats sums[Rows * Vectors];
#pragma GCC unroll 16
    for (long r = 0; r < Rows; ++r) {
#pragma GCC unroll 16
        for (long i = 0; i < Vectors; ++i) {
            sums[r * Vectors + i] = load(acc + r * width + at + i * kLanes) * splat(shrink[r]);
        }
    }
    for (long p = seen.first; p < seen.last; ++p) {
        Floats value[Vectors];
        const E* const from = v[p] + at;
        if (ahead) fetch(ahead[p] + at, Vectors * kLanes);
#pragma GCC unroll 16
        for (long i = 0; i < Vectors; ++i) value[i] = load(from + i * kLanes);
#pragma GCC unroll 16
        for (long r = 0; r < Rows; ++r) {
            const Floats weight = splat(weights[r * kAttentionBlock + p]);
#pragma GCC unroll 16
            for (long i = 0; i < Vectors; ++i) sums[r * Vectors + i] = fma(weight, value[i], sums[r * Vectors + i]);
        }
    }
#pragma GCC unroll 16
    for (long r = 0; r < Rows; ++r) {
#pragma GCC unroll 16
        for (long i = 0; i < Vectors; ++i) store(acc + r * width + at + i * kLanes, sums[r * Vectors + i]);
    }
}

template <long Rows, long Vectors, typename E>
inline void value_rows(const float* weights, const E* const* v, long at, Range seen, const float* shrink, float* acc,
                       long width, const E* const* ahead) {
    for (; at + Vectors * kLanes <= width; at += Vectors * kLanes) {
        value_tile<Rows, Vectors>(weights, v, at, seen, shrink, acc, width, ahead);
    }
    if constexpr (Vectors > 1) value_rows<Rows, Vectors / 2>(weights, v, at, seen, shrink, acc, width, ahead);
}

// Rows go together that see the same positions. The others' values are not even multiplied by 0: they may be infinite.
template <typename E>
inline void add_values(const Scratch& s, long rows, const E* const* v, long width, const E* const* ahead) {
    constexpr long kFour = kTile / 4, kTwo = kTile / 2 < 8 ? kTile / 2 : 8, kOne = kTile < 8 ? kTile : 8;
    for (long r = 0, together = 0; r < rows; r += together, ahead = nullptr) {
        const Range seen = s.seen[r];
        const auto same = [&](long count) {
            if (r + count > rows) return false;
            for (long i = 1; i < count; ++i) {
                if (s.seen[r + i].first != seen.first || s.seen[r + i].last != seen.last) return false;
            }
            return true;
        };
        const float *weights = s.scores + r * kAttentionBlock, *shrink = s.shrink + r;
        float* const acc = s.now.acc + r * width;
        if (seen.first >= seen.last) {
            together = 1;
        } else if (same(4)) {
            together = 4;
            value_rows<4, kFour>(weights, v, 0, seen, shrink, acc, width, ahead);
        } else if (same(2)) {
            together = 2;
            value_rows<2, kTwo>(weights, v, 0, seen, shrink, acc, width, ahead);
        } else {
            together = 1;
            value_rows<1, kOne>(weights, v, 0, seen, shrink, acc, width, ahead);
        }
    }
}

// -------------------------------------------------------------------------------------------------------- item

struct Sight {
    long first, last;  // positions that a token sees
};

inline Sight sight(const AttentionCall& call, long token) {
    const long last = call.positions[token] + 1L;
    return {call.window > 0 && last > call.window ? last - call.window : 0, last};
}

template <typename E>
struct Block {
    const E* k[kAttentionBlock];
    const E* v[kAttentionBlock];
};

// Where the rows of K and V of the block at `start` stand. From position `end` on there are zeros: the page may hold
// anything there.
template <typename E>
inline void find(const AttentionCall& call, const AttentionItem& item, long start, long end, const E* zeros,
                 Block<E>& block) {
    const long size = call.page_size, row = call.head_dim + kTail<E>, side = call.kv_heads * size * row;
    const long count = end - start < kAttentionBlock ? end - start : kAttentionBlock;
    for (long i = 0; i < kAttentionBlock; ++i) block.k[i] = block.v[i] = zeros;
    for (long i = 0; i < count;) {
        const long page = (start + i) / size, offset = start + i - page * size;
        const E* at = static_cast<const E*>(call.kv) + 2 * side * item.pages[page];
        at += (item.kv_head * size + offset) * row;
        const long run = size - offset < count - i ? size - offset : count - i;
        for (const long last = i + run; i < last; ++i, at += row) {
            block.k[i] = at;
            block.v[i] = at + side;
        }
    }
}

// Copies a block's rows in float32, padded with zeros to whole vectors.
template <typename E>
inline void widen_rows(const E* const* from, Range span, long dim, long width, float* to, const float* zeros,
                       const float** rows) {
    for (long i = 0; i < kAttentionBlock; ++i) {
        const bool inside = i >= span.first && i < span.last;
        rows[i] = inside ? to + i * width : zeros;
        if (inside) widen(from[i], to + i * width, dim, width);
    }
}

// Whether scores are made by dot() of the elements as they are. It hangs on the layer alone: the bits are others.
template <typename E>
constexpr bool kPaired = false;
#if defined(QUINTET_DOT)
template <>
constexpr bool kPaired<Bfloat16> = true;
#endif

template <typename E>
inline bool paired(long head_dim) {
    return kPaired<E> && head_dim % (2 * kLanes) == 0;
}

template <typename Q>
inline void load_queries(const AttentionCall& call, const AttentionItem& item, long width, bool as_they_are,
                         Scratch& s) {
    const long group = call.heads / call.kv_heads, rows = item.tokens * group;
    for (long r = 0; r < rows; ++r) {
        const long head = item.kv_head * group + r % group;
        const long token = item.token + r / group;
        const Q* q = static_cast<const Q*>(call.q) + token * call.q_stride + head * call.head_dim;
        s.places[r] = static_cast<float>(call.positions[token]);
        if (call.slopes) s.slopes[r] = call.slopes[head];
        if (as_they_are) {
            __builtin_memcpy(reinterpret_cast<Q*>(s.q) + r * width, q, static_cast<size_t>(width) * sizeof(Q));
        } else {
            widen(q, s.q + r * width, call.head_dim, width);
        }
    }
}

inline void clear(const Partial& p, long rows, long width) {
    for (long i = 0; i < rows * width; ++i) p.acc[i] = 0.0F;
    for (long r = 0; r < rows; ++r) p.best[r] = kNothing;
    for (long r = 0; r < rows; ++r) p.total[r] = 0.0F;
}

// Before the first stretch there is nothing, or each head's sink.
inline void begin(const AttentionCall& call, long kv_head, long rows, long width, const Partial& p) {
    const long group = call.heads / call.kv_heads;
    clear(p, rows, width);
    for (long r = 0; call.sinks && r < rows; ++r) {
        p.best[r] = call.sinks[kv_head * group + r % group];
        p.total[r] = 1.0F;
    }
}

// Takes in the next stretch. One that a row saw nothing of leaves it as it is. As with weigh(), there is one copy.
__attribute__((noinline)) void merge(const Partial& next, const Partial& p, long rows, long width) {
    for (long r = 0; r < rows; ++r) {
        const float best = next.best[r] > p.best[r] ? next.best[r] : p.best[r];
        const Floats old = exp_of(splat(p.best[r]) - best), fresh = exp_of(splat(next.best[r]) - best);
        p.best[r] = best;
        float total[kLanes];
        store(total, fma(splat(p.total[r]), old, splat(next.total[r]) * fresh));
        p.total[r] = total[0];
        for (long i = r * width; i < (r + 1) * width; i += kLanes) {
            store(p.acc + i, fma(load(p.acc + i), old, load(next.acc + i) * fresh));
        }
    }
}

template <typename E>
inline void finish(const AttentionCall& call, const AttentionItem& item, long width, const Scratch& s) {
    const long group = call.heads / call.kv_heads, rows = item.tokens * group;
    for (long r = 0; r < rows; ++r) {
        const long head = item.kv_head * group + r % group;
        E* out = static_cast<E*>(call.out) + ((item.token + r / group) * call.heads + head) * call.head_dim;
        const float total = s.all.total[r];
        for (long i = 0; i < call.head_dim; ++i) narrow(s.all.acc[r * width + i] / total + 0.0F, out + i);  // no -0
    }
}

// What each row sees of the block that starts at `start`; returns what any of them sees.
inline Range look(const AttentionCall& call, const AttentionItem& item, long start, Scratch& s) {
    const long group = call.heads / call.kv_heads;
    Range span = {kAttentionBlock, 0};
    for (long t = 0; t < item.tokens; ++t) {
        const Sight all = sight(call, item.token + t);
        Range seen = {all.first - start, all.last - start};
        seen.first = seen.first < 0 ? 0 : seen.first;
        seen.last = seen.last > kAttentionBlock ? kAttentionBlock : seen.last;
        for (long g = 0; g < group; ++g) s.seen[t * group + g] = seen;
        if (seen.first >= seen.last) continue;
        span.first = seen.first < span.first ? seen.first : span.first;
        span.last = seen.last > span.last ? seen.last : span.last;
    }
    return span;
}

// What the numbers of each row in the block are multiples of; the rows themselves are in the caches by now.
template <typename E>
inline void take_units(const Block<E>& block, long dim, Scratch& s) {
    for (long i = 0; kTail<E> && i < kAttentionBlock; ++i) {
        __builtin_memcpy(s.k_unit + i, block.k[i] + dim, sizeof(float));
        __builtin_memcpy(s.v_unit + i, block.v[i] + dim, sizeof(float));
    }
}

inline void weigh_rows(const AttentionCall& call, long rows, Scratch& s) {
    for (long r = 0; r < rows; ++r) {
        if (s.seen[r].first < s.seen[r].last) weigh(call, s.seen[r], s.scores + r * kAttentionBlock, s, r);
    }
}

// Where the item's context begins and ends.
inline Sight whole(const AttentionCall& call, const AttentionItem& item) {
    return {sight(call, item.token).first, sight(call, item.token + item.tokens - 1).last};
}

// s.now becomes what stretch `number` gives.
template <typename E>
__attribute__((noinline)) void go_through(const AttentionCall& call, const AttentionItem& item, long number, long rows,
                                          long width, Scratch& s) {
    const Sight context = whole(call, item);
    const long dim = call.head_dim, first = number * kAttentionStretch, last = first + kAttentionStretch;
    const long from = (context.first > first ? context.first : first) / kAttentionBlock * kAttentionBlock;
    const long to = context.last < last ? context.last : last;
    const bool direct = dim == width && (sizeof(E) == sizeof(float) || rows < kWide);
    clear(s.now, rows, width);
    Block<E> blocks[2];  // the one at hand and the next
    const float *k[kAttentionBlock], *v[kAttentionBlock];
    const float* const* const none = nullptr;
    const E* const zeros = reinterpret_cast<const E*>(s.zeros);
    find(call, item, from, to, zeros, blocks[from / kAttentionBlock % 2]);
    for (long start = from; start < to; start += kAttentionBlock) {
        const Block<E>& block = blocks[start / kAttentionBlock % 2];
        Block<E>& next = blocks[1 - start / kAttentionBlock % 2];
        const bool more = start + kAttentionBlock < to;
        if (more) find(call, item, start + kAttentionBlock, to, zeros, next);
        const Range span = look(call, item, start, s);
        s.start = start;
        if (paired<E>(dim)) {
            if constexpr (kPaired<E>) {
                score(reinterpret_cast<const E*>(s.q), rows, block.k, width, span, s.scores, block.v);
            }
        } else if (direct) {
            score(s.q, rows, block.k, width, span, s.scores, block.v);
        } else {
            widen_rows(block.k, span, dim, width, s.k, s.zeros, k);
            score(s.q, rows, k, width, span, s.scores, none);
        }
        take_units(block, dim, s);
        weigh_rows(call, rows, s);
        if (direct) {
            add_values(s, rows, block.v, width, more ? next.k : nullptr);
        } else {
            widen_rows(block.v, span, dim, width, s.v, s.zeros, v);
            add_values(s, rows, v, width, none);
        }
    }
}

template <typename Q, typename E>
inline Scratch prepared(const AttentionCall& call, const AttentionItem& item, void* memory, long rows, long width) {
    Scratch s = divided(memory, rows, width);
    if (!call.slopes) s.slopes = nullptr;
    if (!kScaled<E>) s.k_unit = s.v_unit = nullptr;
    for (long i = 0; kScaled<E> && i < kAttentionBlock; ++i) s.k_unit[i] = s.v_unit[i] = kUnit<E>;
    for (long i = 0; i < width; ++i) s.zeros[i] = 0.0F;
    load_queries<Q>(call, item, width, paired<E>(call.head_dim), s);
    return s;
}

template <typename Q, typename E>
void attend(const AttentionCall& call, const AttentionItem& item, void* memory) {
    const long width = padded(call.head_dim), rows = item.tokens * (call.heads / call.kv_heads);
    Scratch s = prepared<Q, E>(call, item, memory, rows, width);
    begin(call, item.kv_head, rows, width, s.all);
    const Sight context = whole(call, item);
    for (long n = context.first / kAttentionStretch; n * kAttentionStretch < context.last; ++n) {
        go_through<E>(call, item, n, rows, width, s);
        merge(s.now, s.all, rows, width);
    }
    finish<Q>(call, item, width, s);
}

template <typename Q, typename E>
void stretch(const AttentionCall& call, const AttentionItem& item, long number, void* memory, void* partial) {
    const long width = padded(call.head_dim), rows = item.tokens * (call.heads / call.kv_heads);
    Scratch s = prepared<Q, E>(call, item, memory, rows, width);
    s.now = partial_at(static_cast<float*>(partial), rows, width);
    go_through<E>(call, item, number, rows, width, s);
}

template <typename E>
void join(const AttentionCall& call, const AttentionItem& item, long count, void* partials, void* memory) {
    const long width = padded(call.head_dim), rows = item.tokens * (call.heads / call.kv_heads);
    const Scratch s = divided(memory, rows, width);
    begin(call, item.kv_head, rows, width, s.all);
    char* const first = static_cast<char*>(partials);
    const size_t each = partial_bytes(rows, call.head_dim);
    for (long n = 0; n < count; ++n) {
        float* const at = reinterpret_cast<float*>(first + static_cast<size_t>(n) * each);
        merge(partial_at(at, rows, width), s.all, rows, width);
    }
    finish<E>(call, item, width, s);
}

#define QUINTET_ATTENTION_KINDS(F)                                    \
    {{F<float, float>, F<float, Int8>, F<float, Float8>},             \
     {F<Bfloat16, Bfloat16>, F<Bfloat16, Int8>, F<Bfloat16, Float8>}, \
     {F<Float16, Float16>, F<Float16, Int8>, F<Float16, Float8>}}

#define QUINTET_ATTENTION_KERNELS                                                                     \
    {scratch_bytes, partial_bytes, QUINTET_ATTENTION_KINDS(attend), QUINTET_ATTENTION_KINDS(stretch), \
     {join<float>, join<Bfloat16>, join<Float16>},                                                    \
     {{nullptr, to_int8<float>, to_float8<float>},                                                    \
      {nullptr, to_int8<Bfloat16>, to_float8<Bfloat16>},                                              \
      {nullptr, to_int8<Float16>, to_float8<Float16>}}}

}  // namespace
}  // namespace quintet::cpu
