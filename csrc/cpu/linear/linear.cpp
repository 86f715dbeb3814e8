#include "cpu/linear/linear.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "common/huge_pages.h"
#include "common/share.h"
#include "cpu/features.h"

namespace quintet::cpu {

namespace {

constexpr long kThreadWork = 64L << 10;  // multiply-adds, or elements packed, that are worth another thread's waking

const LinearKernels& kernels() {
#if defined(__x86_64__)
    switch (chosen_isa()) {
        case Isa::amx:
        case Isa::avx512_bf16: return kLinearAvx512Bf16;
        case Isa::avx512: return kLinearAvx512;
        case Isa::avx2_vnni:
        case Isa::avx2: return kLinearAvx2;
        default: break;
    }
#endif
    return kLinearBaseline;
}

constexpr long size_of(LinearType type) { return type == kLinearFloat32 ? 4 : 2; }

// A block's columns are rows of the weight. Unit: the Pair inputs that stand side by side.
template <typename Word, typename Unit>
void pack_block(void* packed, const void* weight, long columns, long inputs, long stride) {
    constexpr long kPair = sizeof(Unit) / sizeof(Word);
    constexpr long kDepth = 16;  // of a stretch: what is written, 4 KiB, and a line of each row stay in the first cache
    const long depth = (inputs + kPair - 1) / kPair, whole = inputs / kPair;
    for (long first = 0; first < depth; first += kDepth) {
        const long last = std::min(first + kDepth, whole);
        Unit* const out = static_cast<Unit*>(packed) + first * kLinearColumns;
        for (long c = 0; c < columns; ++c) {
            const Word* const row = static_cast<const Word*>(weight) + c * stride;
            for (long d = first; d < last; ++d) {
                std::memcpy(out + (d - first) * kLinearColumns + c, row + d * kPair, sizeof(Unit));
            }
            if (whole < depth && depth <= first + kDepth) {  // an odd input, with nothing beside it
                out[(whole - first) * kLinearColumns + c] = row[inputs - 1];
            }
        }
        for (long d = first; d < std::min(first + kDepth, depth); ++d) {
            std::fill(out + (d - first) * kLinearColumns + columns, out + (d - first + 1) * kLinearColumns, Unit{0});
        }
    }
}

}  // namespace

LinearMultiply linear_multiply(LinearType type) {
#if defined(__x86_64__)
    if (type == kLinearBfloat16 && chosen_isa() == Isa::amx) return kLinearAmxBfloat16;
#elif defined(__aarch64__)
    if (type == kLinearBfloat16 && chosen_isa() == Isa::neon_bf16) return kLinearNeonBfloat16;
#endif
    return kernels().multiply[type];
}

long linear_parts(long items, long work) {
    return std::max(1L, std::min({items, static_cast<long>(pool_threads()), work / kThreadWork}));
}

long linear_panels(long tokens, long blocks) {
    constexpr long kItems = 4;  // per thread
    constexpr long kFewest = 48;  // rows that still make the reading of a block from memory worth it
    const long wanted = (kItems * pool_threads() + blocks - 1) / blocks;
    return std::max((tokens + kLinearRows - 1) / kLinearRows, std::min(wanted, tokens / kFewest));
}

namespace {

// Numbers of a row that became float32: past a power of two, at which all rows would meet in a set of the cache.
long wide_stride(long inputs) { return (inputs + 31) / 16 * 16; }

// Rows of x that become float32 at a time: 16 MiB, or kLinearRows.
long most_wide_rows(long inputs) {
    constexpr long kMost = 4L << 20;
    return std::max(kLinearRows, kMost / inputs);
}

// x in float32, which all blocks of a weight then read as it is. The calling thread keeps the memory.
struct Wide {
    const float* rows = nullptr;
    long stride = 0;

