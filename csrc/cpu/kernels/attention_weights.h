// From scores to weights. Needs what attention_body.h says.
#pragma once

#include "cpu/kernels/attention_scratch.h"

namespace quintet::cpu {
namespace {

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

// Scores of one row become what the softmax takes; returns the largest of each lane.
inline Floats raise(const AttentionCall& call, Range seen, float* scores, const Scratch& s, long row) {
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
        if (s.slopes) {
            const Floats apart = numbers(i) + distance;
            x = fma(splat(slope), apart > 0.0F ? -apart : apart, x);
        }
        x = place < count ? x : nothing;
        top = x > top ? x : top;
        store(scores + i, x);
    }
    return top;
}

// Scores of one row become weights relative to the maximum so far. Never a copy of this in another function: all rows
// go through the same instructions.
__attribute__((noinline)) void weigh(const AttentionCall& call, Range seen, float* scores, Scratch& s, long row) {
    constexpr uint32_t kLaneCount = kLanes;
    const uint32_t first = static_cast<uint32_t>(seen.first), count = static_cast<uint32_t>(seen.last - seen.first);
    const float highest = largest(raise(call, seen, scores, s, row));
    const float before = s.now.best[row];
    const float best = highest > before ? highest : before;
    const Floats shift = splat(best);
    Floats sum = splat(0.0F);
    Ints place = lane_numbers() - first;
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

}  // namespace
}  // namespace quintet::cpu
