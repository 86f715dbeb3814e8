#include "cpu/comm/collectives.h"

#include <algorithm>
#include <cstring>

#include "cpu/kernels/sums.h"
#include "cpu/rows.h"

namespace quintet::cpu {

namespace {

constexpr long kGrain = 16L << 10;  // bytes: what is worth another thread's waking, when it is in a cache near by

char* at(void* base, long bytes) { return static_cast<char*>(base) + bytes; }
const char* at(const void* base, long bytes) { return static_cast<const char*>(base) + bytes; }

void copy(void* to, const void* from, long bytes) {
    parallel_for(bytes, kGrain, [=](long first, long last) {
        std::memcpy(at(to, first), at(from, first), static_cast<size_t>(last - first));
    });
}

// Bytes start .. stop - 1 of [outer, bytes] as they lie in [outer, ranks, bytes], to(first, last) for each stretch of a row.
template <typename Stretch>
void by_rows(long start, long stop, long bytes, const Stretch& stretch) {
    while (start < stop) {
        const long row = start / bytes, end = std::min(stop, (row + 1) * bytes);
        stretch(row, start - row * bytes, end - start);
        start = end;
    }
}

}  // namespace

void all_reduce(const AllReduceCall& c) {
    const SumKernel sum = QUINTET_KERNELS(kSums)[c.type];
    const long size = size_of(c.type), most = kPlaceBytes / size;
    for (long start = 0; start < c.count; start += most) {
        const long count = std::min(most, c.count - start);
        copy(c.team->place(), at(c.x, start * size), count * size);
        c.team->arrive(count * size);
        parallel_for(count, kGrain / size, [&](long first, long last) {
            const void* parts[kMostRanks];
            for (int rank = 0; rank < c.team->size(); ++rank) parts[rank] = at(c.team->part_of(rank), first * size);
            sum(at(c.out, (start + first) * size), parts, c.team->size(), last - first);
        });
    }
}

void all_gather(const AllGatherCall& c) {
    const long whole = c.outer * c.bytes, ranks = c.team->size();
    for (long start = 0; start < whole; start += kPlaceBytes) {
        const long stop = std::min(whole, start + kPlaceBytes);
        copy(c.team->place(), at(c.x, start), stop - start);
        c.team->arrive(stop - start);
        for (long rank = 0; rank < ranks; ++rank) {
            const char* from = at(c.team->part_of(static_cast<int>(rank)), 0);
            by_rows(start, stop, c.bytes, [&](long row, long offset, long bytes) {
                std::memcpy(at(c.out, (row * ranks + rank) * c.bytes + offset), from, static_cast<size_t>(bytes));
                from += bytes;
            });
        }
    }
}

void broadcast(const BroadcastCall& c) {
    const bool ours = c.team->rank() == c.root;
    for (long start = 0; start < c.bytes; start += kPlaceBytes) {
        const long bytes = std::min(kPlaceBytes, c.bytes - start);
        if (ours) copy(c.team->place(), at(c.x, start), bytes);
        c.team->arrive(bytes);
        if (!ours) copy(at(c.x, start), c.team->part_of(c.root), bytes);
    }
}

}  // namespace quintet::cpu
