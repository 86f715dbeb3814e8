// GGUF's blocks without Python: buffers of the exact size, for the sanitizers; both ways of unpacking stand for the same.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <vector>

#include "cpu/quantized/blocks.h"
#include "cpu/quantized/quantized.h"
#include "tests/isas.h"

namespace {

namespace cpu = quintet::cpu;

int failures = 0;

void expect(bool holds, const char* what, const char* name, long tokens) {
    if (holds) return;
    ++failures;
    std::printf("blocks: %s: %s, %ld rows\n", what, name, tokens);
}

size_t sized(long count) { return static_cast<size_t>(count); }

// Bytes below 0x30, so that each two of them are a small number in float16.
std::vector<uint8_t> drawn(long count) {
    std::vector<uint8_t> bytes(sized(count));
    uint32_t state = 1;
    for (uint8_t& byte : bytes) byte = static_cast<uint8_t>((state = state * 1664525U + 1013904223U) >> 24) % 0x30;
    return bytes;
}

struct Canonical {
    std::vector<uint8_t> values;
    std::vector<float> scales, mins;

    Canonical(const cpu::BlockKind& kind, const std::vector<uint8_t>& rows, long outputs, long inputs)
        : values(sized(outputs * inputs / (kind.nibbles ? 2 : 1))), scales(sized(outputs * inputs / kind.group)),
          mins(kind.mins ? scales.size() : 0) {
        cpu::unpack_blocks({rows.data(), values.data(), scales.data(), kind.mins ? mins.data() : nullptr, outputs, inputs,
                            inputs / kind.values * kind.bytes, &kind});
    }

    double at(const cpu::BlockKind& kind, long index) const {
        const uint8_t byte = values[sized(kind.nibbles ? index / 2 : index)];
        const int nibble = index % 2 ? byte >> 4 : byte & 15;
        const int value = !kind.nibbles ? static_cast<int8_t>(byte) : kind.mins ? nibble : nibble - 8;
        const size_t group = sized(index / kind.group);
        return static_cast<double>(value) * scales[group] + (kind.mins ? mins[group] : 0.0F);
    }
};

void products_are_near(const cpu::BlockKind& kind, cpu::QuantizedScheme scheme, long tokens) {
    const long outputs = 70, inputs = 512, blocks = 2, stride = inputs / kind.values * kind.bytes, groups = inputs / kind.group;
    const std::vector<uint8_t> rows = drawn(outputs * stride);
    std::vector<uint8_t> packed(sized(blocks * inputs / 4 * cpu::quad_bytes(scheme)));
    std::vector<int8_t> scales(sized(blocks * (kind.fives ? 2 * groups : groups + inputs / 128) * cpu::kLinearColumns));
    std::vector<int8_t> mins(kind.mins ? scales.size() : 0);
    const bool good = cpu::lay_blocks({rows.data(), packed.data(), scales.data(), kind.mins ? mins.data() : nullptr, outputs,
                                       inputs, stride, &kind});
    expect(good, "finite numbers are refused", kind.name, tokens);
    std::vector<float> x(sized(tokens * inputs)), out(sized(tokens * outputs));
    for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i * 7 % 15) - 7.0F;
    cpu::QuantizedCall call{out.data(), x.data(), packed.data(), scales.data(), nullptr, tokens, inputs, outputs, groups, inputs,
                            cpu::kLinearFloat32, scheme};
    call.mins = kind.mins ? mins.data() : nullptr;
    cpu::quantized(call);
    const Canonical whole(kind, rows, outputs, inputs);
    bool near = true;
    for (long i = 0; i < tokens * outputs; ++i) {
        double sum = 0.0, size = 0.0;
        for (long k = 0; k < inputs; ++k) {
            const double each = x[sized(i / outputs * inputs + k)] * whole.at(kind, i % outputs * inputs + k);
            sum += each;
            size += std::fabs(each);
        }
        near = near && std::fabs(out[sized(i)] - sum) <= size * 0.01;
    }
    expect(near, "a product is far off", kind.name, tokens);
}

}  // namespace

int blocks_failures() {
    for (const cpu::BlockKind& kind : cpu::block_kinds()) {
        const long inputs = 512, stride = inputs / kind.values * kind.bytes;
        const Canonical whole(kind, drawn(17 * stride), 17, inputs);
        expect(std::isfinite(whole.at(kind, 17 * inputs - 1)), "the last number is none", kind.name, 17);
    }
    expect(cpu::block_kind("Q9_K") == nullptr, "what is not there is found", "Q9_K", 0);
    with_each_isa([] {
        for (const cpu::BlockKind& kind : cpu::block_kinds()) {
            for (const long tokens : {1L, 2L, 3L, 4L, 7L, 61L}) {
                if (kind.fives) products_are_near(kind, cpu::kInt5, tokens);
                if (kind.fives) products_are_near(kind, cpu::kW5a8, tokens);
                if (!kind.levels) continue;
                products_are_near(kind, kind.nibbles ? cpu::kInt4Levels : cpu::kInt6Levels, tokens);
                products_are_near(kind, kind.nibbles ? cpu::kW4a8Levels : cpu::kW6a8Levels, tokens);
            }
        }
    });
    return failures;
}
