#include "cpu/attention/whole_attention.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

#include "common/pool.h"
#include "cpu/attention/attention_memory.h"

namespace quintet::cpu {

namespace {

constexpr long kItems = 4;       // per thread: who begins the last is waited for
constexpr long kFewTokens = 96;  // whose results are worth laying out K and V for

// Of each request and KV head, and in parts where there would be too few.
std::vector<WholeItem> items_of(const WholeCall& call, const WholeBatch& batch) {
    std::vector<WholeItem> items;
    const long wanted = kItems * pool_threads(), heads = std::max(1L, batch.requests * call.kv_heads);
    for (long r = 0; r < batch.requests; ++r) {
        const long start = batch.query_start_loc[r], length = batch.query_start_loc[r + 1] - start;
        const long parts = std::max(1L, std::min((wanted + heads - 1) / heads, length / kFewTokens));
        for (long head = 0; length && head < call.kv_heads; ++head) {
            for (long i = 0; i < parts; ++i) {
                items.push_back({start, length, length * i / parts, length * (i + 1) / parts, head});
            }
        }
    }
    std::stable_sort(items.begin(), items.end(), [](const WholeItem& a, const WholeItem& b) { return a.length > b.length; });
    return items;
}

}  // namespace

void whole_attention(const WholeCall& call, const WholeBatch& batch, AttentionType type) {
    check("batch.query_start_loc", 0, batch.query_start_loc[0], 0);
    for (long r = 0; r < batch.requests; ++r) {
        const int* const ends = batch.query_start_loc + r;
        check("batch.query_start_loc", r + 1, ends[1], batch.tokens, ends[0]);
    }
    const long served = batch.query_start_loc[batch.requests];
    const long row = call.heads * call.head_dim * (type == kFloat32 ? 4 : 2);
    std::memset(static_cast<char*>(call.out) + served * row, 0, static_cast<size_t>((batch.tokens - served) * row));
    const std::vector<WholeItem> items = items_of(call, batch);
    if (items.empty()) return;

    const AttentionKernels& kernels = attention_kernels();
    const long count = static_cast<long>(items.size()), parts = std::min(count, static_cast<long>(pool_threads()));
    const size_t bytes = whole_lines(kernels.whole_scratch(items.front().length, call.head_dim));
    const Memory scratch = aligned(bytes * static_cast<size_t>(parts));
    std::atomic<long> next{0}, members{0};
    parallel_for(parts, 1, [&](long, long) {
        char* const own = scratch.get() + static_cast<size_t>(members.fetch_add(1)) * bytes;
        for (long i = next.fetch_add(1); i < count; i = next.fetch_add(1)) {
            kernels.whole[type](call, items[static_cast<size_t>(i)], own);
        }
    });
}

}  // namespace quintet::cpu