    explicit Wide(const LinearCall& call) {
        const auto widen = kernels().widen[call.type];
        if (!widen || call.tokens < kFewWidened || call.outputs <= kLinearColumns) return;
        thread_local std::vector<float> memory;
        stride = wide_stride(call.inputs);
        memory.resize(std::max(memory.size(), static_cast<size_t>(call.tokens * stride)));
        float* const to = memory.data();
        share_out(call.tokens, linear_parts(call.tokens, call.tokens * call.inputs), [&](long t) {
            widen(static_cast<const char*>(call.x) + t * call.x_stride * size_of(call.type), to + t * stride, call.inputs);
        });
        rows = to;
    }
};

void linear_rows(const LinearCall& call) {
    const LinearType type = call.type;
    const Wide wide(call);
    const long size = size_of(type), pair = linear_pair(type);
    const long blocks = (call.outputs + kLinearColumns - 1) / kLinearColumns;
    const long bytes = (call.inputs + pair - 1) / pair * pair * kLinearColumns * size;  // of a block
    const long panels = linear_panels(call.tokens, blocks);
    const LinearMultiply multiply = linear_multiply(type);
    const auto run = [&](long item) {
        alignas(64) float sums[kLinearRows * kLinearColumns];
        const long panel = item / blocks, block = item % blocks, column = block * kLinearColumns;
        const long row = call.tokens * panel / panels, end = call.tokens * (panel + 1) / panels;
        const char* const weight = static_cast<const char*>(call.weight) + block * bytes;
        multiply({static_cast<char*>(call.out) + (row * call.outputs + column) * size,
                  static_cast<const char*>(call.x) + row * call.x_stride * size, weight,
                  call.bias ? static_cast<const char*>(call.bias) + column * size : nullptr,
                  call.outputs, call.x_stride, end - row,
                  std::min(kLinearColumns, call.outputs - column), call.inputs, sums,
                  wide.rows ? wide.rows + row * wide.stride : nullptr, wide.stride});
    };
    share_out(panels * blocks, linear_parts(panels * blocks, call.tokens * call.inputs * call.outputs), run);
}

}  // namespace

void linear(const LinearCall& call) {
    const long most = kernels().widen[call.type] ? most_wide_rows(call.inputs) : call.tokens;
    for (long first = 0; first < call.tokens; first += most) {
        LinearCall rows = call;
        rows.out = static_cast<char*>(call.out) + first * call.outputs * size_of(call.type);
        rows.x = static_cast<const char*>(call.x) + first * call.x_stride * size_of(call.type);
        rows.tokens = std::min(most, call.tokens - first);
        linear_rows(rows);
    }
}

long linear_scratch_bytes(long tokens, long inputs, LinearType type) {
    if (!kernels().widen[type] || tokens < kFewWidened) return 0;
    return std::min(tokens, most_wide_rows(inputs)) * wide_stride(inputs) * static_cast<long>(sizeof(float));
}

Stretch weights_of(const LinearCall& call) { return {call.weight, call.outputs * call.inputs * size_of(call.type)}; }

void linear_by_heads(const LinearHeadsCall& call) {
    const LinearType type = call.type;
    const long size = size_of(type), pair = linear_pair(type);
    const long blocks = (call.outputs + kLinearColumns - 1) / kLinearColumns;
    const long bytes = (call.inputs + pair - 1) / pair * pair * kLinearColumns * size;  // of a block
    const long panels = linear_panels(call.tokens, call.heads * blocks), each = panels * blocks;
    const long row_stride = call.heads * call.outputs;
    const LinearMultiply multiply = linear_multiply(type);
    const auto run = [&](long item) {
        alignas(64) float sums[kLinearRows * kLinearColumns];
        const long head = item / each, panel = item % each / blocks, block = item % blocks, column = block * kLinearColumns;
        const long row = call.tokens * panel / panels, end = call.tokens * (panel + 1) / panels;
        multiply({static_cast<char*>(call.out) + (row * row_stride + head * call.outputs + column) * size,
                  static_cast<const char*>(call.x) + (row * call.token_stride + head * call.head_stride) * size,
                  static_cast<const char*>(call.weight) + (head * blocks + block) * bytes, nullptr, row_stride,
                  call.token_stride, end - row, std::min(kLinearColumns, call.outputs - column), call.inputs, sums});
    };
    const long items = call.heads * each;
    share_out(items, linear_parts(items, call.tokens * call.heads * call.inputs * call.outputs), run);
}

void pack_linear(void* packed, const void* weight, long outputs, long inputs, long stride, LinearType type) {
    const long pair = linear_pair(type), blocks = (outputs + kLinearColumns - 1) / kLinearColumns;
    const long each = (inputs + pair - 1) / pair * pair * kLinearColumns;
    const long bytes = each * size_of(type);
    wish_huge_pages(packed, blocks * bytes);
    const auto pack = type == kLinearFloat32    ? pack_block<uint32_t, uint32_t>
                      : type == kLinearBfloat16 ? pack_block<uint16_t, uint32_t>
                                                : pack_block<uint16_t, uint16_t>;
    share_out(blocks, linear_parts(blocks, outputs * inputs), [&](long block) {
        const long first = block * kLinearColumns;
        pack(static_cast<char*>(packed) + block * bytes, static_cast<const char*>(weight) + first * stride * size_of(type),
             std::min(kLinearColumns, outputs - first), inputs, stride);
    });
}

}  // namespace quintet::cpu
