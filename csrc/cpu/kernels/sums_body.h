// The loop of sums.h, written once over the vectors of one instruction set. After vectors_*.h.
#pragma once

#include "cpu/kernels/sums.h"

namespace quintet::cpu {
namespace {

template <typename E>
void sum(void* out, const void* const* parts, int ranks, long count) {
    E* const to = static_cast<E*>(out);
    const auto part = [=](int rank) { return static_cast<const E*>(parts[rank]); };
    long i = 0;
    for (; i + kLanes <= count; i += kLanes) {
        Floats total = load(part(0) + i);
        for (int rank = 1; rank < ranks; ++rank) total = total + load(part(rank) + i);
        store(to + i, total);
    }
    if (i == count) return;
    Floats total = load_some(part(0) + i, count - i);
    for (int rank = 1; rank < ranks; ++rank) total = total + load_some(part(rank) + i, count - i);
    store_some(to + i, total, count - i);
}

}  // namespace
}  // namespace quintet::cpu

#define QUINTET_SUM_KERNELS {{sum<float>, sum<Bfloat16>, sum<Float16>}}
