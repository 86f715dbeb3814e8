#include "cpu/quantized/float8.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "common/huge_pages.h"
#include "common/share.h"
#include "cpu/features.h"
#include "cpu/linear/linear.h"

namespace quintet::cpu {

namespace {

constexpr long kThreadBytes = 64L << 10;  // to pack, that are worth another thread's waking

const Float8Kernels& kernels() {
#if defined(__x86_64__)
    switch (chosen_isa()) {
        case Isa::amx:
        case Isa::avx512_bf16: return kFloat8Avx512Bf16;
        case Isa::avx512: return kFloat8Avx512;
        case Isa::avx2_vnni:
        case Isa::avx2: return kFloat8Avx2;
        default: break;
    }
#endif
    return kFloat8Baseline;
}

constexpr long size_of(LinearType type) { return type == kLinearFloat32 ? 4 : 2; }
constexpr long blocks_of(long outputs) { return (outputs + kLinearColumns - 1) / kLinearColumns; }

bool finite(Float8Format format, uint8_t bits) {
    return format == kE4m3fn ? (bits & 0x7F) != 0x7F : (bits & 0x7C) != 0x7C;
}

// A block's columns are rows of the weight.
bool pack_block(uint8_t* packed, const uint8_t* weight, long columns, long inputs, long stride, Float8Format format) {
    constexpr long kDepth = 32;  // pairs of a stretch: what is written, 4 KiB, and a line of each row stay in the first cache
    const long depth = (inputs + 1) / 2;
    bool good = true;
    std::memset(packed, 0, static_cast<size_t>(depth * kFloat8Step));
    for (long first = 0; first < depth; first += kDepth) {
        const long start = 2 * first, end = std::min(2 * (first + kDepth), inputs);
        for (long c = 0; c < columns; ++c) {
            const uint8_t* const row = weight + c * stride;
            uint8_t* const out = packed + float8_place(c);
            for (long k = start; k < end; ++k) {
                good = good && finite(format, row[k]);
                out[k / 2 * kFloat8Step + k % 2 * 2] = row[k];
            }
        }
    }
    return good;
}

// Rows of one block of the call's weight, `stride` elements apart.
void multiply_block(const Float8Call& call, void* out, const void* x, long stride, long rows, long block) {
    alignas(64) float sums[kLinearRows * kLinearColumns];
    const long size = size_of(call.type), column = block * kLinearColumns;
    const long bytes = (call.inputs + 1) / 2 * kFloat8Step, groups = (call.inputs + call.group - 1) / call.group;
    kernels().multiply[call.format][call.type](
        {static_cast<char*>(out) + column * size, x, static_cast<const uint8_t*>(call.weight) + block * bytes,
         call.scales + block * groups * kLinearColumns,
         call.bias ? static_cast<const char*>(call.bias) + column * size : nullptr, call.outputs, stride, rows,
         std::min(kLinearColumns, call.outputs - column), call.inputs, call.group, sums});
}

}  // namespace

void float8(const Float8Call& call) {
    const long size = size_of(call.type), blocks = blocks_of(call.outputs), panels = linear_panels(call.tokens, blocks);
    const auto run = [&](long item) {
        const long panel = item / blocks, row = call.tokens * panel / panels, end = call.tokens * (panel + 1) / panels;
        multiply_block(call, static_cast<char*>(call.out) + row * call.outputs * size,
                       static_cast<const char*>(call.x) + row * call.x_stride * size, call.x_stride, end - row, item % blocks);
    };
    share_out(panels * blocks, linear_parts(panels * blocks, call.tokens * call.inputs * call.outputs), run);
}

Stretch weights_of(const Float8Call& call) { return {call.weight, call.outputs * call.inputs}; }

void float8_stack(const Float8Stack& stack, const SortedRows& sorted, void* out, const void* x, long stride, void* spare) {
    const Float8Call& first = stack.first;
    const long size = size_of(first.type);
    const Gathered rows = gathered(sorted, x, stride * size, first.inputs * size, spare);
    for_panels(sorted, first.inputs, first.outputs, [&](const Panel& panel, long block) {
        Float8Call call = first;
        call.weight = static_cast<const char*>(first.weight) + panel.matrix * stack.weight_bytes;
        call.scales = first.scales + panel.matrix * (stack.scale_bytes / static_cast<long>(sizeof(float)));
        multiply_block(call, static_cast<char*>(out) + panel.first * first.outputs * size,
                       static_cast<const char*>(rows.x) + panel.first * rows.stride, rows.stride / size, panel.rows, block);
    });
}

bool pack_float8(void* packed, const void* weight, long outputs, long inputs, long stride, Float8Format format) {
    const long blocks = blocks_of(outputs), bytes = (inputs + 1) / 2 * kFloat8Step;
    wish_huge_pages(packed, blocks * bytes);
    std::atomic<bool> good{true};
    const long parts = std::max(1L, std::min({blocks, static_cast<long>(pool_threads()), outputs * inputs / kThreadBytes}));
    share_out(blocks, parts, [&](long block) {
        const long first = block * kLinearColumns;
        if (!pack_block(static_cast<uint8_t*>(packed) + block * bytes, static_cast<const uint8_t*>(weight) + first * stride,
                        std::min(kLinearColumns, outputs - first), inputs, stride, format)) {
            good = false;
        }
    });
    return good;
}

}  // namespace quintet::cpu
