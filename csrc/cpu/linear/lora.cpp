#include "cpu/linear/lora.h"

#include <algorithm>
#include <atomic>
#include <vector>

#include "common/pool.h"
#include "cpu/rows.h"

namespace quintet::cpu {

namespace {

constexpr long kThreadWork = 16L << 10;  // multiply-adds that are worth another thread's waking: each reads a number or two
constexpr long kRows = 8;                // of A in an item, unless fewer are left
constexpr long kFewColumns = 128;        // of B in an item, where there are threads for so many

struct Block {  // tokens of one adapter
    long adapter, tokens;
    long first;  // of its tokens in Plan::order
};

struct RowItem {  // rows of A
    long block, part, first, rows;
};

struct Piece {  // columns of B; those of one part
    long part, first, columns;
};

struct ColumnItem {
    long block, piece;
};

// What a call consists of. The memory is the calling thread's, and stays for the next call.
struct Plan {
    std::vector<int32_t> order;  // tokens that have an adapter, by adapter
    std::vector<long> ends;      // [adapters], in order
    std::vector<Block> blocks;
    std::vector<Piece> pieces;
    std::vector<long> widths;  // [parts]: columns of each
    std::vector<RowItem> rows;
    std::vector<ColumnItem> columns;
    std::vector<float> low;  // [order, parts, rank]
    long work = 0;           // multiply-adds
};

long rank_of(const LoraCall& call, long adapter, long part) {
    return std::clamp<long>(call.ranks[adapter * call.ranks_stride + part], 0, call.rank);
}

// Sorts tokens by adapter, and cuts each adapter's into blocks.
void plan_blocks(Plan& plan, const LoraCall& call) {
    const auto has_adapter = [&](long t) { return call.slots[t] > 0 && call.slots[t] <= call.adapters; };
    plan.ends.assign(static_cast<size_t>(call.adapters), 0);
    plan.blocks.clear();
    long count = 0;
    for (long t = 0; t < call.tokens; ++t) {
        if (!has_adapter(t)) continue;
        ++plan.ends[static_cast<size_t>(call.slots[t] - 1)];
        ++count;
    }
    if (count == 0) return;
    long first = 0;
    for (long adapter = 0; adapter < call.adapters; ++adapter) {
        long& end = plan.ends[static_cast<size_t>(adapter)];
        const long start = first;
        for (const long last = first + end; first < last; first += kLoraTokens) {
            plan.blocks.push_back({adapter, std::min(kLoraTokens, last - first), first});
        }
        first = start + end;
        end = start;  // which the loop below moves on
    }
    plan.order.resize(static_cast<size_t>(count));
    for (long t = 0; t < call.tokens; ++t) {
        if (!has_adapter(t)) continue;
        long& end = plan.ends[static_cast<size_t>(call.slots[t] - 1)];
        plan.order[static_cast<size_t>(end++)] = static_cast<int32_t>(t);
    }
    plan.low.resize(static_cast<size_t>(count * call.parts * call.rank));
}

// Cuts columns into pieces: an adapter's rows are read along each without a break, and all threads have some.
void plan_pieces(Plan& plan, const LoraCall& call) {
    plan.pieces.clear();
    plan.widths.assign(static_cast<size_t>(call.parts), 0);
    const long share = call.outputs * static_cast<long>(plan.blocks.size()) / (2L * pool_threads());
    const long most = std::clamp(share / kFewColumns * kFewColumns, kFewColumns, kLoraColumns);
    long start = 0;
    for (long i = 0; i < call.stretches; ++i) {
        const long part = call.columns[2 * i], width = call.columns[2 * i + 1];
        plan.widths[static_cast<size_t>(part)] += width;
        for (long first = 0; first < width; first += most) {
            plan.pieces.push_back({part, start + first, std::min(most, width - first)});
        }
        start += width;
    }
}

// Orders the products with B: one adapter after the other, and all of its tokens by a piece of B, then by the next.
void plan_columns(Plan& plan, const LoraCall& call) {
    plan.columns.clear();
    const long blocks = static_cast<long>(plan.blocks.size()), pieces = static_cast<long>(plan.pieces.size());
    for (long first = 0, last = 0; first < blocks; first = last) {
        const long adapter = plan.blocks[static_cast<size_t>(first)].adapter;
        while (last < blocks && plan.blocks[static_cast<size_t>(last)].adapter == adapter) ++last;
        for (long piece = 0; piece < pieces; ++piece) {
            if (rank_of(call, adapter, plan.pieces[static_cast<size_t>(piece)].part) == 0) continue;
            for (long block = first; block < last; ++block) plan.columns.push_back({block, piece});
        }
    }
}

void plan_rows(Plan& plan, const LoraCall& call) {
    plan.rows.clear();
    plan.work = 0;
    for (size_t i = 0; i < plan.blocks.size(); ++i) {
        for (long part = 0; part < call.parts; ++part) {
            const long width = plan.widths[static_cast<size_t>(part)];
            if (width == 0) continue;
            const long rank = rank_of(call, plan.blocks[i].adapter, part);
            plan.work += plan.blocks[i].tokens * rank * (call.inputs + width);
            for (long row = 0; row < rank; row += kRows) {
                plan.rows.push_back({static_cast<long>(i), part, row, std::min(kRows, rank - row)});
            }
        }
    }
}

const char* at(const void* base, long elements, const LoraCall& call) {
    return static_cast<const char*>(base) + elements * size_of(call.type);
}

float* low_of(Plan& plan, const LoraCall& call, const Block& block, long token, long part) {
    return plan.low.data() + ((block.first + token) * call.parts + part) * call.rank;
}

void multiply_rows(Plan& plan, const LoraCall& call, const LoraKernels& kernels, const RowItem& item) {
    const Block& block = plan.blocks[static_cast<size_t>(item.block)];
    LoraDown down{};
    for (long t = 0; t < block.tokens; ++t) {
        down.low[t] = low_of(plan, call, block, t, item.part) + item.first;
        const long token = plan.order[static_cast<size_t>(block.first + t)];
        down.x[t] = at(call.x, (call.x_rows ? call.x_rows[token] : token) * call.x_stride, call);
    }
    const long row = (block.adapter * call.parts + item.part) * call.rank + item.first;
    down.a = at(call.a, row * call.inputs, call);
    down.tokens = block.tokens;
    down.rows = item.rows;
    down.inputs = call.inputs;
    kernels.down[call.type](down);
}

void add_columns(Plan& plan, const LoraCall& call, const LoraKernels& kernels, const ColumnItem& item) {
    const Block& block = plan.blocks[static_cast<size_t>(item.block)];
    const Piece& piece = plan.pieces[static_cast<size_t>(item.piece)];
    LoraUp up{};
    for (long t = 0; t < block.tokens; ++t) {
        const long token = plan.order[static_cast<size_t>(block.first + t)];
        up.low[t] = low_of(plan, call, block, t, piece.part);
        up.y[t] = static_cast<char*>(call.y) + (token * call.y_stride + piece.first) * size_of(call.type);
    }
    up.b = at(call.b, block.adapter * call.rank * call.outputs + piece.first, call);
    up.tokens = block.tokens;
    up.rows = rank_of(call, block.adapter, piece.part);
    up.columns = piece.columns;
    up.stride = call.outputs;
    kernels.up[call.type](up);
}

// Runs first(i), i < firsts, and then second(i), i < seconds, in one job. Items are claimed in order: a thread that waits
// for the first ones waits for threads that compute them. Each claims a stretch, long ones first: neighbours are read
// without a break, and all threads end together.
template <typename First, typename Second>
void in_two_phases(long firsts, long seconds, long threads, const First& first, const Second& second) {
    struct {
        alignas(64) std::atomic<long> next{0};
        alignas(64) std::atomic<long> done{0};
    } counts;
    parallel_for(threads, 1, [&](long, long) {
        long start = counts.next.load();
        while (start < firsts + seconds) {
            const bool is_first = start < firsts;
            const long left = is_first ? firsts - start : firsts + seconds - start;
            const long end = start + std::max(1L, left / (is_first ? threads : 2 * threads));
            if (!counts.next.compare_exchange_weak(start, end)) continue;
            if (is_first) {
                for (long i = start; i < end; ++i) first(i);
                counts.done.fetch_add(end - start, std::memory_order_release);
            } else {
                for (unsigned spin = 0; counts.done.load(std::memory_order_acquire) < firsts; ++spin) wait_a_moment(spin);
                for (long i = start; i < end; ++i) second(i - firsts);
            }
            start = counts.next.load();
        }
    });
}

}  // namespace

void add_lora(const LoraCall& call) {
    thread_local Plan memory;
    Plan& plan = memory;
    plan_blocks(plan, call);
    if (plan.blocks.empty()) return;
    plan_pieces(plan, call);
    plan_rows(plan, call);
    plan_columns(plan, call);
    const LoraKernels& kernels = QUINTET_KERNELS(kLora);
    const long firsts = static_cast<long>(plan.rows.size()), seconds = static_cast<long>(plan.columns.size());
    const long threads = std::min({static_cast<long>(pool_threads()), firsts + seconds, plan.work / kThreadWork});
    in_two_phases(
        firsts, seconds, std::max(1L, threads),
        [&](long i) { multiply_rows(plan, call, kernels, plan.rows[static_cast<size_t>(i)]); },
        [&](long i) { add_columns(plan, call, kernels, plan.columns[static_cast<size_t>(i)]); });
}

void scale_adapted(const ScaleAdaptedCall& call) {
    const auto scale = QUINTET_KERNELS(kLora).scale[call.type];
    const long size = size_of(call.type);
    for_rows(call.tokens, call.outputs * size, [&](long first, long last) {
        for (long t = first; t < last; ++t) {
            const long adapter = call.slots[t] - 1L;
            if (adapter < 0 || adapter >= call.adapters) continue;
            scale({static_cast<char*>(call.y) + t * call.y_stride * size, call.gains + adapter * call.outputs,
                   call.offsets + adapter * call.outputs, call.outputs});
        }
    });
}

void adapter_rows(const AdapterRowsCall& call) {
    for (long t = 0; t < call.tokens; ++t) {
        const long adapter = call.slots[t] - 1L, row = call.ids[t] - call.first;
        const bool is_there = adapter >= 0 && adapter < call.adapters && row >= 0 && row < call.rows;
        call.out[t] = is_there ? static_cast<int32_t>(adapter * call.rows + row) : -1;
    }
}

}  // namespace quintet::cpu
