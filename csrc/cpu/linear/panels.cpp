#include "cpu/linear/panels.h"

#include <algorithm>
#include <cstring>

#include "cpu/rows.h"

namespace quintet::cpu {

const std::vector<Panel>& panels_of(const SortedRows& sorted, long blocks) {
    thread_local std::vector<Panel> panels;
    panels.clear();
    const int32_t* const counts = sorted.counts;
    const long active = sorted.matrices - std::count(counts, counts + sorted.matrices, 0);
    long first = 0;
    for (long matrix = 0; matrix < sorted.matrices; ++matrix) {
        const long rows = counts[matrix];
        if (rows == 0) continue;
        const long count = linear_panels(rows, blocks * active);
        for (long i = 0; i < count; ++i) {
            const long start = rows * i / count, end = rows * (i + 1) / count;
            panels.push_back({matrix, first + start, end - start});
        }
        first += rows;
    }
    return panels;
}

Gathered gathered(const SortedRows& sorted, const void* x, long stride, long bytes, void* spare) {
    if (!sorted.places) return {x, stride};
    if (sorted.tokens == 1) return {x, 0};
    for_rows(sorted.tokens * sorted.k, 2 * bytes, [&](long first, long last) {
        for (long i = first; i < last; ++i) {
            if (sorted.places[i] < 0) continue;
            std::memcpy(static_cast<char*>(spare) + sorted.places[i] * bytes,
                        static_cast<const char*>(x) + i / sorted.k * stride, static_cast<size_t>(bytes));
        }
    });
    return {spare, bytes};
}

}  // namespace quintet::cpu
