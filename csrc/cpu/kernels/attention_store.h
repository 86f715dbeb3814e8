// How a row of K or V becomes bytes of the cache. Needs what attention_body.h says, and no more than it.
#pragma once

namespace quintet::cpu {
namespace {

// The bits of kLanes numbers without their signs; numbers in order, with infinities and then NaN above all.
inline Ints size_of(Floats x) { return (Ints)x & 0x7FFFFFFF; }

// body(i, x) for every kLanes numbers from i on; zeros follow the last.
template <typename E, typename Body>
inline void each_vector(const E* from, long count, const Body& body) {
    long i = 0;
    for (; i + kLanes <= count; i += kLanes) body(i, load(from + i));
    if (i < count) {
        E rest[kLanes] = {};
        __builtin_memcpy(rest, from + i, static_cast<size_t>(count - i) * sizeof(E));
        body(i, load(rest));
    }
}

// The lowest byte of each lane, to[i..] as far as `count` goes.
inline void store_bytes(Ints x, long i, long count, uint8_t* to) {
    uint32_t lanes[kLanes];
    __builtin_memcpy(lanes, &x, sizeof x);
    const long most = count - i < kLanes ? count - i : kLanes;
    for (long lane = 0; lane < most; ++lane) to[i + lane] = static_cast<uint8_t>(lanes[lane]);
}

inline float largest_size(Ints sizes) {
    uint32_t lanes[kLanes], most = 0;
    __builtin_memcpy(lanes, &sizes, sizeof sizes);
    for (const uint32_t lane : lanes) most = lane > most ? lane : most;
    float largest;
    __builtin_memcpy(&largest, &most, sizeof largest);
    return largest;
}

// Multiples of the largest magnitude / 127, ties to even; of a row that is not finite the scale says so.
template <typename E>
void to_int8(const void* from, long head_dim, void* row) {
    const E* const x = static_cast<const E*>(from);
    Ints most = {};
    each_vector(x, head_dim, [&](long, Floats at) { most = size_of(at) > most ? size_of(at) : most; });
    const float scale = largest_size(most) / 127.0F;
    const bool finite = scale <= 3.4e38F;
    const Floats unit = splat(finite && scale > 0.0F ? scale : 1.0F), magic = splat(12582912.0F);  // see exp_of()
    uint8_t* const to = static_cast<uint8_t*>(row);
    each_vector(x, head_dim, [&](long i, Floats at) {
        Floats steps = finite ? at / unit : splat(0.0F);
        steps = steps > 127.0F ? splat(127.0F) : steps;
        steps = steps < -127.0F ? splat(-127.0F) : steps;
        store_bytes((Ints)(steps + magic), i, head_dim, to);
    });
    __builtin_memcpy(to + head_dim, &scale, sizeof scale);
}

struct Narrow8 {  // e4m3fn
    static constexpr uint32_t kMost = 0x43E00000, kNormal = 0x3C800000;  // 448 and 2**-6, the least with an exponent
    static constexpr uint32_t kMantissa = 3, kBias = 7;
    static constexpr float kSmall = 16384.0F;  // 2**14: its last bit is 2**-9, the least number
};
struct Wide8 {  // e5m2
    static constexpr uint32_t kMost = 0x47600000, kNormal = 0x38800000;  // 57344 and 2**-14
    static constexpr uint32_t kMantissa = 2, kBias = 15;
    static constexpr float kSmall = 128.0F;  // its last bit is 2**-16
};

// The nearest of the format, ties to even; its largest and beyond, infinity too, become its largest.
template <typename E, typename Format>
void to_float8(const void* from, long head_dim, void* row) {
    constexpr uint32_t kCut = 23 - Format::kMantissa;
    each_vector(static_cast<const E*>(from), head_dim, [&](long i, Floats at) {
        const Ints size = size_of(at), most = (Ints)splat(0.0F) + Format::kMost;
        const Ints held = size > Format::kMost ? most : size;
        const Ints normal = ((held + ((1U << (kCut - 1)) - 1) + (held >> kCut & 1)) >> kCut) -
                            ((127 - Format::kBias) << Format::kMantissa);
        const Ints small = (Ints)((Floats)held + Format::kSmall) - bits_of(Format::kSmall);
        Ints code = held < Format::kNormal ? small : normal;
        code = size > 0x7F800000 ? (Ints)(code | 0x7F) : code;
        store_bytes(code | ((Ints)at >> 24 & 0x80), i, head_dim, static_cast<uint8_t*>(row));
    });
}

}  // namespace
}  // namespace quintet::cpu
