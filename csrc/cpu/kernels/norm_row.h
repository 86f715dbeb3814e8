// rms_norm of one row, for norm_body.h and rotary_body.h. After vectors_*.h.
#pragma once

namespace quintet::cpu {
namespace {

// The sum of term(place, count) over a row; `count` numbers from `place` on, kLanes of them or, at the end, fewer.
template <typename Term>
inline float sum_of(long width, const Term& term) {
    constexpr long kChains = 4;
    Floats sums[kChains] = {};
    long i = 0;
    for (; i + kChains * kLanes <= width; i += kChains * kLanes) {
#pragma GCC unroll 4
        for (long c = 0; c < kChains; ++c) sums[c] = term(i + c * kLanes, kLanes, sums[c]);
    }
    for (; i < width; i += kLanes) sums[0] = term(i, width - i, sums[0]);
    return sum_across((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

// each(place, count) for a row's vectors.
template <typename Each>
inline void for_vectors(long width, const Each& each) {
    long i = 0;
    for (; i + kLanes <= width; i += kLanes) each(i, kLanes);
    if (i < width) each(i, width - i);
}

struct RmsScale {
    float eps, offset;
};

// 1 / sqrt(squares / width + eps)
inline Floats inverse_root(float squares, long width, float eps) {
    return splat(1.0F / square_root(squares / static_cast<float>(width) + eps));
}

// Rounded before the weight if that is kept around 1, after it if around 0.
template <typename E>
inline void rms_scale(E* out, const E* x, const E* weight, long width, float squares, const RmsScale& scale) {
    const Floats inverse = inverse_root(squares, width, scale.eps), offset = splat(scale.offset);
    if (scale.offset == 0.0F) {
        for_vectors(width, [=](long i, long count) {
            const Floats y = rounded(load_some(x + i, count) * inverse, E{});
            store_some(out + i, y * load_some(weight + i, count), count);
        });
    } else {
        for_vectors(width, [=](long i, long count) {
            const Floats y = load_some(x + i, count) * inverse;
            store_some(out + i, y * (offset + load_some(weight + i, count)), count);
        });
    }
}

template <typename E>
inline void rms_row(E* out, const E* x, const E* weight, long width, const RmsScale& scale) {
    const float squares = sum_of(width, [=](long i, long count, Floats sum) {
        const Floats each = load_some(x + i, count);
        return fma(each, each, sum);
    });
    rms_scale(out, x, weight, width, squares, scale);
}

}  // namespace
}  // namespace quintet::cpu
