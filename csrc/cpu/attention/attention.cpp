#include "cpu/attention/attention.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include "common/pool.h"
#include "cpu/attention/attention_memory.h"
#include "cpu/features.h"

namespace quintet::cpu {

constexpr size_t kLine = 64;  // bytes in a cache line

const AttentionKernels& attention_kernels() {
#if defined(__x86_64__)
    switch (chosen_isa()) {
        case Isa::amx: {
            static const AttentionKernels tiles = with_tiles(kAttentionAvx512Bf16);  // code for processors that have them
            return tiles;
        }
        case Isa::avx512_bf16: return kAttentionAvx512Bf16;
        case Isa::avx512: return kAttentionAvx512;
        case Isa::avx2_vnni:
        case Isa::avx2: return kAttentionAvx2;
        default: break;
    }
#endif
    return kAttentionBaseline;
}

size_t whole_lines(size_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }

Memory aligned(size_t bytes) {
    void* const memory = std::aligned_alloc(kLine, whole_lines(bytes));
    if (!memory) throw std::bad_alloc();
    return Memory(static_cast<char*>(memory));
}

void check(const char* what, long row, long value, long limit, long least) {
    if (value >= least && value <= limit) return;
    throw std::invalid_argument(std::string(what) + " of row " + std::to_string(row) + " is " + std::to_string(value) +
                                ", and must be " + std::to_string(least) + " to " + std::to_string(limit));
}

namespace {

constexpr long kRows = 128;             // of an item: so many query rows share the reading of a block
constexpr long kFewRows = 32;           // the same where there would be too few items for the threads
constexpr long kSliceHeads = 4;         // query heads that are worth reading K and V for once more
constexpr long kItemsPerThread = 2;     // below that contexts are shared out in stretches, and below twice that items
                                        // are made smaller: who begins the last is waited for
constexpr long kWriteBytes = 64 << 10;  // that one thread copies before another is woken for the rest

void check_request(const AttentionCall& call, const AttentionBatch& batch, long r) {
    const long first = batch.query_start_loc[r], last = batch.query_start_loc[r + 1], length = batch.seq_lens[r];
    check("batch.query_start_loc", r, first, last);
    check("batch.query_start_loc", r + 1, last, batch.tokens);
    if (first == last) return;
    check("batch.seq_lens", r, length, batch.width * call.page_size);
    // Positions of a decoder's tokens have nothing to do with those of an encoder's rows, all of which they see.
    const bool among = call.causal || call.window > 0 || call.chunk > 0 || call.slopes;
    for (long token = first; token < last; ++token) {
        check("batch.positions", token, call.positions[token], among ? length - 1 : INT32_MAX);
        if (token > first && call.positions[token] <= call.positions[token - 1]) {
            throw std::invalid_argument("batch.positions of row " + std::to_string(token) + " does not rise");
        }
    }
    for (long table = r * batch.tables; table < (r + 1) * batch.tables; ++table) {
        for (long i = 0; i * call.page_size < length; ++i) {
            check("batch.block_table", r, batch.block_table[table * batch.width + i], batch.pages - 1);
        }
    }
}

// Groups of consecutive tokens of each request; a group for one KV head, or for some of its query heads, is an item.
struct Groups {
    std::vector<long> before;  // [R + 1], groups of the requests before each
    long size;                 // tokens in a group, at most
    long rows;                 // of the largest item
    long slices;               // items of a group for one KV head
    long sides;                // items of a group: slices of all KV heads

