// The loops of states.h, written once over the vectors of one instruction set. After vectors_*.h.
#pragma once

#include "cpu/kernels/activation_math.h"
#include "cpu/kernels/norm_row.h"
#include "cpu/kernels/states.h"
#include "cpu/kernels/states_scans.h"

namespace quintet::cpu {
namespace {

constexpr long kTokens = 32;  // that one row of a state is taken through before the next: what they bring stays near

// A head's state, as it was, where it is to be.
inline float* taken_over(float* state, const Stretch& at, long unit, long head, long size) {
    float* const to = state + at.write * unit + head * size;
    const float* const from = state + at.read * unit + head * size;
    for_vectors(size, [=](long i, long count) {
        store_some(to + i, at.read ? load_some(from + i, count) : splat(0.0F), count);
    });
    return to;
}

// [rows, columns], the rows `stride` apart -> the columns, kConvBlock apart. Columns: their number where it is known
// at compile time.
template <long Columns>
inline void channels_turned(float* out, const float* x, long rows, long columns, long stride) {
    const long width = Columns ? Columns : columns;
    for (long r = 0; r < rows; ++r) {
        for (long c = 0; c < width; ++c) out[c * kConvBlock + r] = x[r * stride + c];
    }
}

// A block's channels through a request's tokens. `seen` goes round: the oldest token of those that are seen stands at
// `oldest`. Taps is what c.taps is, or 0 for any number; without Drafts, a state has no room for any.
template <typename E, long Taps, bool Drafts>
void convolved(const ConvCall& c, long first, long last) {
    const long taps = Taps ? Taps : c.taps, past = taps - 1, blocks = (c.channels + kConvBlock - 1) / kConvBlock;
    constexpr long kPast = Taps ? Taps - 1 : 0, kSteps = Taps ? Taps : kMostTaps;
    float seen[kSteps][kConvBlock], weights[kSteps][kConvBlock], bias[kConvBlock];
    const long room = Drafts ? past + c.rows.drafts : past;
    float brought[kConvBlock * (kSteps + kMostDrafts)];  // as it lies in memory, channel by channel
    for (long unit = first; unit < last; ++unit) {
        const Stretch at = stretch_of(c.rows, unit / blocks);
        const long start = unit % blocks * kConvBlock;
        const long count = c.channels - start < kConvBlock ? c.channels - start : kConvBlock;
        widened(brought, as<E>(c.weight, start * taps), count * taps);
        channels_turned<Taps>(&weights[0][0], brought, count, taps, taps);
        if (c.bias) widened(bias, as<E>(c.bias, start), count);
        if (at.read) {
            widened(brought, as<E>(c.state, (at.read * c.channels + start) * room), count * room);
            channels_turned<kPast>(&seen[0][0], brought + (Drafts ? at.accepted : 0), count, past, room);
        } else {
            for (long k = 0; k < past; ++k) for_vectors(count, [&](long i, long some) { store_some(seen[k] + i, splat(0.0F), some); });
        }
        long oldest = 0;
        const auto keep = [&] {
            for (long k = 0; k < past; ++k) {
                const float* const from = seen[(oldest + k) % taps];
                for (long i = 0; i < count; ++i) brought[i * room + k] = from[i];
            }
            for (long i = 0; Drafts && i < count; ++i) {
                for (long k = past; k < room; ++k) brought[i * room + k] = 0.0F;
            }
        };
        for (long t = at.begin; t < at.end; ++t) {
            if (Drafts && t == at.known) keep();
            const E* const x = as<E>(c.x, t * c.x_stride + start);
            const E* const gate = c.gates ? as<E>(c.gates, t * c.gate_stride + start) : nullptr;
            E* const out = static_cast<E*>(c.out) + t * c.channels + start;
            float* const now = seen[(oldest + past) % taps];
            for_vectors(count, [&](long i, long some) {
                Floats given = load_some(x + i, some);
                if (gate) given = rounded(given * load_some(gate + i, some), E{});
                store_some(now + i, given, some);
                Floats sum = load_some(seen[oldest] + i, some) * load_some(weights[0] + i, some);
                for (long k = 1; k < taps; ++k) {
                    sum = fma(load_some(seen[(oldest + k) % taps] + i, some), load_some(weights[k] + i, some), sum);
                }
                if (c.bias) sum = sum + load_some(bias + i, some);
                if (c.silu) sum = sum * sigmoid_of(sum);
                if (gate) sum = rounded(sum, E{}) * load_some(gate + c.channels + i, some);
                store_some(out + i, sum, some);
            });
            for (long i = 0; Drafts && t >= at.known && i < count; ++i) brought[i * room + past + t - at.known] = now[i];
            oldest = (oldest + 1) % taps;
        }
        if (!Drafts || at.known == at.end) keep();
        E* const state = static_cast<E*>(c.state) + (at.write * c.channels + start) * room;
        for_vectors(count * room, [&](long i, long some) { store_some(state + i, load_some(brought + i, some), some); });
    }
}

template <typename E>
void conv(const ConvCall& c, long first, long last) {
    if (c.rows.drafts) return convolved<E, 0, true>(c, first, last);
    if (c.taps == 3) return convolved<E, 3, false>(c, first, last);
    if (c.taps == 4) return convolved<E, 4, false>(c, first, last);
    convolved<E, 0, false>(c, first, last);
}

template <typename E>
void rates(const DeltaCall& c, long first, long last) {
    const long decays = c.by_channel ? c.width : 1;
    for (long t = first; t < last; ++t) {
        const E* const learn = as<E>(c.learn, t * c.learn_stride);
        const E* const forget = as<E>(c.forget, t * c.forget_stride);
        float* const kept = c.steps + (c.tokens + t * decays) * c.heads;
        for_vectors(c.heads, [&](long h, long some) {
            store_some(c.steps + t * c.heads + h, c.beta_scale * sigmoid_of(load_some(learn + h, some)), some);
        });
        const auto fade = [&](long at, long some, Floats rate) {
            const Floats gate = load_some(forget + at, some) + load_some(c.dt_bias + at, some);
            const bool bounded = c.lower_bound < 0.0F;
            store_some(kept + at, exp_of(bounded ? c.lower_bound * sigmoid_of(rate * gate) : -(rate * softplus_of(gate))), some);
        };
        for (long h = 0; c.by_channel && h < c.heads; ++h) {
            const Floats rate = power_of(splat(c.a_log[h]));
            for_vectors(c.width, [&](long i, long some) { fade(h * c.width + i, some, rate); });
        }
        if (c.by_channel) continue;
        for_vectors(c.heads, [&](long h, long some) { fade(h, some, power_of(load_some(c.a_log + h, some))); });
    }
}

template <typename E>
void unit(const DeltaCall& c, long first, long last) {
    for (long row = first; row < last; ++row) {
        const long token = row / c.groups, group = row % c.groups;
        const E* const sides[2] = {as<E>(c.q, token * c.q_stride + group * c.width),
                                   as<E>(c.k, token * c.k_stride + group * c.width)};
        for (long side = 0; side < 2; ++side) {
            const E* const x = sides[side];
            float* const out = c.units + (side * c.tokens * c.groups + row) * c.width;
            const float squares = sum_of(c.width, [=](long i, long count, Floats sum) {
                const Floats each = load_some(x + i, count);
                return fma(each, each, sum);
            });
            const float root = square_root(squares + 1e-6F), narrow = square_root(static_cast<float>(c.width));
            const Floats factor = splat(side ? 1.0F / root : 1.0F / root / narrow);
            for_vectors(c.width, [=](long i, long count) { store_some(out + i, load_some(x + i, count) * factor, count); });
        }
    }
}

template <typename E, bool ByChannel>
void deltas(const DeltaCall& c, long first, long last) {
    const float* const kept = c.steps + c.tokens * c.heads;
    for (long unit = first; unit < last; ++unit) {
        const Stretch at = stretch_of(c.rows, unit / c.heads);
        const long head = unit % c.heads, group = head / (c.heads / c.groups);
        float* const state = taken_over(c.state, at, c.unit, head, c.values * c.width);
        for (long from = at.begin, until; from < at.end; from = until) {
            const bool drafts = from >= at.known;
            const long end = drafts ? at.end : at.known;
            until = from + kTokens < end ? from + kTokens : end;
            for (long p = 0; p < c.values; ++p) {
                float* row = state + p * c.width;
                float aside[kMostWidth];
                if (drafts) {
                    widened(aside, row, c.width);
                    row = aside;
                }
                for (long a = 0; from == at.begin && a < at.accepted; ++a) {
                    const float* const update = update_of(c.state + at.read * c.unit, a, c.heads, head, c.values, c.width);
                    const Floats decay = splat(update[0]), given = splat(update[1 + p]);
                    for_vectors(c.width, [=](long i, long count) {
                        const Floats key = load_some(update + 1 + c.values + i, count);
                        store_some(row + i, fma(given, key, load_some(row + i, count) * decay), count);
                    });
                }
                for (long t = from; t < until; ++t) {
                    const float* const decays = kept + (t * c.heads + head) * (ByChannel ? c.width : 1);
                    const Floats same = splat(*decays);
                    const auto decay = [=](long i, long count) { return ByChannel ? load_some(decays + i, count) : same; };
                    const float* const q = c.units + (t * c.groups + group) * c.width;
                    const float* const k = q + c.tokens * c.groups * c.width;
                    const float found = sum_of(c.width, [=](long i, long count, Floats s) {
                        return fma(load_some(row + i, count) * decay(i, count), load_some(k + i, count), s);
                    });
                    const float value = one(as<E>(c.v, t * c.v_stride + head * c.values + p));
                    const float given = (value - found) * c.steps[t * c.heads + head];
                    const Floats missing = splat(given);
                    const float sum = sum_of(c.width, [=](long i, long count, Floats s) {
                        const Floats h = fma(missing, load_some(k + i, count), load_some(row + i, count) * decay(i, count));
                        store_some(row + i, h, count);
                        return fma(h, load_some(q + i, count), s);
                    });
                    c.out[(t * c.heads + head) * c.values + p] = sum;
                    if (!drafts) continue;
                    float* const update = update_of(c.state + at.write * c.unit, t - from, c.heads, head, c.values, c.width);
                    update[0] = *decays, update[1 + p] = given;
                    if (!p) widened(update + 1 + c.values, k, c.width);
                }
            }
        }
    }
}

template <typename E>
void delta(const DeltaCall& c, long first, long last) {
    return c.by_channel ? deltas<E, true>(c, first, last) : deltas<E, false>(c, first, last);
}

template <typename E>
void gated_piece(const GatedNormCall& c, long first, long last) {
    for (long row = first; row < last; ++row) {
        const long token = row / c.pieces, piece = row % c.pieces;
        const float* const x = c.x + row * c.width;
        const E* const gate = as<E>(c.gate, token * c.gate_stride + piece * c.width);
        const E* const weight = c.weight ? as<E>(c.weight, piece % c.weights * c.width) : nullptr;
        E* const out = static_cast<E*>(c.out) + row * c.width;
        const auto factor = [=](long i, long count) {
            const Floats g = load_some(gate + i, count);
            return g * sigmoid_of(g);
        };
        Floats inverse = splat(1.0F);
        if (weight) {
            const float squares = sum_of(c.width, [=](long i, long count, Floats sum) {
                const Floats each = c.after ? load_some(x + i, count) : load_some(x + i, count) * factor(i, count);
                return fma(each, each, sum);
            });
            inverse = inverse_root(squares, c.width, c.eps);
        }
        for_vectors(c.width, [=](long i, long count) {
            const Floats each = load_some(x + i, count) * factor(i, count);
            store_some(out + i, weight ? each * inverse * load_some(weight + i, count) : each, count);
        });
    }
}

template <typename E>
void sigmoid(const SigmoidCall& c, long first, long last) {
    for (long row = first; row < last; ++row) {
        const E* const x = as<E>(c.x, row * c.x_stride);
        const E* const gate = as<E>(c.gate, row * c.gate_stride);
        E* const out = static_cast<E*>(c.out) + row * c.width;
        for_vectors(c.width, [=](long i, long count) {
            store_some(out + i, load_some(x + i, count) * sigmoid_of(load_some(gate + i, count)), count);
        });
    }
}

}  // namespace
}  // namespace quintet::cpu

#define QUINTET_STATE_KERNEL(name) {{name<float>, name<Bfloat16>, name<Float16>}}
#define QUINTET_STATE_KERNELS                                                                              \
    {QUINTET_STATE_KERNEL(conv),      QUINTET_STATE_KERNEL(moves), QUINTET_STATE_KERNEL(space),           \
     QUINTET_STATE_KERNEL(sides),     QUINTET_STATE_KERNEL(selective), QUINTET_STATE_KERNEL(rates),       \
     QUINTET_STATE_KERNEL(unit),      QUINTET_STATE_KERNEL(delta), QUINTET_STATE_KERNEL(gated_piece), \
     QUINTET_STATE_KERNEL(sigmoid)}
