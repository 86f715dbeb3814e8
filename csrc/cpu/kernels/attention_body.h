// The loops of attention.h, written once over the vectors of one instruction set.
//
// The including file defines: kLanes and kTile (how many sums stay in registers), Floats and Ints (vectors of kLanes
// floats, and of as many uint32_t; operators work on both), splat(float), fma(a, b, c), load(at) for float, Bfloat16,
// Float16, Int8, Float8Wide and Float8 (which gives a 256th of the number), store(float*, Floats), lane_numbers(), and
// add_across(const Floats (&)[kLanes]) whose lane i is the sum of the i-th argument's lanes.
//
// Where QUINTET_DOT is defined, kLanes is 16, add_across() adds (0 + 2) + (1 + 3) in each quarter of the lanes and the
// quarters as (0 + 1) + (2 + 3), and there are: Pairs (of Bfloat16, one in each lane), load_pairs(at), store_pairs(at,
// Pairs), splat_pair(at), splat_ones(), dot(Floats, Pairs, Pairs), narrow_both(Floats low, Floats high), interleave(),
// turn(), all_finite(), coarse_exp_of(), largest_quickly() and sum_quickly(). Where QUINTET_TILES is defined, too, these
// products are left to AMX's tiles.
//
// No product stands beside a sum but in fma(): a compiler may join the two in one copy of a loop and not in another.
#pragma once

#include "cpu/kernels/attention_groups.h"
#include "cpu/kernels/attention_scores.h"
#include "cpu/kernels/attention_store.h"
#include "cpu/kernels/attention_values.h"
#include "cpu/kernels/attention_weights.h"
#if defined(QUINTET_DOT)
#include "cpu/kernels/attention_pairs.h"
#endif
#if defined(QUINTET_TILES)
#include "cpu/kernels/attention_tiles.h"
#endif
#include "cpu/kernels/attention_whole.h"

