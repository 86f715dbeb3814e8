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
    struct alignas(64) Next {  // a cache line of its own: all threads write it, and read what lies beside
        std::atomic<long> item{0};
    } next;
    parallel_for(parts, 1, [&](long, long) {
        long first = next.item.load();
        while (first < items) {
            const long last = first + std::max(1L, (items - first) / (2 * parts));
            if (!next.item.compare_exchange_weak(first, last)) continue;
            for (long i = first; i < last; ++i) body(i);
            first = next.item.load();
        }
    });
}

}  // namespace quintet
