#include "cpu/quantized/quantized.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>
#include <vector>

#include "common/huge_pages.h"
#include "common/share.h"
#include "cpu/features.h"

namespace quintet::cpu {

namespace {

constexpr long kThreadWork = 128L << 10;   // multiply-adds that are worth another thread's waking
constexpr long kThreadInputs = 16L << 10;  // inputs to prepare, or weights to pack, that are
constexpr long kAlignment = 64;            // of rows: a cache line

#if defined(__x86_64__)
QuantizedKernels with_bytes(const QuantizedKernels& all, const QuantizedKernels& of_bytes) {
    QuantizedKernels both = all;
    for (int scheme = 0; scheme < kQuantizedSchemes; ++scheme) {
        if (!of_bytes.multiply[scheme]) continue;
        both.multiply[scheme] = of_bytes.multiply[scheme];
        both.quad_bytes[scheme] = of_bytes.quad_bytes[scheme];
        std::copy_n(of_bytes.prepare[scheme], static_cast<int>(kLinearTypes), both.prepare[scheme]);
    }
    return both;
}
#endif

const QuantizedKernels& kernels() {
#if defined(__x86_64__)
    switch (chosen_isa()) {
        case Isa::amx: {
            static const QuantizedKernels tiles = with_tiles(kQuantizedAvx512Vnni);  // code for processors that have them
            return tiles;
        }
        case Isa::avx512_bf16: return kQuantizedAvx512Vnni;
        case Isa::avx512: return kQuantizedAvx512;
        case Isa::avx2_vnni: {
            static const QuantizedKernels both = with_bytes(kQuantizedAvx2, kQuantizedAvx2Vnni);
            return both;
        }
        case Isa::avx2: return kQuantizedAvx2;
        default: break;
    }
#elif defined(__aarch64__)
    if (chosen_isa() >= Isa::neon_i8mm) return kQuantizedNeonI8mm;
    if (chosen_isa() == Isa::neon_dotprod) return kQuantizedNeonDotprod;
#endif
    return kQuantizedBaseline;
}

const QuantizedPacking& packing() {
#if defined(__x86_64__)
    if (chosen_isa() >= Isa::avx2) return kQuantizedPackingAvx2;
#endif
    return kQuantizedPackingBaseline;
}

constexpr long size_of(LinearType type) { return type == kLinearFloat32 ? 4 : 2; }
constexpr long rounded_up(long x, long unit) { return (x + unit - 1) / unit * unit; }
constexpr long blocks_of(long outputs) { return (outputs + kLinearColumns - 1) / kLinearColumns; }

long parts_of(long items, long work, long least) {
    return std::max(1L, std::min({items, static_cast<long>(pool_threads()), work / least}));
}

// Of a row's starts: with levels they begin no sums where there are minima, and tell these the inputs' sums.
int32_t row_offset(const QuantizedCall& call) {
    return leveled(call.scheme) && call.mins ? 1 : offset_of(call.scheme);
}

// Rows of 64 bytes that a block's scales take, or its minima, with levels.
constexpr long level_rows(long groups, long inputs) { return groups + inputs / kLevelInputs * 2; }

long scale_bytes_of(const QuantizedCall& call) {
    if (leveled(call.scheme)) return level_rows(call.groups, call.inputs) * kLinearColumns;
    return call.groups * kLinearColumns * (call.scheme == kW8a8 ? 4 : 2);
}

int shared_by(const QuantizedCall& call) {
    if (!leveled(call.scheme)) return -1;
    return std::countr_zero(static_cast<unsigned long>(kLevelInputs / (call.inputs / call.groups)));
}

// How a prepared row lies: values, scales, starts, and the starts of cores with flips.
struct RowLayout {
    long group, quads;  // of a group
    long scales_at, bytes;
};

RowLayout row_layout(const QuantizedCall& call, long quad_bytes) {
    constexpr long kPage = 4096;  // rows that far apart meet in the same lines of a cache
    const long group = call.inputs / call.groups;
    const long values = rounded_up(call.inputs, kRowPadding) / kQuad * quad_bytes;
    const long bytes = rounded_up(values + call.groups * 12, kAlignment);
    return {group, (group + kQuad - 1) / kQuad, values, bytes % kPage ? bytes : bytes + kAlignment};
}

// This thread's, at least so large; what it held is forgotten.
uint8_t* scratch(long bytes) {
    thread_local std::vector<uint8_t> memory;
    const size_t wanted = static_cast<size_t>(bytes + kAlignment);
    if (memory.size() < wanted) {
        memory.clear();
        memory.resize(wanted);
    }
    const uintptr_t first = reinterpret_cast<uintptr_t>(memory.data());
    return memory.data() + (kAlignment - first % kAlignment) % kAlignment;
}

template <typename E>
void reorder(const QuantizedCall& call, const void* x, void* out) {
    for (long i = 0; i < call.inputs; ++i) static_cast<E*>(out)[i] = static_cast<const E*>(x)[call.order[i]];
}

// A row in the weight's order, until this thread's next.
const void* reordered(const QuantizedCall& call, const void* x) {
    thread_local std::vector<float> row;
    row.resize(static_cast<size_t>(call.inputs));
    const bool whole = call.type == kLinearFloat32;
    if (whole) reorder<uint32_t>(call, x, row.data());
    if (!whole) reorder<uint16_t>(call, x, row.data());
    return row.data();
}

void prepare_rows(const QuantizedCall& call, const RowLayout& layout, uint8_t* rows) {
    const auto prepare = kernels().prepare[call.scheme][call.type];
    share_out(call.tokens, parts_of(call.tokens, call.tokens * call.inputs, kThreadInputs), [&](long t) {
        uint8_t* const row = rows + t * layout.bytes;
        float* const scales = reinterpret_cast<float*>(row + layout.scales_at);
        const char* const x = static_cast<const char*>(call.x) + t * call.x_stride * size_of(call.type);
        prepare({row, scales, reinterpret_cast<int32_t*>(scales + call.groups), call.order ? reordered(call, x) : x,
                 call.groups, layout.group, call.span ? call.span : layout.group, largest_input(call.scheme),
                 row_offset(call)});
    });
}

// How a weight's blocks lie, in bytes.
struct BlockLayout {
    long weight, scales, zeros, mins;
    long powers_at;  // in a block's scales
};

BlockLayout block_layout(const QuantizedCall& call, const RowLayout& layout) {
    const long scales = scale_bytes_of(call);
    return {layout.quads * call.groups * quad_bytes(call.scheme), scales + (call.powers ? kLinearColumns * 4 : 0),
            call.groups * kLinearColumns, leveled(call.scheme) ? scales : call.groups * kLinearColumns * 2, scales};
}

template <typename T>
const T* further(const T* at, long bytes) {
    return at ? reinterpret_cast<const T*>(reinterpret_cast<const char*>(at) + bytes) : nullptr;
}

const char* further(const void* at, long bytes) { return further(static_cast<const char*>(at), bytes); }

// Prepared rows, `stride` bytes apart, by one block of the call's weight.
void multiply_block(const QuantizedCall& call, const RowLayout& layout, const BlockLayout& lies, void* out, const uint8_t* rows,
                    long stride, long count, long block) {
    alignas(64) float sums[kLinearRows * kLinearColumns];
    const QuantizedKernels& k = kernels();
    const long column = block * kLinearColumns, size = size_of(call.type);
    const char* const scales = further(call.scales, block * lies.scales);
    const QuantizedPanel each{sums, rows, static_cast<const uint8_t*>(call.weight) + block * lies.weight, scales, stride,
                              layout.scales_at, count, call.groups, layout.quads,
                              further(static_cast<const uint8_t*>(call.zeros), block * lies.zeros),
                              further(call.mins, block * lies.mins), call.table, static_cast<float>(row_offset(call)),
                              shared_by(call), call.mins != nullptr};
    if (call.scheme != kW8a8) k.begin(each);  // its products are sums by themselves
    k.multiply[call.scheme](each);
    const float* const powers = call.powers ? reinterpret_cast<const float*>(scales + lies.powers_at) : nullptr;
    k.finish[call.type]({static_cast<char*>(out) + column * size, further(call.bias, column * size), sums, powers, call.outputs,
                         count, std::min(kLinearColumns, call.outputs - column)});
}

}  // namespace

void quantized(const QuantizedCall& call) {
    const RowLayout layout = row_layout(call, kernels().quad_bytes[call.scheme]);
    const BlockLayout lies = block_layout(call, layout);
    uint8_t* const rows = scratch(call.tokens * layout.bytes);
    prepare_rows(call, layout, rows);
    const long blocks = blocks_of(call.outputs), panels = linear_panels(call.tokens, blocks), size = size_of(call.type);
    const auto run = [&](long item) {
        const long panel = item / blocks, row = call.tokens * panel / panels, end = call.tokens * (panel + 1) / panels;
        multiply_block(call, layout, lies, static_cast<char*>(call.out) + row * call.outputs * size, rows + row * layout.bytes,
                       layout.bytes, end - row, item % blocks);
    };
    share_out(panels * blocks, parts_of(panels * blocks, call.tokens * call.inputs * call.outputs, kThreadWork), run);
}

Stretch weights_of(const QuantizedCall& call) {
    return {call.weight, blocks_of(call.outputs) * (call.inputs / kQuad) * quad_bytes(call.scheme)};
}

// Tokens are prepared once, whatever number of matrices they meet.
void quantized_stack(const QuantizedStack& stack, const SortedRows& sorted, void* out, const void* x, long stride) {
    QuantizedCall whole = stack.first;
    whole.x = x;
    whole.x_stride = stride;
    whole.tokens = sorted.places ? sorted.tokens : sorted.rows;
    const RowLayout layout = row_layout(whole, kernels().quad_bytes[whole.scheme]);
    const BlockLayout lies = block_layout(whole, layout);
    const long prepared = whole.tokens * layout.bytes, size = size_of(whole.type);
    uint8_t* const own = scratch(prepared + (sorted.places ? sorted.rows * layout.bytes : 0));
    prepare_rows(whole, layout, own);
    const Gathered rows = gathered(sorted, own, layout.bytes, layout.bytes, own + prepared);
    for_panels(sorted, whole.inputs, whole.outputs, [&](const Panel& panel, long block) {
        QuantizedCall call = whole;
        call.weight = further(whole.weight, panel.matrix * stack.weight_bytes);
        call.scales = further(whole.scales, panel.matrix * stack.scale_bytes);
        call.zeros = further(whole.zeros, panel.matrix * stack.zero_bytes);
        call.mins = further(whole.mins, panel.matrix * stack.min_bytes);
        multiply_block(call, layout, lies, static_cast<char*>(out) + panel.first * whole.outputs * size,
                       static_cast<const uint8_t*>(rows.x) + panel.first * rows.stride, rows.stride, panel.rows, block);
    });
}

bool pack_quantized(const QuantizedWeight& w) {
    const long blocks = blocks_of(w.outputs), group = w.inputs / w.groups;
    const long bytes = (w.inputs + kQuad - 1) / kQuad * quad_bytes(w.scheme);
    const long scale_bytes = w.groups * kLinearColumns * (w.scheme == kW8a8 ? 4 : 2);
    wish_huge_pages(w.packed, blocks * bytes);
    const auto pack = packing().pack[w.scheme][w.type];
    std::atomic<bool> good{true};
    share_out(blocks, parts_of(blocks, w.outputs * w.inputs, kThreadInputs), [&](long block) {
        const long first = block * kLinearColumns;
        if (!pack({static_cast<uint8_t*>(w.packed) + block * bytes, static_cast<char*>(w.scales) + block * scale_bytes,
                   static_cast<const char*>(w.weight) + first * w.stride * size_of(w.type), w.stride,
                   std::min(kLinearColumns, w.outputs - first), w.groups, group})) {
            good = false;
        }
    });
    return good;
}

}  // namespace quintet::cpu