namespace quintet::cpu {
namespace {

struct Sight {
    long first, last;  // positions that a token sees
};

inline long rows_of(const AttentionItem& item) { return item.tokens * item.heads; }

inline Sight sight(const AttentionCall& call, const AttentionItem& item, long token) {
    const long own = call.positions[token], first = first_seen(call, own);
    if (call.causal) return {first, own + 1};
    return {first, call.window > 0 && own + call.window < item.length ? own + call.window : item.length};
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
    const long size = call.page_size, row = row_size<E>(call.head_dim), side = call.kv_heads * size * row;
    const long to_v = call.shared ? 0 : side;
    const long count = end - start < kAttentionBlock ? end - start : kAttentionBlock;
    for (long i = 0; i < kAttentionBlock; ++i) block.k[i] = block.v[i] = zeros;
    for (long i = 0; i < count;) {
        const long page = (start + i) / size, offset = start + i - page * size;
        const E* at = static_cast<const E*>(call.kv) + (side + to_v) * item.pages[page];
        at += (item.kv_head * size + offset) * row;
        const long run = size - offset < count - i ? size - offset : count - i;
        for (const long last = i + run; i < last; ++i, at += row) {
            block.k[i] = at;
            block.v[i] = at + to_v;
        }
    }
}

// Copies a block's rows in float32, padded with zeros to whole vectors. `ahead`: rows to ask for meanwhile, or null.
template <typename E>
inline void widen_rows(const E* const* from, Range span, long dim, long width, const E* const* ahead, float* to,
                       const float* zeros, const float** rows) {
    for (long i = 0; i < kAttentionBlock; ++i) {
        const bool inside = i >= span.first && i < span.last;
        if (ahead) fetch(ahead[i], row_size<E>(dim));
        rows[i] = inside ? to + i * width : zeros;
        if (inside) widen(from[i], to + i * width, dim, width);
    }
}

// Whether products are made by dot() of the elements as they are. It hangs on the layer alone: the bits are others.
// Not for quantized caches: what a position's values are multiples of is multiplied into its weight, which would then
// be rounded a second time, apart from the sum that it is a share of.
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
    const long rows = rows_of(item);
    for (long r = 0; r < rows; ++r) {
        const long head = item.head + r % item.heads;
        const long token = item.token + r / item.heads;
        const Q* const q = static_cast<const Q*>(call.q) + token * call.q_stride + head * call.head_dim;
        s.places[r] = static_cast<float>(call.positions[token]);
        if (call.slopes) s.slopes[r] = call.slopes[head];
        if (as_they_are) {
            __builtin_memcpy(reinterpret_cast<Q*>(s.q) + r * width, q, static_cast<size_t>(width) * sizeof(Q));
        } else {
            widen(q, s.q + r * width, call.head_dim, width);
            if (call.turned) turn_groups(s.q + r * width, call.head_dim, true);
        }
    }
}

inline void clear(const Partial& p, long rows, long width) {
    for (long i = 0; i < rows * width; ++i) p.acc[i] = 0.0F;
    for (long r = 0; r < rows; ++r) p.best[r] = kNothing;
    for (long r = 0; r < rows; ++r) p.total[r] = 0.0F;
}

// Before the first stretch there is nothing, or each head's sink.
inline void begin(const AttentionCall& call, const AttentionItem& item, long width, const Partial& p) {
    const long rows = rows_of(item);
    clear(p, rows, width);
    for (long r = 0; call.sinks && r < rows; ++r) {
        p.best[r] = call.sinks[item.head + r % item.heads];
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
    const long rows = rows_of(item);
    for (long r = 0; r < rows; ++r) {
        const long head = item.head + r % item.heads;
        E* out = static_cast<E*>(call.out) + ((item.token + r / item.heads) * call.heads + head) * call.value_dim;
        const float total = s.all.total[r];
        if (call.turned) turn_groups(s.all.acc + r * width, call.head_dim, true);
        for (long i = 0; i < call.value_dim; ++i) narrow(s.all.acc[r * width + i] / total + 0.0F, out + i);  // no -0
    }
}

// What each row sees of the block that starts at `start`; returns what any of them sees.
inline Range look(const AttentionCall& call, const AttentionItem& item, long start, Scratch& s) {
    const long group = item.heads;
    Range span = {kAttentionBlock, 0};
    for (long t = 0; t < item.tokens; ++t) {
        const Sight all = sight(call, item, item.token + t);
        Range seen = {all.first - start, all.last - start};
        seen.first = seen.first < 0 ? 0 : seen.first;
        seen.last = seen.last > kAttentionBlock ? kAttentionBlock : seen.last;
        if (seen.first >= seen.last) seen = {0, 0};
        for (long g = 0; g < group; ++g) s.seen[t * group + g] = seen;
        if (seen.last == 0) continue;
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
    return {sight(call, item, item.token).first, sight(call, item, item.token + item.tokens - 1).last};
}

template <typename E>
constexpr const E* const* no_rows = nullptr;

// Goes through a block of groups, which are copied in float32 for any number of rows. `ahead`: K of the next, or null.
template <typename E>
inline void take_groups(const AttentionCall& call, long rows, long width, const Block<E>& block, Range span,
                        const E* const* ahead, Scratch& s) {
    const float *k[kAttentionBlock], *v[kAttentionBlock];
    widen_rows(block.k, span, call.head_dim, width, call.shared ? ahead : block.v, s.k, s.zeros, k);
    score(s.q, rows, k, width, s, no_rows<float>, width);
    weigh_rows(call, rows, s);
    if (call.shared) return add_values(s, rows, k, width, no_rows<float>);
    widen_rows(block.v, span, call.head_dim, width, ahead, s.v, s.zeros, v);
    add_values(s, rows, v, width, no_rows<float>);
}

// Goes through a block in float32. `ahead`: K of the next, or null.
template <typename E>
inline void take_floats(const AttentionCall& call, long rows, long width, const Block<E>& block, Range span,
                        const E* const* ahead, Scratch& s) {
    const bool direct = call.head_dim == width && (sizeof(E) == sizeof(float) || rows < kWide);
    const float *k[kAttentionBlock], *v[kAttentionBlock];
    const float* const* const none = nullptr;
    if (direct) {
        score(s.q, rows, block.k, width, s, block.v, width);
    } else {
        widen_rows(block.k, span, call.head_dim, width, no_rows<E>, s.k, s.zeros, k);
        score(s.q, rows, k, width, s, none, width);
    }
    take_units(block, call.head_dim, s);
    weigh_rows(call, rows, s);
    if (direct) {
        add_values(s, rows, block.v, width, ahead);
    } else {
        widen_rows(block.v, span, call.head_dim, width, no_rows<E>, s.v, s.zeros, v);
        add_values(s, rows, v, width, none);
    }
}

// s.now becomes what stretch `number` gives.
template <typename E>
__attribute__((noinline)) void go_through(const AttentionCall& call, const AttentionItem& item, long number, long rows,
                                          long width, Scratch& s) {
    const Sight context = whole(call, item);
    const long first = number * kAttentionStretch, last = first + kAttentionStretch;
    const long from = (context.first > first ? context.first : first) / kAttentionBlock * kAttentionBlock;
    const long to = context.last < last ? context.last : last;
    clear(s.now, rows, width);
    Block<E> blocks[2];  // the one at hand and the next
    const E* const zeros = reinterpret_cast<const E*>(s.zeros);
    find(call, item, from, to, zeros, blocks[from / kAttentionBlock % 2]);
    for (const E* const row : blocks[from / kAttentionBlock % 2].k) fetch(row, row_size<E>(call.head_dim));
    for (long start = from; start < to; start += kAttentionBlock) {
        const Block<E>& block = blocks[start / kAttentionBlock % 2];
        Block<E>& next = blocks[1 - start / kAttentionBlock % 2];
        const bool more = start + kAttentionBlock < to;
        if (more) find(call, item, start + kAttentionBlock, to, zeros, next);
        const E* const* const ahead = more ? next.k : nullptr;
        const Range span = look(call, item, start, s);
        s.start = start;
        if constexpr (kPaired<E>) {
            if (paired<E>(call.head_dim)) {
#if defined(QUINTET_TILES)
                take_tiles(call, rows, width, block.k, block.v, span, ahead, s);
#else
                take_pairs(call, rows, width, block.k, block.v, span, ahead, s);
#endif
                continue;
            }
        }
        if constexpr (kGrouped<E>) {
            take_groups(call, rows, width, block, span, ahead, s);
        } else {
            take_floats(call, rows, width, block, span, ahead, s);
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
    const long width = padded(call.head_dim), rows = rows_of(item);
    Scratch s = prepared<Q, E>(call, item, memory, rows, width);
    begin(call, item, width, s.all);
    const Sight context = whole(call, item);
    for (long n = context.first / kAttentionStretch; n * kAttentionStretch < context.last; ++n) {
        go_through<E>(call, item, n, rows, width, s);
        merge(s.now, s.all, rows, width);
    }
    finish<Q>(call, item, width, s);
}

template <typename Q, typename E>
void stretch(const AttentionCall& call, const AttentionItem& item, long number, void* memory, void* partial) {
    const long width = padded(call.head_dim), rows = rows_of(item);
    Scratch s = prepared<Q, E>(call, item, memory, rows, width);
    s.now = partial_at(static_cast<float*>(partial), rows, width);
    go_through<E>(call, item, number, rows, width, s);
}

template <typename E>
void join(const AttentionCall& call, const AttentionItem& item, long count, void* partials, void* memory) {
    const long width = padded(call.head_dim), rows = rows_of(item);
    const Scratch s = divided(memory, rows, width);
    begin(call, item, width, s.all);
    char* const first = static_cast<char*>(partials);
    const size_t each = partial_bytes(rows, call.head_dim);
    for (long n = 0; n < count; ++n) {
        float* const at = reinterpret_cast<float*>(first + static_cast<size_t>(n) * each);
        merge(partial_at(at, rows, width), s.all, rows, width);
    }
    finish<E>(call, item, width, s);
}

#define QUINTET_ATTENTION_OF(F, Q) {F<Q, Q>, F<Q, Int8>, F<Q, Float8>, F<Q, Float8Wide>, F<Q, Int4>}
#define QUINTET_ATTENTION_KINDS(F) \
    {QUINTET_ATTENTION_OF(F, float), QUINTET_ATTENTION_OF(F, Bfloat16), QUINTET_ATTENTION_OF(F, Float16)}
#define QUINTET_STORE_OF(Q) {nullptr, to_int8<Q>, to_float8<Q, Narrow8>, to_float8<Q, Wide8>, to_int4<Q>}

#define QUINTET_ATTENTION_KERNELS                                                                     \
    {scratch_bytes, partial_bytes, QUINTET_ATTENTION_KINDS(attend), QUINTET_ATTENTION_KINDS(stretch), \
     {join<float>, join<Bfloat16>, join<Float16>},                                                    \
     {QUINTET_STORE_OF(float), QUINTET_STORE_OF(Bfloat16), QUINTET_STORE_OF(Float16)},                \
     whole_scratch_bytes, {whole<float>, whole<Bfloat16>, whole<Float16>}}

}  // namespace
}  // namespace quintet::cpu
