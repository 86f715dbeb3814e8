// Attention of a request that is whole in a step. Needs what attention_body.h says.
//
// K and V of a head are copied once into the order in which products read them; then some rows' scores of all they see, their
// weights, and their sums of values, with nothing put aside between. A row's numbers are made in one order, counted from
// its request's first token, whatever rows stand beside it.
#pragma once

#include "cpu/kernels/attention_weights.h"

namespace quintet::cpu {
namespace {

constexpr long kWholeRows = 6, kWholeVectors = kLanes == 16 ? 4 : 2;  // of a tile: its sums stay in registers
constexpr long kWholeKeys = kWholeVectors * kLanes;                    // of a block of K
constexpr long kWholeGroup = 4 * kWholeRows;  // rows that share the reading of a block while it is in the first cache

constexpr long kWidest = kWholeGroup > kWholeKeys ? kWholeGroup : kWholeKeys;

constexpr long whole_keys(long length) { return (length + kWholeKeys - 1) / kWholeKeys * kWholeKeys; }

// What products are made of: floats, or pairs of neighbours for dot().
struct InFloats {
    using Element = float;
    static constexpr long kPair = 1;
    using Lanes = Floats;
    static Lanes lanes(const float* at) { return load(at); }
    static Lanes all(const float* at) { return splat(*at); }
    static Floats grow(Floats sum, Lanes a, Lanes b) { return fma(a, b, sum); }
};

#if defined(QUINTET_DOT)
struct InPairs {
    using Element = Bfloat16;
    static constexpr long kPair = 2;
    using Lanes = Pairs;
    static Lanes lanes(const Bfloat16* at) { return load_pairs(at); }
    static Lanes all(const Bfloat16* at) { return splat_pair(at); }
    static Floats grow(Floats sum, Lanes a, Lanes b) { return dot(sum, a, b); }
};
#endif

struct WholeScratch {
    float* q;        // [kWholeGroup or kWholeKeys, padded head_dim], where elements are widened
    void* k;         // [keys / kWholeKeys][head_dim / pair][kWholeKeys][pair]
    void* v;         // [keys / pair][padded head_dim][pair]
    float* scores;   // [kWholeGroup, keys]
    void* weights;   // the same, in what products are made of
    float* results;  // [kWholeRows, padded head_dim]
    float* zeros;    // [padded head_dim]
    float shares[kWholeGroup];  // 1 / the sum of a row's weights
    long keys, width;
};

inline size_t whole_scratch_bytes(long length, long head_dim) {
    const long keys = whole_keys(length), width = padded(head_dim);
    const long floats = keys * (head_dim + width + 2 * kWholeGroup) + (kWidest + kWholeRows + 1) * width + 8 * kLanes;
    return static_cast<size_t>(floats) * sizeof(float);
}

inline WholeScratch whole_divided(void* memory, long length, long head_dim) {
    WholeScratch s;
    s.keys = whole_keys(length);
    s.width = padded(head_dim);
    float* at = static_cast<float*>(memory);
    const auto take = [&at](long count) {
        float* const taken = at;
        at += (count + kLanes - 1) / kLanes * kLanes;
        return taken;
    };
    s.k = take(s.keys * head_dim);
    s.v = take(s.keys * s.width);
    s.scores = take(kWholeGroup * s.keys);
    s.weights = take(kWholeGroup * s.keys);
    s.q = take(kWidest * s.width);
    s.results = take(kWholeRows * s.width);
    s.zeros = take(s.width);
    __builtin_memset(s.zeros, 0, static_cast<size_t>(s.width) * sizeof(float));
    return s;
}

// ------------------------------------------------------------------------------------------------------- copies

// Rows of 32-bit units become [units][kWholeKeys]: of each row a column.
inline void lay_columns(const char* const* rows, long count, long units, char* to) {
    constexpr long kUnit = 4;
    long r = 0;
#if defined(QUINTET_DOT)
    const Bfloat16* sixteen[kLanes];
    for (; units % kLanes == 0 && r + kLanes <= count; r += kLanes) {
        for (long i = 0; i < kLanes; ++i) sixteen[i] = reinterpret_cast<const Bfloat16*>(rows[r + i]);
        for (long d = 0; d < units; d += kLanes) {
            turn(sixteen, 2 * d, reinterpret_cast<Bfloat16*>(to + (d * kWholeKeys + r) * kUnit), 2 * kWholeKeys);
        }
    }
#endif
    for (; r < count; ++r) {
        for (long d = 0; d < units; ++d) __builtin_memcpy(to + (d * kWholeKeys + r) * kUnit, rows[r] + d * kUnit, kUnit);
    }
}

// A row of each of two positions becomes pairs.
template <typename E>
inline void lay_pair(const E* even, const E* odd, long dim, E* to) {
    long i = 0;
#if defined(QUINTET_DOT)
    for (; i + 2 * kLanes <= dim; i += 2 * kLanes) {
        Pairs low, high;
        interleave(even + i, odd + i, low, high);
        store_pairs(to + 2 * i, low);
        store_pairs(to + 2 * (i + kLanes), high);
    }
#endif
    for (; i < dim; ++i) {
        to[2 * i] = even[i];
        to[2 * i + 1] = odd[i];
    }
}

// Positions from the request's end on, to a whole block, are zeros, and so are numbers past a head's end.
template <typename In, typename E>
__attribute__((noinline)) void lay_whole(const WholeCall& call, const WholeItem& item, const WholeScratch& s) {
    using To = typename In::Element;
    constexpr bool kWidened = sizeof(E) != sizeof(To);
    const long dim = call.head_dim, units = dim / In::kPair, length = item.length;
    const E* const k = static_cast<const E*>(call.k) + item.start * call.k_stride + item.kv_head * dim;
    const E* const v = static_cast<const E*>(call.v) + item.start * call.v_stride + item.kv_head * dim;
    const size_t bytes = static_cast<size_t>(s.keys) * sizeof(To);
    if (s.keys > length) __builtin_memset(s.k, 0, bytes * static_cast<size_t>(dim));
    if (s.keys > length || s.width > dim) __builtin_memset(s.v, 0, bytes * static_cast<size_t>(s.width));
    for (long p = 0; p < length; p += kWholeKeys) {
        const long count = length - p < kWholeKeys ? length - p : kWholeKeys;
        const char* rows[kWholeKeys];
        for (long i = 0; i < count; ++i) {
            const E* const row = k + (p + i) * call.k_stride;
            rows[i] = reinterpret_cast<const char*>(row);
            if constexpr (kWidened) {
                float* const wide = static_cast<float*>(s.q) + i * s.width;
                widen(row, wide, dim, s.width);
                rows[i] = reinterpret_cast<const char*>(wide);
            }
        }
        lay_columns(rows, count, units, static_cast<char*>(s.k) + p * dim * static_cast<long>(sizeof(To)));
    }
    for (long p = 0; p < length; p += In::kPair) {
        const E* const row = v + p * call.v_stride;
        To* const to = static_cast<To*>(s.v) + p * s.width;
        if constexpr (In::kPair == 2) {
            lay_pair(row, p + 1 < length ? row + call.v_stride : reinterpret_cast<const E*>(s.zeros), dim, to);
        } else {
            widen(row, to, dim, s.width);
        }
    }
}

// -------------------------------------------------------------------------------------------------------- tiles

// sums [Rows][Vectors] += of x [Rows] and the lanes at w, a step of `stride` elements after the other.
template <typename In, long Rows, long Vectors>
inline void whole_grow(Floats (&sums)[Rows][Vectors], const typename In::Element* const (&x)[Rows],
                       const typename In::Element* w, long steps, long stride) {
    for (long i = 0; i < steps; ++i, w += stride) {
        typename In::Lanes lanes[Vectors];
#pragma GCC unroll 8
        for (long v = 0; v < Vectors; ++v) lanes[v] = In::lanes(w + v * kLanes * In::kPair);
#pragma GCC unroll 8
        for (long r = 0; r < Rows; ++r) {
            const typename In::Lanes one = In::all(x[r] + i * In::kPair);
#pragma GCC unroll 8
            for (long v = 0; v < Vectors; ++v) sums[r][v] = In::grow(sums[r][v], lanes[v], one);
        }
    }
}

// Scores of Rows rows and a block of keys.
template <typename In, long Rows>
inline void whole_scores(const typename In::Element* const* q, long rows, const typename In::Element* k, long dim,
                         float* to, long keys) {
    if constexpr (Rows > 1) {
        if (rows < Rows) return whole_scores<In, Rows - 1>(q, rows, k, dim, to, keys);
    }
    const typename In::Element* x[Rows];
    for (long r = 0; r < Rows; ++r) x[r] = q[r];
    Floats sums[Rows][kWholeVectors] = {};
    whole_grow<In, Rows, kWholeVectors>(sums, x, k, dim / In::kPair, kWholeKeys * In::kPair);
#pragma GCC unroll 8
    for (long r = 0; r < Rows; ++r) {
#pragma GCC unroll 8
        for (long v = 0; v < kWholeVectors; ++v) store(to + r * keys + v * kLanes, sums[r][v]);
    }
}

// Sums of values of Rows rows over `seen`, in the lanes from `at` on, each times the row's share.
template <typename In, long Rows, long Vectors>
inline void whole_tile(const WholeScratch& s, long row, long at, Range seen, float* to) {
    using W = typename In::Element;
    const W* x[Rows];
    for (long r = 0; r < Rows; ++r) x[r] = static_cast<const W*>(s.weights) + (row + r) * s.keys + seen.first;
    Floats sums[Rows][Vectors] = {};
    const W* const v = static_cast<const W*>(s.v) + seen.first * s.width + at * In::kPair;
    whole_grow<In, Rows, Vectors>(sums, x, v, (seen.last - seen.first + In::kPair - 1) / In::kPair, s.width * In::kPair);
#pragma GCC unroll 8
    for (long r = 0; r < Rows; ++r) {
#pragma GCC unroll 8
        for (long i = 0; i < Vectors; ++i) store(to + r * s.width + at + i * kLanes, sums[r][i] * splat(s.shares[row + r]));
    }
}

template <typename In, long Rows>
inline void whole_values(const WholeScratch& s, long row, long rows, Range seen, float* to) {
    if constexpr (Rows > 1) {
        if (rows < Rows) return whole_values<In, Rows - 1>(s, row, rows, seen, to);
    }
    long at = 0;
    for (; at + kWholeKeys <= s.width; at += kWholeKeys) whole_tile<In, Rows, kWholeVectors>(s, row, at, seen, to);
    if constexpr (kWholeVectors == 4) {
        for (; at + 2 * kLanes <= s.width; at += 2 * kLanes) whole_tile<In, Rows, 2>(s, row, at, seen, to);
    }
    for (; at < s.width; at += kLanes) whole_tile<In, Rows, 1>(s, row, at, seen, to);
}

// ------------------------------------------------------------------------------------------------------ weights

// One row: what it sees, and what any of its group sees, of whole pairs.
struct WholeRow {
    Range seen, all;
    float scale;
    float sink;      // joins the sum where there is one
    bool sinks;
};

inline long within(long at, long reach) { return at < -reach ? -reach : at > reach ? reach : at; }

// What a row's head adds to the scores of the kLanes keys from `apart` on, counted from the query's own position.
inline Floats biases_of(const float* own, long apart, long reach) {
    float lanes[kLanes];
    for (long i = 0; i < kLanes; ++i) {
        lanes[i] = own[within(apart + i, reach)];
    }
    return load(lanes);
}

struct WholePlace {
    long token, head;  // counted from the request's first, and from the layer's
};

// The products of distances that belong to a query of the request and the kLanes keys from `key` on.
template <typename E>
inline Floats distance_products(const WholeCall& call, const WholeItem& item, WholePlace place, long key) {
    const DistanceProducts& d = call.distances;
    const int32_t* const columns = d.columns + d.reach;
    const E* const mine = static_cast<const E*>(d.of_queries);
    const E* const theirs = static_cast<const E*>(d.of_keys);
    const long row = call.heads * d.width, first = item.start * row + place.head * d.width;
    E a[kLanes] = {}, b[kLanes] = {};
    for (long i = 0; i < kLanes && key + i < item.length; ++i) {
        const long column = columns[within(key + i - place.token, d.reach)];
        if (mine) a[i] = mine[first + place.token * row + column];
        if (theirs) b[i] = theirs[first + (key + i) * row + column];
    }
    return load(a) + load(b);
}

// Scores become what the softmax takes, where they are more than multiples.
template <typename E>
[[maybe_unused]] __attribute__((noinline)) void whole_raise(const WholeCall& call, const WholeItem& item, const WholeRow& row,
                                                            WholePlace place, float* scores) {
    const float slope = call.slopes ? call.slopes[place.head] : 0.0F;
    const float* const biases = call.biases ? call.biases + place.head * (2 * call.reach + 1) + call.reach : nullptr;
    for (long i = row.all.first / kLanes * kLanes; i < row.all.last; i += kLanes) {
        Floats x = load(scores + i);
        if (call.distances.columns) x = x + distance_products<E>(call, item, place, i);
        x = x * call.scale;
        if (call.softcap > 0.0F) x = tanh_of(x / call.softcap) * call.softcap;
        if (call.slopes) {
            const Floats apart = numbers(i) - static_cast<float>(place.token);
            x = fma(splat(slope), apart > 0.0F ? -apart : apart, x);
        }
        if (biases) x = x + biases_of(biases, i - place.token, call.reach);
        store(scores + i, x);
    }
}

// A row's scores become weights, 0 outside what it sees. Returns their sum: of what they were rounded to. Never a copy of
// this in another function.
template <typename In>
__attribute__((noinline)) float whole_weigh(const WholeRow& row, float* scores, typename In::Element* weights) {
    constexpr uint32_t kLaneCount = kLanes;
    const long from = row.all.first / (2 * kLanes) * (2 * kLanes), last = row.all.last;
    const uint32_t count = static_cast<uint32_t>(row.seen.last - row.seen.first);
    const Floats nothing = splat(kNothing);
    Floats top = row.sinks ? splat(row.sink) : nothing;
    Ints place = lane_numbers() + static_cast<uint32_t>(from - row.seen.first);  // below the first it wraps to something large
    for (long i = from; i < last; i += kLanes, place += kLaneCount) {
        const Floats x = load(scores + i), kept = place < count ? x : nothing;
        top = kept > top ? kept : top;
        store(scores + i, kept);
    }
    const Floats shift = splat(largest(top));
    Floats sum = splat(0.0F);
    for (long i = from; i < last; i += 2 * kLanes) {
        const Floats low = (load(scores + i) - shift) * row.scale;
        const Floats high = i + kLanes < last ? (load(scores + i + kLanes) - shift) * row.scale : nothing;
        if constexpr (In::kPair == 1) {
            const Floats a = exp_of(low), b = exp_of(high);
            sum += a + b;
            store(weights + i, a);
            store(weights + i + kLanes, b);
        }
#if defined(QUINTET_DOT)
        if constexpr (In::kPair == 2) {
            const Pairs rounded = narrow_both(coarse_exp_of(low), coarse_exp_of(high));
            sum = dot(sum, rounded, splat_ones());
            store_pairs(weights + i, rounded);
        }
#endif
    }
    float total = sum_of(sum);
    if (row.sinks) {
        float lanes[kLanes];
        store(lanes, exp_of(splat(row.sink) - shift));
        total += lanes[0];
    }
    return total;
}

// -------------------------------------------------------------------------------------------------------- items

inline Range whole_sight(const WholeCall& call, const WholeItem& item, long own) {
    const long behind = call.window > 0 && own >= call.window ? own + 1 - call.window : 0;
    const long first = call.chunk > 0 ? own - own % call.chunk : behind;
    if (call.causal) return {first, own + 1};
    return {first, call.window > 0 && own + call.window < item.length ? own + call.window : item.length};
}

inline Range whole_seen(const Range* rows, long count) {  // each sees itself
    Range all = rows[0];
    for (long r = 1; r < count; ++r) {
        all.first = rows[r].first < all.first ? rows[r].first : all.first;
        all.last = rows[r].last > all.last ? rows[r].last : all.last;
    }
    return all;
}

// The item's rows go by token, and within it by head.
inline WholePlace whole_place(const WholeCall& call, const WholeItem& item, long row) {
    const long group = call.heads / call.kv_heads;
    return {item.first + row / group, item.kv_head * group + row % group};
}

template <typename In, typename E>
inline const typename In::Element* whole_query(const WholeCall& call, const WholeItem& item, long row, float* wide) {
    const WholePlace place = whole_place(call, item, row);
    const E* const at = static_cast<const E*>(call.q) + (item.start + place.token) * call.q_stride + place.head * call.head_dim;
    if constexpr (sizeof(E) == sizeof(typename In::Element)) {
        return reinterpret_cast<const typename In::Element*>(at);
    } else {
        widen(at, wide, call.head_dim, padded(call.head_dim));
        return wide;
    }
}

template <typename In, typename E>
inline float whole_share(const WholeCall& call, const WholeItem& item, long row, WholeRow seen, float* scores,
                         typename In::Element* weights) {
    const WholePlace place = whole_place(call, item, row);
    seen.scale = call.scale;
    seen.sinks = call.sinks != nullptr;
    seen.sink = seen.sinks ? call.sinks[place.head] : 0.0F;
    if (call.slopes || call.biases || call.distances.columns || call.softcap > 0.0F || seen.sinks) {
        whole_raise<E>(call, item, seen, place, scores);
        seen.scale = 1.0F;
    }
    return 1.0F / whole_weigh<In>(seen, scores, weights);
}

template <typename E>
inline void whole_finish(const WholeCall& call, const WholeItem& item, long row, const float* result) {
    const WholePlace place = whole_place(call, item, row);
    E* const out = static_cast<E*>(call.out) + ((item.start + place.token) * call.heads + place.head) * call.head_dim;
    for (long d = 0; d < call.head_dim; ++d) narrow(result[d] + 0.0F, out + d);  // no -0
}

template <typename In, typename E>
void whole_of(const WholeCall& call, const WholeItem& item, void* memory) {
    using W = typename In::Element;
    const long rows = (item.last - item.first) * (call.heads / call.kv_heads);
    WholeScratch s = whole_divided(memory, item.length, call.head_dim);
    lay_whole<In, E>(call, item, s);
    for (long done = 0; done < rows; done += kWholeGroup) {
        const long count = rows - done < kWholeGroup ? rows - done : kWholeGroup;
        const W* q[kWholeGroup];
        Range seen[kWholeGroup];
        for (long r = 0; r < count; ++r) {
            q[r] = whole_query<In, E>(call, item, done + r, s.q + r * s.width);
            seen[r] = whole_sight(call, item, whole_place(call, item, done + r).token);
        }
        Range all = whole_seen(seen, count);
        all.first -= all.first % 2;
        for (long p = all.first / kWholeKeys * kWholeKeys; p < all.last; p += kWholeKeys) {
            const W* const k = static_cast<const W*>(s.k) + p * call.head_dim;
            for (long r = 0; r < count; r += kWholeRows) {
                whole_scores<In, kWholeRows>(q + r, count - r, k, call.head_dim, s.scores + r * s.keys + p, s.keys);
            }
        }
        for (long r = 0; r < count; ++r) {
            W* const weights = static_cast<W*>(s.weights) + r * s.keys;
            s.shares[r] = whole_share<In, E>(call, item, done + r, {seen[r], all, 0, 0, false}, s.scores + r * s.keys, weights);
        }
        for (long r = 0; r < count; r += kWholeRows) {
            whole_values<In, kWholeRows>(s, r, count - r, all, s.results);
            for (long i = r; i < count && i < r + kWholeRows; ++i) {
                whole_finish<E>(call, item, done + i, s.results + (i - r) * s.width);
            }
        }
    }
}

template <typename E>
struct Whole {
    using In = InFloats;
};
#if defined(QUINTET_DOT)
template <>
struct Whole<Bfloat16> {
    using In = InPairs;
};
#endif

template <typename E>
void whole(const WholeCall& call, const WholeItem& item, void* memory) {
    using In = typename Whole<E>::In;
    if (call.head_dim % In::kPair == 0) {
        whole_of<In, E>(call, item, memory);
    } else {
        whole_of<InFloats, E>(call, item, memory);
    }
}

}  // namespace
}  // namespace quintet::cpu
