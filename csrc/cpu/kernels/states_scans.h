// State spaces: numbers of a state stay in registers while tokens go by. After vectors_*.h.
#pragma once

#include "cpu/kernels/states_math.h"

namespace quintet::cpu {
namespace {

// Tokens that some rows of a state are taken through before the next: what they bring, and what came of them, stays near.
constexpr long kNear = 16;
constexpr long kNearRows = 16;  // of a head's features
constexpr long kSide = 2;       // rows that share what a token brings
constexpr long kHeld = kLanes == 16 ? 8 : 4;  // vectors of each row in registers

template <typename E>
void moves(const SpaceCall& c, long first, long last) {
    const long shared = c.groups * c.width;
    for (long t = first; t < last; ++t) {
        widened(c.sides + t * shared, as<E>(c.into, t * c.into_stride), shared);
        widened(c.sides + (c.tokens + t) * shared, as<E>(c.out_of, t * c.out_of_stride), shared);
        float* const steps = c.steps + t * c.heads;
        float* const kept = steps + c.tokens * c.heads;
        const E* const dt = c.dt ? as<E>(c.dt, t * c.dt_stride) : nullptr;
        for_vectors(c.heads, [&](long h, long some) {
            Floats step = splat(1.0F);
            if (dt) {
                step = softplus_of(load_some(dt + h, some) + load_some(c.dt_bias + h, some));
                step = step < c.least ? splat(c.least) : step;
            }
            store_some(steps + h, step, some);
            store_some(kept + h, exp_of(-(power_of(load_some(c.a_log + h, some)) * step)), some);
        });
    }
}

struct Near {  // some tokens and rows of one request's head
    const float* from;
    float* to;  // null: the state is not written
    bool begins;  // the state, with zeros
    bool streamed;  // the state is written past the caches
    long tokens, width;
    const float *into[kNear], *out_of[kNear];
    float kept[kNear];
    float given[kNear][kNearRows];
    Floats sums[kNear][kNearRows];
};

struct Whole {
    constexpr operator long() const { return kLanes; }
};

inline void put(float* to, Floats x, Whole, bool streamed) { streamed ? stream(to, x) : store(to, x); }
inline void put(float* to, Floats x, long some, bool) { store_some(to, x, some); }

// `rows` rows from `row` on, `held` vectors of each from number `place` on, through the tokens. `some` numbers are in the
// last of them; a width that is a whole number of vectors says so by the type.
template <long rows, long held, typename Some>
inline void advance(Near& near, long row, long place, Some some) {
    Floats h[rows][held];
    for (long r = 0; r < rows; ++r) {
        const float* const from = near.from + (row + r) * near.width + place;
        for (long v = 0; v < held; ++v) h[r][v] = near.begins ? splat(0.0F) : load_some(from + v * kLanes, some);
    }
    for (long t = 0; t < near.tokens; ++t) {
        const float* const into = near.into[t] + place;
        const float* const out_of = near.out_of[t] + place;
        const Floats decay = splat(near.kept[t]);
        Floats given[rows], sums[rows];
#pragma GCC unroll 2
        for (long r = 0; r < rows; ++r) given[r] = splat(near.given[t][row + r]), sums[r] = near.sums[t][row + r];
#pragma GCC unroll 8
        for (long v = 0; v < held; ++v) {
            const Floats in = load_some(into + v * kLanes, some), out = load_some(out_of + v * kLanes, some);
#pragma GCC unroll 2
            for (long r = 0; r < rows; ++r) {
                h[r][v] = fma(given[r], in, h[r][v] * decay);
                sums[r] = fma(h[r][v], out, sums[r]);
            }
        }
#pragma GCC unroll 2
        for (long r = 0; r < rows; ++r) near.sums[t][row + r] = sums[r];
    }
    if (!near.to) return;
    for (long r = 0; r < rows; ++r) {
        float* const to = near.to + (row + r) * near.width + place;
        for (long v = 0; v < held; ++v) put(to + v * kLanes, h[r][v], some, near.streamed);
    }
}

template <long rows>
inline void advance_rows(Near& near, long row) {
    long place = 0;
    const auto through = [&]<long held>() {
        for (; place + held * kLanes <= near.width; place += held * kLanes) advance<rows, held>(near, row, place, Whole{});
    };
    through.template operator()<kHeld>();
    through.template operator()<kHeld / 2>();
    through.template operator()<1>();
    if (place < near.width) advance<rows, 1>(near, row, place, near.width - place);
}

// Tokens first..first + near.tokens - 1 of a request's head: those before 0 are accepted drafts, which the unit that is read
// keeps.
inline void brought(Near& near, const SpaceCall& c, const Stretch& at, long head, long first) {
    const long shared = c.groups * c.width, group = head / (c.heads / c.groups);
    for (long i = 0; i < near.tokens; ++i) {
        const long t = at.begin + first + i;
        if (first + i < 0) {
            const float* const update =
                update_of(c.state + at.read * c.unit, at.accepted + first + i, c.heads, head, c.dim, c.width);
            near.kept[i] = update[0], near.into[i] = near.out_of[i] = update + 1 + c.dim;
        } else {
            near.kept[i] = c.steps[(c.tokens + t) * c.heads + head];
            near.into[i] = c.sides + t * shared + group * c.width, near.out_of[i] = near.into[i] + c.tokens * shared;
        }
    }
}

template <typename E>
void space(const SpaceCall& c, long first, long last) {
    const long size = c.dim * c.width;
    Near near;
    near.width = c.width, near.streamed = c.past_caches;
    for (long unit = first; unit < last; ++unit) {
        const Stretch at = stretch_of(c.rows, unit / c.heads);
        const long head = unit % c.heads, known = at.known - at.begin, count = at.end - at.begin;
        float* const write = c.state + at.write * c.unit;
        const float* from = c.state + at.read * c.unit + head * size;
        near.begins = !at.read;
        const Floats skip = splat(c.skip ? c.skip[head] : 0.0F);
        long token = -at.accepted;
        do {  // a request without tokens keeps its state
            const bool drafts = token >= known && known < count;
            const long left = (drafts ? count : known) - token;
            near.tokens = left < kNear ? left : kNear;
            brought(near, c, at, head, token);
            const long own = token < 0 ? -token : 0;  // the first of the step's
            for (long p = 0; p < c.dim; p += kNearRows) {
                const long rows = p + kNearRows < c.dim ? kNearRows : c.dim - p;
                near.from = from + p * c.width, near.to = drafts ? nullptr : write + head * size + p * c.width;
                for (long i = 0; i < near.tokens; ++i) {
                    for (long r = 0; r < rows; ++r) near.sums[i][r] = splat(0.0F);
                    if (i < own) {
                        const float* const given = near.into[i] - c.dim + p;
                        for_vectors(rows, [&](long r, long some) { store_some(near.given[i] + r, load_some(given + r, some), some); });
                        continue;
                    }
                    const long t = at.begin + token + i;
                    const E* const x = as<E>(c.x, t * c.x_stride + head * c.dim + p);
                    const Floats step = splat(c.steps[t * c.heads + head]);
                    for_vectors(rows, [&](long r, long some) {
                        store_some(near.given[i] + r, load_some(x + r, some) * step, some);
                    });
                    if (!drafts) continue;
                    float* const update = update_of(write, i, c.heads, head, c.dim, c.width);
                    update[0] = near.kept[i];
                    widened(update + 1 + p, near.given[i], rows);
                    if (!p) widened(update + 1 + c.dim, near.into[i], c.width);
                }
                long row = 0;
                for (; row + kSide <= rows; row += kSide) advance_rows<kSide>(near, row);
                for (; row < rows; ++row) advance_rows<1>(near, row);
                for (long i = own; i < near.tokens; ++i) {
                    const long t = at.begin + token + i;
                    const E* const x = as<E>(c.x, t * c.x_stride + head * c.dim + p);
                    float* const out = c.out + (t * c.heads + head) * c.dim + p;
                    float totals[kNearRows];
                    for (long r = 0; r < rows; ++r) totals[r] = sum_across(near.sums[i][r]);
                    for_vectors(rows, [&](long r, long some) {
                        store_some(out + r, fma(skip, load_some(x + r, some), load_some(totals + r, some)), some);
                    });
                }
            }
            from = write + head * size, near.begins = false, token += near.tokens;
        } while (token < count);
    }
    if (c.past_caches) settled();
}

template <typename E>
void sides(const SelectiveCall& c, long first, long last) {
    for (long t = first; t < last; ++t) {
        widened(c.sides + t * c.width, as<E>(c.into, t * c.into_stride), c.width);
        widened(c.sides + (c.tokens + t) * c.width, as<E>(c.out_of, t * c.out_of_stride), c.width);
    }
}

// Channels side by side in a vector: each adds up its own numbers, from the first on, with any instruction set.
template <typename E>
inline void scan(const SelectiveCall& c, const Stretch& at, long start, long some) {
    float kept[kMostWidth * kLanes] = {}, rates[kMostWidth * kLanes] = {};
    if (at.read) turned(kept, kLanes, c.state + (at.read * c.channels + start) * c.width, some, c.width);
    turned(rates, kLanes, c.a_log + start * c.width, some, c.width);
    for (long n = 0; n < c.width; ++n) store(rates + n * kLanes, -power_of(load(rates + n * kLanes)));
    const Floats bias = load_some(c.dt_bias + start, some), skip = c.skip ? load_some(c.skip + start, some) : splat(0.0F);
    for (long t = at.begin; t < at.end; ++t) {
        const Floats step = softplus_of(load_some(as<E>(c.dt, t * c.dt_stride + start), some) + bias);
        const Floats x = load_some(as<E>(c.x, t * c.x_stride + start), some), given = x * step;
        const float* const into = c.sides + t * c.width;
        const float* const out_of = into + c.tokens * c.width;
        Floats sum = splat(0.0F);
        for (long n = 0; n < c.width; ++n) {
            const Floats decay = exp_of(load(rates + n * kLanes) * step);
            const Floats h = fma(given, splat(into[n]), load(kept + n * kLanes) * decay);
            store(kept + n * kLanes, h);
            sum = fma(h, splat(out_of[n]), sum);
        }
        store_some(c.out + t * c.channels + start, fma(skip, x, sum), some);
    }
    float* const state = c.state + (at.write * c.channels + start) * c.width;
    for (long i = 0; i < some; ++i) {
        for (long n = 0; n < c.width; ++n) state[i * c.width + n] = kept[n * kLanes + i];
    }
}

template <typename E>
void selective(const SelectiveCall& c, long first, long last) {
    const long blocks = (c.channels + kConvBlock - 1) / kConvBlock;
    for (long unit = first; unit < last; ++unit) {
        const Stretch at = stretch_of(c.rows, unit / blocks);
        const long start = unit % blocks * kConvBlock;
        const long count = c.channels - start < kConvBlock ? c.channels - start : kConvBlock;
        for_vectors(count, [&](long i, long some) { scan<E>(c, at, start + i, some); });
    }
}

}  // namespace
}  // namespace quintet::cpu
