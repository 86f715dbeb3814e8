// Products with 8-bit floats without Python: buffers of the exact size, for the sanitizers; exact numbers, for the sums.
#include <cstdint>
#include <cstdio>
#include <vector>

#include "cpu/quantized/float8.h"
#include "tests/isas.h"
#include "tests/numbers.h"

namespace {

namespace cpu = quintet::cpu;

int failures = 0;

// -2 .. 2 in e4m3fn and e5m2.
uint8_t float8_of(long value, cpu::Float8Format format) {
    const uint8_t size = format == cpu::kE4m3fn ? (value % 2 ? 0x38 : 0x40) : (value % 2 ? 0x3C : 0x40);
    return static_cast<uint8_t>(value == 0 ? 0 : value < 0 ? size | 0x80 : size);
}

void product_is_exact(cpu::Float8Format format, long tokens, long inputs, long outputs, long group) {
    const long blocks = (outputs + cpu::kLinearColumns - 1) / cpu::kLinearColumns, groups = (inputs + group - 1) / group;
    std::vector<uint8_t> weight(static_cast<size_t>(outputs * inputs));
    std::vector<uint8_t> packed(static_cast<size_t>(blocks * ((inputs + 1) / 2) * cpu::kFloat8Step));
    std::vector<float> x(static_cast<size_t>(tokens * inputs)), bias(static_cast<size_t>(outputs));
    std::vector<float> out(static_cast<size_t>(tokens * outputs));
    std::vector<float> scales(static_cast<size_t>(blocks * groups * cpu::kLinearColumns), 2.0F);
    for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(whole(static_cast<long>(i) + 1));
    for (size_t i = 0; i < weight.size(); ++i) weight[i] = float8_of(whole(static_cast<long>(i) + 2), format);
    for (size_t i = 0; i < bias.size(); ++i) bias[i] = static_cast<float>(i);
    bool good = cpu::pack_float8(packed.data(), weight.data(), outputs, inputs, inputs, format);
    cpu::float8({out.data(), x.data(), packed.data(), scales.data(), bias.data(), tokens, inputs, outputs, group, inputs,
                 cpu::kLinearFloat32, format});
    for (long i = 0; i < tokens * outputs; ++i) {
        const long t = i / outputs, n = i % outputs;
        long sum = n;
        for (long k = 0; k < inputs; ++k) sum += 2 * whole(t * inputs + k + 1) * whole(n * inputs + k + 2);
        good = good && out[static_cast<size_t>(i)] == static_cast<float>(sum);
    }
    weight.back() = 0x7F;
    good = good && !cpu::pack_float8(packed.data(), weight.data(), outputs, inputs, inputs, format);
    if (good) return;
    ++failures;
    std::printf("float8: format %d, %ld x %ld x %ld, group %ld\n", format, tokens, inputs, outputs, group);
}

}  // namespace

int float8_failures() {
    with_each_isa([] {
        for (const auto format : {cpu::kE4m3fn, cpu::kE5m2}) {
            for (const long tokens : {1L, 2L, 3L, 5L, 7L, 13L, 60L}) {
                for (const long outputs : {1L, 64L, 77L}) {
                    product_is_exact(format, tokens, 1, outputs, 1);
                    product_is_exact(format, tokens, 33, outputs, 16);
                    product_is_exact(format, tokens, 333, outputs, 333);
                    product_is_exact(format, tokens, 768, outputs, 128);
                }
            }
        }
    });
    return failures;
}
