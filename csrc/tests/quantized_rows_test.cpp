// Rows of packed weights without Python: buffers of the exact size, for the sanitizers; exact numbers, in every type.
#include <cstdint>
#include <cstdio>
#include <vector>

#include "common/pool.h"
#include "cpu/quantized/blocks.h"
#include "cpu/quantized/float8.h"
#include "cpu/quantized/quantized.h"
#include "cpu/quantized/quantized_rows.h"
#include "tests/numbers.h"

namespace {

namespace cpu = quintet::cpu;

int failures = 0;

constexpr long kFirst = 5;  // the table's own first row

long value(long i) { return (i * 5 + i / 7) % 16; }

std::vector<int32_t> ids_of(long outputs) {
    const int32_t last = static_cast<int32_t>(kFirst + outputs) - 1;
    return {last, static_cast<int32_t>(kFirst), last + 1, -1, last / 2 + 3};
}

bool holds(const std::vector<uint8_t>& out, size_t at, long number, cpu::LinearType type) {
    const size_t size = type == cpu::kLinearFloat32 ? 4 : 2;
    uint32_t found = 0;
    for (size_t i = 0; i < size; ++i) found |= static_cast<uint32_t>(out[at * size + i]) << 8 * i;
    return found == bits_of(number, type);
}

// (v - zero) * 2 + 1 in reverse order, with scales and minima that are held 2^30 times too small.
void rows_of_tiles_are_exact(cpu::QuantizedScheme scheme, cpu::LinearType type, long inputs, long outputs, long groups) {
    const bool four = cpu::nibbles(scheme), zeros_there = four && !cpu::looked_up(scheme);
    const long columns = (outputs + cpu::kLinearColumns - 1) / cpu::kLinearColumns * cpu::kLinearColumns;
    std::vector<uint8_t> values(static_cast<size_t>(outputs * inputs / (four ? 2 : 1))), bytes(256);
    for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<uint8_t>(i + 128);
    for (size_t i = 0; i < values.size(); ++i) {
        const long at = static_cast<long>(i);
        values[i] = static_cast<uint8_t>(four ? value(2 * at) | value(2 * at + 1) << 4 : value(at));
    }
    std::vector<uint8_t> packed(static_cast<size_t>(columns * inputs / (four ? 2 : 1)));
    cpu::lay_quantized({packed.data(), values.data(), outputs, inputs, four, bytes.data()});
    const std::vector<float> scales_in(static_cast<size_t>(outputs * groups), 0x1p-29F);
    const std::vector<float> mins_in(scales_in.size(), 0x1p-30F);
    std::vector<uint8_t> scales(static_cast<size_t>(columns * (groups * 2 + 4))), mins(static_cast<size_t>(columns * groups * 2));
    cpu::lay_scales({scales.data(), mins.data(), scales_in.data(), mins_in.data(), outputs, groups, 1, true});
    float* powers = reinterpret_cast<float*>(scales.data());
    for (long block = 0; block < columns / cpu::kLinearColumns; ++block) {  // two halves make the place of a float
        powers += groups * cpu::kLinearColumns / 2;
        for (long c = 0; c < cpu::kLinearColumns; ++c) *powers++ *= 0x1p30F;
    }
    const std::vector<uint8_t> zeros(static_cast<size_t>(columns * groups), 3);
    std::vector<int32_t> order(static_cast<size_t>(inputs));
    for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int32_t>(order.size() - 1 - i);
    const std::vector<int32_t> ids = ids_of(outputs);
    const long tokens = static_cast<long>(ids.size());
    std::vector<uint8_t> out(static_cast<size_t>(tokens * inputs * (type == cpu::kLinearFloat32 ? 4 : 2)), 9);
    cpu::GatherCall call{out.data(), ids.data(), packed.data(), scales.data(), tokens, inputs, outputs, groups, type, scheme,
                         kFirst, zeros_there ? zeros.data() : nullptr, mins.data(), order.data(), true};
    for (size_t i = 0; i < 16; ++i) call.table[i] = static_cast<uint8_t>(128 + i);
    cpu::gather(call);
    bool good = true;
    for (long t = 0; t < tokens; ++t) {
        const long row = ids[static_cast<size_t>(t)] - kFirst;
        for (long k = 0; k < inputs; ++k) {
            const long number = (value(row * inputs + inputs - 1 - k) - (zeros_there ? 3 : 0)) * 2 + 1;
            good = good && holds(out, static_cast<size_t>(t * inputs + k), row < 0 || row >= outputs ? 0 : number, type);
        }
    }
    if (good) return;
    ++failures;
    std::printf("rows: scheme %d, type %d, %ld x %ld, %ld groups\n", scheme, type, outputs, inputs, groups);
}

void rows_of_float8_are_exact(cpu::Float8Format format, cpu::LinearType type, long inputs, long outputs, long group) {
    const long blocks = (outputs + cpu::kLinearColumns - 1) / cpu::kLinearColumns, groups = (inputs + group - 1) / group;
    std::vector<uint8_t> weight(static_cast<size_t>(outputs * inputs));
    for (size_t i = 0; i < weight.size(); ++i) {  // 1 and 2
        weight[i] = static_cast<uint8_t>(value(static_cast<long>(i)) % 2 ? 0x40 : format == cpu::kE4m3fn ? 0x38 : 0x3C);
    }
    std::vector<uint8_t> packed(static_cast<size_t>(blocks * ((inputs + 1) / 2) * cpu::kFloat8Step));
    cpu::pack_float8(packed.data(), weight.data(), outputs, inputs, inputs, format);
    const std::vector<float> scales(static_cast<size_t>(blocks * groups * cpu::kLinearColumns), 4.0F);
    const std::vector<int32_t> ids = ids_of(outputs);
    const long tokens = static_cast<long>(ids.size());
    std::vector<uint8_t> out(static_cast<size_t>(tokens * inputs * (type == cpu::kLinearFloat32 ? 4 : 2)), 9);
    cpu::gather_float8({out.data(), ids.data(), packed.data(), scales.data(), tokens, inputs, outputs, group, type, format, kFirst});
    bool good = true;
    for (long t = 0; t < tokens; ++t) {
        const long row = ids[static_cast<size_t>(t)] - kFirst;
        for (long k = 0; k < inputs; ++k) {
            const long number = value(row * inputs + k) % 2 ? 8 : 4;
            good = good && holds(out, static_cast<size_t>(t * inputs + k), row < 0 || row >= outputs ? 0 : number, type);
        }
    }
    if (good) return;
    ++failures;
    std::printf("rows: format %d, type %d, %ld x %ld, group %ld\n", format, type, outputs, inputs, group);
}

// What is unpacked otherwise, too: (value - zero) * scale + minimum.
void rows_of_blocks_are_near(const char* name, cpu::QuantizedScheme scheme, long outputs) {
    const cpu::BlockKind& kind = *cpu::block_kind(name);
    const long inputs = 512, stride = inputs / kind.values * kind.bytes, groups = inputs / kind.group;
    const long columns = (outputs + cpu::kLinearColumns - 1) / cpu::kLinearColumns * cpu::kLinearColumns;
    std::vector<uint8_t> rows(static_cast<size_t>(outputs * stride));  // bytes of small numbers in float16
    for (size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<uint8_t>((i * 7 + i / 5) % 0x30);
    std::vector<uint8_t> packed(static_cast<size_t>(columns * inputs / 4 * cpu::quad_bytes(scheme) / cpu::kLinearColumns));
    std::vector<int8_t> scales(static_cast<size_t>((kind.fives ? 2 * groups : groups + inputs / 128) * columns));
    std::vector<int8_t> mins(kind.mins ? scales.size() : 0);
    bool good = cpu::lay_blocks({rows.data(), packed.data(), scales.data(), kind.mins ? mins.data() : nullptr, outputs, inputs,
                                 stride, &kind});
    std::vector<uint8_t> values(static_cast<size_t>(outputs * inputs / (kind.nibbles ? 2 : 1)));
    std::vector<float> known(static_cast<size_t>(outputs * groups)), least(kind.mins ? known.size() : 0);
    cpu::unpack_blocks({rows.data(), values.data(), known.data(), kind.mins ? least.data() : nullptr, outputs, inputs, stride, &kind});
    const std::vector<int32_t> ids = ids_of(outputs);
    const long tokens = static_cast<long>(ids.size());
    std::vector<float> out(static_cast<size_t>(tokens * inputs), 9.0F);
    cpu::gather({out.data(), ids.data(), packed.data(), scales.data(), tokens, inputs, outputs, groups, cpu::kLinearFloat32, scheme,
                 kFirst, nullptr, kind.mins ? mins.data() : nullptr});
    for (long i = 0; i < tokens * inputs; ++i) {
        const long row = ids[static_cast<size_t>(i / inputs)] - kFirst, at = row * inputs + i % inputs;
        double number = 0.0;
        if (row >= 0 && row < outputs) {
            const uint8_t byte = values[static_cast<size_t>(kind.nibbles ? at / 2 : at)];
            const int nibble = at % 2 ? byte >> 4 : byte & 15;
            const int value = !kind.nibbles ? static_cast<int8_t>(byte) : kind.mins ? nibble : nibble - 8;
            const size_t group = static_cast<size_t>(at / kind.group);
            number = static_cast<double>(value) * known[group] + (kind.mins ? least[group] : 0.0F);
        }
        const double error = out[static_cast<size_t>(i)] - number;
        good = good && error <= 1e-4 && error >= -1e-4;
    }
    if (good) return;
    ++failures;
    std::printf("rows: %s, %ld outputs\n", name, outputs);
}

}  // namespace

int quantized_rows_failures() {
    const int threads = quintet::pool_threads();
    quintet::set_pool_threads(3);
    for (const auto type : {cpu::kLinearFloat32, cpu::kLinearBfloat16, cpu::kLinearFloat16}) {
        for (const long outputs : {1L, 64L, 77L}) {
            for (const auto scheme : {cpu::kInt8, cpu::kInt4, cpu::kW4a8, cpu::kW8a8Groups, cpu::kTable4, cpu::kTable4a8}) {
                rows_of_tiles_are_exact(scheme, type, 96, outputs, 3);
                rows_of_tiles_are_exact(scheme, type, 16384, outputs, 128);
            }
            for (const char* name : {"Q2_K", "Q3_K", "Q4_K"}) rows_of_blocks_are_near(name, cpu::kInt4Levels, outputs);
            for (const char* name : {"Q5_K", "Q6_K"}) rows_of_blocks_are_near(name, cpu::kW6a8Levels, outputs);
            rows_of_blocks_are_near("Q5_0", cpu::kW5a8, outputs);
            for (const auto format : {cpu::kE4m3fn, cpu::kE5m2}) {
                rows_of_float8_are_exact(format, type, 33, outputs, 16);
                rows_of_float8_are_exact(format, type, 96, outputs, 96);
            }
        }
    }
    quintet::set_pool_threads(threads);
    return failures;
}
