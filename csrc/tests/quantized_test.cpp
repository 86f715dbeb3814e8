// Quantized products without Python: buffers of the exact size, for the sanitizers; exact numbers, for the sums.
#include <cstdint>
#include <cstdio>
#include <stdexcept>
#include <vector>

#include "common/pool.h"
#include "cpu/features.h"
#include "cpu/quantized.h"
#include "tests/isas.h"

namespace {

namespace cpu = quintet::cpu;

int failures = 0;

// Small whole numbers.
long whole(long i) { return (i * 7 + i / 3) % 5 - 2; }

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
    if (cpu::nibbles(scheme)) return;
    const std::vector<int32_t> ids{static_cast<int32_t>(outputs - 1), 0, -1};
    std::vector<float> rows(ids.size() * static_cast<size_t>(inputs), 9.0F);
    cpu::gather({rows.data(), ids.data(), packed.bytes.data(), packed.scales.data(), 3, inputs, outputs, groups,
                 cpu::kLinearFloat32, scheme});
    for (long k = 0; k < inputs; ++k) {
        const float error = rows[static_cast<size_t>(k)] - static_cast<float>(whole((outputs - 1) * inputs + k + 2));
        near = near && error <= 0.02F && error >= -0.02F && rows[static_cast<size_t>(2 * inputs + k)] == 0.0F;
    }
    expect(near, "a row is far off", scheme, 3, inputs, outputs);
}

}  // namespace

int quantized_failures() {
    const int threads = quintet::pool_threads();
    quintet::set_pool_threads(3);
    for (const char* isa : kIsas) {
        try {
            cpu::choose_isa(isa);
        } catch (const std::invalid_argument&) {
            continue;
        }
        for (const long tokens : {1L, 2L, 3L, 4L, 5L, 6L, 7L, 13L, 60L}) {
            for (const long outputs : {1L, 64L, 77L}) {
                for (const auto scheme : {cpu::kInt8, cpu::kInt4, cpu::kW4a8}) {
                    product_is_near(scheme, tokens, 32, outputs, 1);
                    product_is_near(scheme, tokens, 384, outputs, 3);
                }
                for (const long inputs : {1L, 2L, 15L, 333L}) product_is_near(cpu::kW8a8, tokens, inputs, outputs, 1);
            }
        }
    }
    cpu::choose_isa(cpu::isa_name(cpu::isa()));
    quintet::set_pool_threads(threads);
    return failures;
}
