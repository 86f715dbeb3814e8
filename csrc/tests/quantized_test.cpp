// Quantized products without Python: buffers of the exact size, for the sanitizers; exact numbers, for the sums.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <vector>

#include "cpu/quantized/quantized.h"
#include "tests/isas.h"
#include "tests/numbers.h"

namespace {

namespace cpu = quintet::cpu;

int failures = 0;

struct Packed {
    std::vector<uint8_t> bytes, scales;
    Packed(cpu::QuantizedScheme scheme, const std::vector<float>& weight, long outputs, long inputs, long groups) {
        const long blocks = (outputs + cpu::kLinearColumns - 1) / cpu::kLinearColumns, quads = (inputs + 3) / 4;
        bytes.resize(static_cast<size_t>(blocks * quads * cpu::kLinearColumns * (cpu::nibbles(scheme) ? 2 : 4)));
        scales.resize(static_cast<size_t>(blocks * groups * cpu::kLinearColumns * (scheme == cpu::kW8a8 ? 4 : 2)));
        const bool good = cpu::pack_quantized({bytes.data(), scales.data(), weight.data(), outputs, inputs, groups, inputs,
                                               cpu::kLinearFloat32, scheme});
        if (!good) ++failures;
    }
};

void expect(bool holds, const char* what, int scheme, long tokens, long inputs, long outputs) {
    if (holds) return;
    ++failures;
    std::printf("quantized: %s: scheme %d, %ld x %ld x %ld\n", what, scheme, tokens, inputs, outputs);
}

// Weights of -2..2 and inputs of one number: 8 bits are off by half a 127th each, 4 bits by half a seventh.
void product_is_near(cpu::QuantizedScheme scheme, long tokens, long inputs, long outputs, long groups) {
    std::vector<float> x(static_cast<size_t>(tokens * inputs)), weight(static_cast<size_t>(outputs * inputs));
    std::vector<float> bias(static_cast<size_t>(outputs)), out(static_cast<size_t>(tokens * outputs));
    for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(whole(static_cast<long>(i) + 1));
    for (size_t i = 0; i < weight.size(); ++i) weight[i] = static_cast<float>(whole(static_cast<long>(i) + 2));
    for (size_t i = 0; i < bias.size(); ++i) bias[i] = static_cast<float>(i);
    const Packed packed(scheme, weight, outputs, inputs, groups);
    cpu::quantized({out.data(), x.data(), packed.bytes.data(), packed.scales.data(), bias.data(), tokens, inputs, outputs,
                    groups, inputs, cpu::kLinearFloat32, scheme});
    const float off = static_cast<float>(inputs) * 2 * (cpu::nibbles(scheme) ? 0.2F : 0.03F);
    bool near = true;
    for (long i = 0; i < tokens * outputs; ++i) {
        const long t = i / outputs, n = i % outputs;
        long sum = n;
        for (long k = 0; k < inputs; ++k) sum += whole(t * inputs + k + 1) * whole(n * inputs + k + 2);
        const float error = out[static_cast<size_t>(i)] - static_cast<float>(sum);
        near = near && error <= off && error >= -off;
    }
    expect(near, "a product is far off", scheme, tokens, inputs, outputs);
}

// Values of 0..15 less 3, and a half, in reverse order; inputs of -2..2.
void laid_product_is_near(cpu::QuantizedScheme scheme, long tokens, long inputs, long outputs, long groups) {
    const bool four = cpu::nibbles(scheme), few = cpu::largest_input(scheme) < 128.0F;
    const long blocks = (outputs + cpu::kLinearColumns - 1) / cpu::kLinearColumns, in_blocks = blocks * cpu::kLinearColumns;
    const auto value = [](long i) { return (i * 5 + i / 7) % 16; };
    std::vector<uint8_t> values(static_cast<size_t>(outputs * inputs / (four ? 2 : 1))), bytes(256);
    for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<uint8_t>(i + 128);
    for (size_t i = 0; i < values.size(); ++i) {
        const long at = static_cast<long>(i);
        values[i] = static_cast<uint8_t>(four ? value(2 * at) | value(2 * at + 1) << 4 : value(at));
    }
    std::vector<uint8_t> packed(static_cast<size_t>(in_blocks * inputs / (four ? 2 : 1)));
    cpu::lay_quantized({packed.data(), values.data(), outputs, inputs, four, bytes.data()});
    const bool zeros_there = four && !cpu::looked_up(scheme);
    const float less = zeros_there ? 0.5F : -2.5F;
    const std::vector<float> scales_in(static_cast<size_t>(outputs * groups), 0x1p-30F);
    const std::vector<float> mins_in(static_cast<size_t>(outputs * groups), less * 0x1p-30F);
    std::vector<uint8_t> scales(static_cast<size_t>(in_blocks * groups * 2 + in_blocks * 4));
    std::vector<uint8_t> mins(static_cast<size_t>(in_blocks * groups * 2));
    const cpu::Laid laid = cpu::lay_scales({scales.data(), mins.data(), scales_in.data(), mins_in.data(), outputs, groups, 1, true});
    expect(laid == cpu::Laid::exactly, "scales are not held", scheme, tokens, inputs, outputs);
    const std::vector<uint8_t> zeros(static_cast<size_t>(in_blocks * groups), 3);
    std::vector<int32_t> order(static_cast<size_t>(inputs));
    for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int32_t>(order.size() - 1 - i);
    std::vector<float> x(static_cast<size_t>(tokens * inputs)), out(static_cast<size_t>(tokens * outputs));
    for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(whole(static_cast<long>(i) + 1));
    cpu::QuantizedCall call{out.data(), x.data(), packed.data(), scales.data(), nullptr, tokens, inputs, outputs, groups, inputs,
                            cpu::kLinearFloat32, scheme};
    call.mins = mins.data();
    call.zeros = zeros_there ? zeros.data() : nullptr;
    call.order = order.data();
    call.span = few ? inputs : 0;
    call.powers = true;
    for (size_t i = 0; i < 16; ++i) call.table[i] = static_cast<uint8_t>(128 + i);
    cpu::quantized(call);
    const float off = static_cast<float>(inputs) * 16 * (few ? 0.01F : 0.0001F);
    bool near = true;
    for (long i = 0; i < tokens * outputs; ++i) {
        const long t = i / outputs, n = i % outputs;
        float sum = 0.0F;
        for (long k = 0; k < inputs; ++k) {
            const float each = static_cast<float>(value(n * inputs + k)) - 2.5F;
            sum += static_cast<float>(whole(t * inputs + inputs - k)) * each;
        }
        const float error = out[static_cast<size_t>(i)] * 0x1p30F - sum;
        near = near && error <= off && error >= -off;
    }
    expect(near, "a product of a canonical matrix is far off", scheme, tokens, inputs, outputs);
}

// Inputs of -1 and 1, which become -127 and 127, by the least and the largest bytes of weights: no sum on the way may
// saturate.
void largest_products_are_exact(cpu::QuantizedScheme scheme, long tokens, long inputs, long groups) {
    constexpr long kOutputs = cpu::kLinearColumns;
    const auto sign = [](long t, long k) { return (k * (t + 1) / 3 + t) % 2 ? -1 : 1; };
    const auto weight = [](long n, long k) { return n % 3 == 0 ? 0 : n % 3 == 1 ? 255 : (n + k) % 2 ? 255 : 0; };
    std::vector<uint8_t> values(static_cast<size_t>(kOutputs * inputs)), packed(values.size()), bytes(256);
    std::vector<float> x, out(static_cast<size_t>(tokens * kOutputs));
    for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<uint8_t>(i);
    for (size_t i = 0; i < values.size(); ++i) {
        values[i] = static_cast<uint8_t>(weight(static_cast<long>(i) / inputs, static_cast<long>(i) % inputs));
    }
    for (long t = 0; t < tokens; ++t) {
        for (long k = 0; k < inputs; ++k) x.push_back(static_cast<float>(sign(t, k)));
    }
    cpu::lay_quantized({packed.data(), values.data(), kOutputs, inputs, false, bytes.data()});
    const std::vector<uint16_t> halves(static_cast<size_t>(kOutputs * groups), 0x3C00);  // 1
    const std::vector<float> singles(static_cast<size_t>(kOutputs), 1.0F);
    const void* const scales = scheme == cpu::kW8a8 ? static_cast<const void*>(singles.data()) : halves.data();
    cpu::quantized({out.data(), x.data(), packed.data(), scales, nullptr, tokens, inputs, kOutputs, groups, inputs,
                    cpu::kLinearFloat32, scheme});
    bool exact = true;
    for (long t = 0; t < tokens; ++t) {
        for (long n = 0; n < kOutputs; ++n) {
            float all = 0.0F;
            for (long g = 0; g < groups; ++g) {
                long sum = 0;
                for (long k = g * inputs / groups; k < (g + 1) * inputs / groups; ++k) {
                    sum += 127L * sign(t, k) * (weight(n, k) - 128);
                }
                all = std::fmaf(static_cast<float>(sum), 1.0F / 127.0F, all);
            }
            exact = exact && out[static_cast<size_t>(t * kOutputs + n)] == all;
        }
    }
    expect(exact, "the largest products are not exact", scheme, tokens, inputs, kOutputs);
}

}  // namespace

int quantized_failures() {
    with_each_isa([] {
        for (const long tokens : {1L, 2L, 3L, 7L, 60L}) {
            largest_products_are_exact(cpu::kW8a8, tokens, 2048, 1);
            largest_products_are_exact(cpu::kW8a8Groups, tokens, 384, 3);
        }
        for (const long tokens : {1L, 2L, 3L, 4L, 5L, 6L, 7L, 13L, 60L}) {
            for (const long outputs : {1L, 64L, 77L}) {
                for (const auto scheme : {cpu::kInt8, cpu::kInt4, cpu::kW4a8, cpu::kW8a8Groups}) {
                    product_is_near(scheme, tokens, 32, outputs, 1);
                    product_is_near(scheme, tokens, 384, outputs, 3);
                }
                for (const auto scheme : {cpu::kInt8, cpu::kInt4, cpu::kW4a8, cpu::kW8a8Groups, cpu::kTable4, cpu::kTable4a8}) {
                    laid_product_is_near(scheme, tokens, 96, outputs, 3);
                }
                for (const long inputs : {1L, 2L, 15L, 333L}) product_is_near(cpu::kW8a8, tokens, inputs, outputs, 1);
            }
        }
    });
    return failures;
}
