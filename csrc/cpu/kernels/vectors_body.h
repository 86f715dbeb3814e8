// What is the same for every width: included by vectors_*.h after kLanes, Floats, Ints, splat(), load() and store().
#pragma once

namespace quintet::cpu {
namespace {

inline Floats rounded(Floats x, float) { return x; }

// To nearest, ties to even; the lower half of each number is then zeros.
inline Floats rounded(Floats x, Bfloat16) {
    const Ints bits = (Ints)x, quiet = bits * 0 + 0x7FC00000;
    const Ints sum = (bits + (bits >> 16 & 1) + 0x7FFF) & 0xFFFF0000;
    return x != x ? (Floats)quiet : (Floats)sum;
}

// The first `count` numbers, then zeros.
template <typename E>
inline Floats load_some(const E* at, long count) {
    if (count >= kLanes) return load(at);
    E some[kLanes] = {};
    __builtin_memcpy(some, at, static_cast<size_t>(count) * sizeof(E));
    return load(some);
}

template <typename E>
inline void store_some(E* at, Floats x, long count) {
    if (count >= kLanes) return store(at, x);
    E some[kLanes];
    store(some, x);
    __builtin_memcpy(at, some, static_cast<size_t>(count) * sizeof(E));
}

}  // namespace
}  // namespace quintet::cpu
