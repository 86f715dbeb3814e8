#include "cpu/elementwise/streams.h"

#include <cstring>

#include "cpu/kernels/vectors_baseline.h"
#include "cpu/rows.h"

namespace quintet::cpu {

namespace {

template <typename E>
float one(const E* at) {
    return load_some(at, 1)[0];
}

template <typename E>
void predict(const StreamsCall& c) {
    const long n = c.count, width = c.width;
    for_rows(c.tokens, 2 * n * width * static_cast<long>(sizeof(E)), [&](long first, long last) {
        for (long token = first; token < last; ++token) {
            const E* const coefs = static_cast<const E*>(c.coefs) + token * c.coef_stride;
            Floats by[kMostStreams][kMostStreams];
            for (long i = 0; i < n; ++i) {
                for (long j = 0; j < n; ++j) by[i][j] = splat(one(coefs + i * n + j));
            }
            for (long at = 0; at < width; at += kLanes) {
                const long left = width - at, place = token * width + at;
                Floats x[kMostStreams];
                for (long j = 0; j < n; ++j) x[j] = load_some(static_cast<const E*>(c.in[j]) + place, left);
                for (long i = 0; i < n; ++i) {
                    Floats sum = splat(0.0F);
                    for (long j = 0; j < n; ++j) sum = fma(x[j], by[i][j], sum);
                    store_some(static_cast<E*>(c.out[i]) + place, sum + x[i], left);
                }
            }
        }
    });
}

template <typename E>
void correct(const StreamsCall& c) {
    const long width = c.width;
    for_rows(c.tokens, 2 * c.count * width * static_cast<long>(sizeof(E)), [&](long first, long last) {
        for (long token = first; token < last; ++token) {
            const E* const coefs = static_cast<const E*>(c.coefs) + token * c.coef_stride;
            for (long at = 0; at < width; at += kLanes) {
                const long left = width - at, place = token * width + at;
                const Floats made = load_some(static_cast<const E*>(c.made) + place, left);
                const Floats gained = made - load_some(static_cast<const E*>(c.in[c.active]) + place, left);
                for (long i = 0; i < c.count; ++i) {
                    const Floats x = load_some(static_cast<const E*>(c.in[i]) + place, left);
                    const Floats sum = fma(gained, splat(one(coefs + i) + 1.0F), x);
                    store_some(static_cast<E*>(c.out[i]) + place, sum, left);
                    if (i != c.active) continue;
                    const Floats factor = load_some(static_cast<const E*>(c.weight) + at, left);
                    store_some(static_cast<E*>(c.scaled) + place, rounded(sum, E{}) * factor, left);
                }
            }
        }
    });
}

// In one order, whatever else there is.
template <typename E, typename Each>
float sum_of(const E* x, long width, const Each& each) {
    Floats sums[4] = {splat(0.0F), splat(0.0F), splat(0.0F), splat(0.0F)};
    for (long at = 0, turn = 0; at < width; at += kLanes, turn = (turn + 1) % 4) {
        Floats y = each(load_some(x + at, width - at));
        for (long lane = width - at; lane < kLanes; ++lane) y[lane] = 0.0F;
        sums[turn] += y;
    }
    return sum_across((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

template <typename E>
float mean_square(const E* x, long width) {
    return sum_of(x, width, [](Floats y) { return y * y; }) / static_cast<float>(width);
}

constexpr float kLeast = 1e-5F;  // of a mean of squares that is divided by

template <typename E>
void sized(const SizedCall& c) {
    const long width = c.width;
    for_rows(c.tokens, 3 * width * static_cast<long>(sizeof(E)), [&](long first, long last) {
        for (long token = first; token < last; ++token) {
            const E* const x = static_cast<const E*>(c.x) + token * c.stride;
            const float wanted = square_root(mean_square(static_cast<const E*>(c.like) + token * width, width));
            const float there = mean_square(x, width);
            const float large = square_root(there > kLeast ? there : kLeast);
            E* const out = static_cast<E*>(c.out) + token * width;
            for (long at = 0; at < width; at += kLanes) {
                store_some(out + at, load_some(x + at, width - at) * wanted / splat(large), width - at);
            }
        }
    });
}

template <typename E>
void cut(const SizedCall& c) {
    const long width = c.width;
    for_rows(c.tokens, 4 * width * static_cast<long>(sizeof(E)), [&](long first, long last) {
        for (long token = first; token < last; ++token) {
            const E* const x = static_cast<const E*>(c.x) + token * c.stride;
            E* const out = static_cast<E*>(c.out) + token * 2 * width;
            const float count = static_cast<float>(width);
            const float mean = sum_of(x, width, [](Floats y) { return y; }) / count;
            const float variance = sum_of(x, width, [=](Floats y) { return (y - mean) * (y - mean); }) / count;
            const float least = mean + square_root(variance) * c.deviations;
            for (long at = 0; at < width; at += kLanes) {
                const Floats above = load_some(x + at, width - at) - least;
                store_some(out + at, above < 0.0F ? splat(0.0F) : above, width - at);
            }
            std::memcpy(out + width, x + width, static_cast<size_t>(width) * sizeof(E));
        }
    });
}

template <typename E>
void scaled(const RowsCall& c) {
    for_rows(c.tokens, 2 * c.width * static_cast<long>(sizeof(E)), [&](long first, long last) {
        for (long token = first; token < last; ++token) {
            const E* const x = static_cast<const E*>(c.x) + token * c.stride;
            E* const out = static_cast<E*>(c.out) + token * c.width;
            for (long at = 0; at < c.width; at += kLanes) {
                store_some(out + at, load_some(x + at, c.width - at) * c.factors[token], c.width - at);
            }
        }
    });
}

template <typename Call>
void by_type(const Call& call, void (*floats)(const Call&), void (*brain)(const Call&), void (*half)(const Call&)) {
    (call.type == FloatType::float32 ? floats : call.type == FloatType::bfloat16 ? brain : half)(call);
}

}  // namespace

void predict_streams(const StreamsCall& c) { by_type(c, predict<float>, predict<Bfloat16>, predict<Float16>); }
void correct_streams(const StreamsCall& c) { by_type(c, correct<float>, correct<Bfloat16>, correct<Float16>); }
void as_large(const SizedCall& c) { by_type(c, sized<float>, sized<Bfloat16>, sized<Float16>); }
void keep_above(const SizedCall& c) { by_type(c, cut<float>, cut<Bfloat16>, cut<Float16>); }

void scale_rows(const RowsCall& c) { by_type(c, scaled<float>, scaled<Bfloat16>, scaled<Float16>); }

void known_ids(const KnownCall& c) {
    for (long t = 0; t < c.tokens; ++t) c.out[t] = c.ids[t] >= 0 && c.ids[t] < c.count ? c.ids[t] : 0;
}

}  // namespace quintet::cpu
