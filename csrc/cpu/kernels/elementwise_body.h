// The loops of elementwise.h, written once over the vectors of one instruction set. After vectors_*.h.
#pragma once

#include "cpu/kernels/activation_math.h"
#include "cpu/kernels/elementwise.h"

namespace quintet::cpu {
namespace {

// of(x, E{}): what becomes an E.
struct Gelu {  // Hendrycks and Gimpel 2016
    static Floats of(Floats x, float) { return x * normal_share_of(x); }
    template <typename E>
    static Floats of(Floats x, E) {
        return x * normal_share_near(x);
    }
};
struct GeluTanh {  // its approximation, to 2e-7 of x; (1 + tanh(u)) / 2 is the sigmoid of 2 u
    template <typename E>
    static Floats of(Floats x, E) {
        const Floats slope = fma(x * x, splat(0.071354816272F), splat(1.5957691216F));  // 2 sqrt(2 / pi) (1, 0.044715)
        return x * sigmoid_of(x * slope);
    }
};
struct Relu {
    template <typename E>
    static Floats of(Floats x, E) { return x < 0.0F ? splat(0.0F) : x; }
};
struct Relu2 {  // So et al. 2021
    template <typename E>
    static Floats of(Floats x, E) { return x < 0.0F ? splat(0.0F) : x * x; }
};
struct Silu {
    template <typename E>
    static Floats of(Floats x, E) { return x * sigmoid_of(x); }
};

template <typename E, typename Each>
inline void for_numbers(void* out, const void* x, long count, const Each& each) {
    E* const to = static_cast<E*>(out);
    const E* const from = static_cast<const E*>(x);
    long i = 0;
    for (; i + kLanes <= count; i += kLanes) store(to + i, each(load(from + i), i, kLanes));
    if (i < count) store_some(to + i, each(load_some(from + i, count - i), i, count - i), count - i);
}

template <typename A, typename E>
void activate(void* out, const void* x, const void*, float, long count) {
    for_numbers<E>(out, x, count, [](Floats v, long, long) { return A::of(v, E{}); });
}

template <typename A, typename E>
void gated(void* out, const void* x, const void* y, float limit, long count) {
    const E* const up = static_cast<const E*>(y);
    const float most = limit > 0.0F ? limit : __builtin_inff();
    for_numbers<E>(out, x, count, [=](Floats v, long i, long lanes) {
        const Floats high = splat(most), low = splat(-most), other = load_some(up + i, lanes);  // NaN stays
        const Floats held = other > high ? high : other;
        return rounded(A::of(v > high ? high : v, E{}), E{}) * (held < low ? low : held);
    });
}

template <typename E>
void add(void* out, const void* x, const void* y, float, long count) {
    const E* const other = static_cast<const E*>(y);
    for_numbers<E>(out, x, count, [=](Floats v, long i, long lanes) { return v + load_some(other + i, lanes); });
}

template <typename E>
void scale(void* out, const void* x, const void*, float factor, long count) {
    for_numbers<E>(out, x, count, [=](Floats v, long, long) { return v * factor; });
}

template <typename E>
void softcap(void* out, const void* x, const void*, float cap, long count) {
    for_numbers<E>(out, x, count, [=](Floats v, long, long) { return tanh_of(v / cap) * cap; });
}

}  // namespace
}  // namespace quintet::cpu

#define QUINTET_OF_TYPES(...) {{__VA_ARGS__ float>, __VA_ARGS__ Bfloat16>, __VA_ARGS__ Float16>}}
#define QUINTET_ELEMENTWISE_KERNELS                                                                                  \
    {{QUINTET_OF_TYPES(activate<Gelu,), QUINTET_OF_TYPES(activate<GeluTanh,), QUINTET_OF_TYPES(activate<Relu,),        \
      QUINTET_OF_TYPES(activate<Relu2,), QUINTET_OF_TYPES(activate<Silu,), QUINTET_OF_TYPES(add<),                    \
      QUINTET_OF_TYPES(scale<), QUINTET_OF_TYPES(softcap<)},                                                           \
     {QUINTET_OF_TYPES(gated<Gelu,), QUINTET_OF_TYPES(gated<GeluTanh,), QUINTET_OF_TYPES(gated<Relu,),                 \
      QUINTET_OF_TYPES(gated<Relu2,), QUINTET_OF_TYPES(gated<Silu,)}}