    long count() const { return before.back(); }
    long items() const { return count() * sides; }
};

Groups grouped(const AttentionCall& call, const AttentionBatch& batch, long rows) {
    const long heads = call.heads / call.kv_heads;
    Groups groups{std::vector<long>(static_cast<size_t>(batch.requests) + 1), heads < rows ? rows / heads : 1, 0, 1,
                  call.kv_heads};
    long most = 0;
    for (long r = 0; r < batch.requests; ++r) {
        const long count = batch.query_start_loc[r + 1] - batch.query_start_loc[r];
        most = count > most ? count : most;
        groups.before[static_cast<size_t>(r) + 1] =
            groups.before[static_cast<size_t>(r)] + (count + groups.size - 1) / groups.size;
    }
    groups.rows = heads * (most < groups.size ? most : groups.size);
    return groups;
}

// The largest groups that leave each thread some items; where even the smallest do not, heads are shared out too.
Groups shared_out(const AttentionCall& call, const AttentionBatch& batch) {
    const long threads = pool_threads();
    for (long rows = kRows;; rows /= 2) {
        Groups groups = grouped(call, batch, rows);
        const long items = groups.items(), heads = call.heads / call.kv_heads;
        if (items >= 2 * kItemsPerThread * threads) return groups;
        if (rows > kFewRows) continue;
        if (items > 0 && items < threads) {
            groups.slices = std::max(1L, std::min(heads / kSliceHeads, (threads + items - 1) / items));
            groups.sides *= groups.slices;
            groups.rows = groups.rows / heads * ((heads + groups.slices - 1) / groups.slices);
        }
        return groups;
    }
}

// The last groups first: they have the longest contexts, and what is begun late should be short.
AttentionItem item(const AttentionCall& call, const AttentionBatch& batch, const Groups& groups, long index) {
    const long group = groups.count() - 1 - index / groups.sides, side = index % groups.sides;
    const long heads = call.heads / call.kv_heads, slice = side % groups.slices;
    const long head = heads * slice / groups.slices, end = heads * (slice + 1) / groups.slices;
    long low = 0, high = batch.requests - 1;  // the request that it belongs to
    while (low < high) {
        const long middle = (low + high) / 2;
        if (groups.before[static_cast<size_t>(middle) + 1] > group) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    const long token = batch.query_start_loc[low] + (group - groups.before[static_cast<size_t>(low)]) * groups.size;
    const long left = batch.query_start_loc[low + 1] - token;
    const long kv_head = side / groups.slices;
    const long table = low * batch.tables + (batch.tables > 1 ? kv_head : 0);
    return {batch.block_table + table * batch.width, token, left < groups.size ? left : groups.size, batch.seq_lens[low],
            kv_head, kv_head * heads + head, end - head};
}

struct Work {
    const AttentionCall& call;
    const AttentionBatch& batch;
    const Groups& groups;
    const AttentionKernels& kernel;
    AttentionType type;
    KVKind kind;
};

// body(i, scratch) for 0..count-1 on all threads. Who takes which changes nothing but the time.
template <typename Body>
void share_out(const Work& work, long count, const Body& body) {
    const long threads = pool_threads(), parts = count < threads ? count : threads;
    const size_t bytes = whole_lines(work.kernel.scratch(work.groups.rows, work.call.head_dim));
    const Memory scratch = aligned(bytes * static_cast<size_t>(parts));
    std::atomic<long> next{0}, members{0};
    parallel_for(parts, 1, [&](long, long) {
        char* const own = scratch.get() + static_cast<size_t>(members.fetch_add(1)) * bytes;
        for (long i = next.fetch_add(1); i < count; i = next.fetch_add(1)) body(i, own);
    });
}

void by_item(const Work& work, long items) {
    share_out(work, items, [&](long i, void* scratch) {
        work.kernel.attend[work.type][work.kind](work.call, item(work.call, work.batch, work.groups, i), scratch);
    });
}

// For few items of long contexts: more threads than KV heads would have nothing to do.
void by_stretch(const Work& work, long items) {
    struct Span {
        AttentionItem item;
        long first, before;  // its first stretch; stretches of the items before it
    };
    std::vector<Span> spans;
    long count = 0;
    for (long i = 0; i < items; ++i) {
        const AttentionItem each = item(work.call, work.batch, work.groups, i);
        const long end = work.call.causal ? work.call.positions[each.token + each.tokens - 1] + 1L : each.length;
        const long first = first_seen(work.call, work.call.positions[each.token]) / kAttentionStretch;
        spans.push_back({each, first, count});
        count += (end + kAttentionStretch - 1) / kAttentionStretch - first;
    }
    const size_t bytes = work.kernel.partial(work.groups.rows, work.call.head_dim);
    const Memory partials = aligned(bytes * static_cast<size_t>(count));
    const auto partial = [&](const Span& span) { return partials.get() + static_cast<size_t>(span.before) * bytes; };
    const auto rows = [&](const Span& span) { return span.item.tokens * span.item.heads; };
    share_out(work, count, [&](long i, void* scratch) {
        auto span = spans.end() - 1;
        while (span->before > i) --span;
        const long number = i - span->before;
        const size_t own = work.kernel.partial(rows(*span), work.call.head_dim);  // at most `bytes`
        work.kernel.stretch[work.type][work.kind](work.call, span->item, span->first + number, scratch,
                                                  partial(*span) + static_cast<size_t>(number) * own);
    });
    share_out(work, items, [&](long i, void* scratch) {
        const Span& span = spans[static_cast<size_t>(i)];
        const long end = i + 1 < items ? spans[static_cast<size_t>(i) + 1].before : count;
        work.kernel.join[work.type](work.call, span.item, end - span.before, partial(span), scratch);
    });
}

long longest(const AttentionCall& call, const AttentionBatch& batch) {
    long most = 0;
    for (long r = 0; r < batch.requests; ++r) {
        const long last = batch.query_start_loc[r + 1];
        if (last == batch.query_start_loc[r]) continue;
        const long end = call.causal ? call.positions[last - 1] + 1L : batch.seq_lens[r];
        most = end > most ? end : most;
    }
    return most;
}

long bytes_of(AttentionType type) { return type == kFloat32 ? 4 : 2; }

// Of a row of the cache.
long row_bytes(long head_dim, AttentionType type, KVKind kind) {
    if (kind == kKVSame) return head_dim * bytes_of(type);
    if (kind == kKVInt4) return int4_row_bytes(head_dim);
    return head_dim + (kind == kKVInt8 ? kScaleBytes : 0);
}

}  // namespace

void paged_attention(const AttentionCall& call, const AttentionBatch& batch, AttentionType type, KVKind kind) {
    check("batch.query_start_loc", 0, batch.query_start_loc[0], 0);
    for (long r = 0; r < batch.requests; ++r) check_request(call, batch, r);
    const long served = batch.query_start_loc[batch.requests];
    const long row = call.heads * call.value_dim * bytes_of(type);
    std::memset(static_cast<char*>(call.out) + served * row, 0, static_cast<size_t>((batch.tokens - served) * row));
    const Groups groups = shared_out(call, batch);
    const long items = groups.items();
    if (items == 0) return;

    AttentionCall own = call;
    own.turned = kind == kKVInt4;
    const Work work{own, batch, groups, attention_kernels(), type, kind};
    if (groups.count() * call.kv_heads < kItemsPerThread * pool_threads() && longest(call, batch) > kAttentionStretch) {
        by_stretch(work, items);
    } else {
        by_item(work, items);
    }
}

void write_kv(const KVWrite& w) {
    for (long t = 0; t < w.tokens; ++t) check("batch.slot_mapping", t, w.slot_mapping[t], w.pages * w.page_size - 1);
    const long from = w.head_dim * bytes_of(w.type), row = row_bytes(w.head_dim, w.type, w.kind);
    const long head = w.page_size * row, side = w.heads * head, sides = w.v ? 2 : 1;
    const long each = sides * w.tokens * from;  // bytes for one head
    const auto quantize = attention_kernels().quantize[w.type][w.kind];
    const auto write = [&](char* to, const char* x) {
        if (quantize) {
            quantize(x, w.head_dim, to);
        } else {
            std::memcpy(to, x, static_cast<size_t>(row));
        }
    };
    parallel_for(w.heads, each > 0 ? kWriteBytes / each + 1 : w.heads, [&](long first, long last) {
        for (long t = 0; t < w.tokens; ++t) {
            const long page = w.slot_mapping[t] / w.page_size, offset = w.slot_mapping[t] % w.page_size;
            for (long h = first; h < last; ++h) {
                char* const at = w.kv + sides * page * side + h * head + offset * row;
                write(at, w.k + t * w.k_stride + h * from);
                if (w.v) write(at + side, w.v + t * w.v_stride + h * from);
            }
        }
    });
}

}  // namespace quintet::cpu
