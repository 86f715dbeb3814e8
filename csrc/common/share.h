// Sharing work out to threads that may not be equally fast.
#pragma once

#include <algorithm>
#include <atomic>

#include "common/pool.h"

namespace quintet {

// Runs body(item) for all items, on as many threads as `parts`. Each takes the next stretch when it is done with one: long
// ones first, which are read without a break, short ones at the end, so that all end together.
template <typename Body>
void share_out(long items, long parts, const Body& body) {
    if (parts <= 1) {
        for (long i = 0; i < items; ++i) body(i);
        return;
    }
    std::atomic<long> next{0};
    parallel_for(parts, 1, [&](long, long) {
        long first = next.load();
        while (first < items) {
            const long last = first + std::max(1L, (items - first) / (2 * parts));
            if (!next.compare_exchange_weak(first, last)) continue;
            for (long i = first; i < last; ++i) body(i);
            first = next.load();
        }
    });
}

}  // namespace quintet
