// Linear without Python: buffers of the exact size, for the sanitizers; exact numbers, for the sums.
#include <cstdint>
#include <cstdio>
#include <vector>

#include "cpu/linear/linear.h"
#include "tests/isas.h"
#include "tests/numbers.h"

namespace {

namespace cpu = quintet::cpu;

int failures = 0;

struct Numbers {
    std::vector<uint8_t> bytes;
    Numbers(long count, cpu::LinearType type, long seed) {
        const size_t size = type == cpu::kLinearFloat32 ? 4 : 2;
        bytes.resize(static_cast<size_t>(count) * size);
        for (long i = 0; i < count; ++i) {
            const uint32_t bits = bits_of(whole(i + seed), type);
            __builtin_memcpy(bytes.data() + static_cast<size_t>(i) * size, &bits, size);
        }
    }
};

void product_is_exact(cpu::LinearType type, long tokens, long inputs, long outputs) {
    const size_t size = type == cpu::kLinearFloat32 ? 4 : 2;
    const long pair = cpu::linear_pair(type), blocks = (outputs + cpu::kLinearColumns - 1) / cpu::kLinearColumns;
    const Numbers x(tokens * inputs, type, 1), weight(outputs * inputs, type, 2), bias(outputs, type, 3);
    std::vector<uint8_t> packed(static_cast<size_t>(blocks * ((inputs + pair - 1) / pair) * pair * cpu::kLinearColumns) * size);
    std::vector<uint8_t> out(static_cast<size_t>(tokens * outputs) * size);
    cpu::pack_linear(packed.data(), weight.bytes.data(), outputs, inputs, inputs, type);
    cpu::linear({out.data(), x.bytes.data(), packed.data(), bias.bytes.data(), tokens, inputs, outputs, inputs, type});
    for (long i = 0; i < tokens * outputs; ++i) {
        const long t = i / outputs, n = i % outputs;
        long sum = whole(n + 3);
        for (long k = 0; k < inputs; ++k) sum += whole(t * inputs + k + 1) * whole(n * inputs + k + 2);
        uint32_t got = 0;
        __builtin_memcpy(&got, out.data() + static_cast<size_t>(i) * size, size);
        const long most = type == cpu::kLinearFloat32 ? 1L << 24 : type == cpu::kLinearBfloat16 ? 256 : 2048;
        const bool held = sum >= -most && sum <= most;  // so far every whole number is one of the type's
        if (held && got != bits_of(sum, type)) {
            ++failures;
            std::printf("linear: type %d, %ld x %ld x %ld: element %ld is not %ld\n", type, tokens, inputs, outputs, i, sum);
            return;
        }
    }
}

#if defined(__x86_64__)
// AMX's tiles, emulated as tiles.h does, against the loops of AVX512, whose dot product adds up in nearly the same order.
void tiles_multiply_as_vectors_do(long rows, long inputs, long columns) {
    const Numbers x(rows * inputs, cpu::kLinearBfloat16, 1), bias(columns, cpu::kLinearBfloat16, 3);
    const Numbers weight(columns * inputs, cpu::kLinearBfloat16, 2);
    std::vector<uint16_t> packed(static_cast<size_t>((inputs + 1) / 2 * 2 * cpu::kLinearColumns));
    std::vector<float> sums(static_cast<size_t>(rows * cpu::kLinearColumns));
    cpu::pack_linear(packed.data(), weight.bytes.data(), columns, inputs, inputs, cpu::kLinearBfloat16);
    std::vector<uint16_t> out[2];
    for (std::vector<uint16_t>& each : out) {
        each.resize(static_cast<size_t>(rows * columns));
        const cpu::LinearPanel panel{each.data(), x.bytes.data(), packed.data(), bias.bytes.data(), columns, inputs,
                                     rows, columns, inputs, sums.data()};
        &each == out ? cpu::kLinearAmxBfloat16(panel) : cpu::kLinearAvx512Bf16.multiply[cpu::kLinearBfloat16](panel);
    }
    if (out[0] == out[1]) return;
    ++failures;
    std::printf("linear: tiles and vectors differ, %ld x %ld x %ld\n", rows, inputs, columns);
}
#endif

}  // namespace

int linear_failures() {
    with_each_isa([] {
        for (const auto type : {cpu::kLinearFloat32, cpu::kLinearBfloat16, cpu::kLinearFloat16}) {
            for (const long tokens : {1L, 2L, 5L, 6L, 7L, 13L, 260L}) {
                for (const long inputs : {1L, 2L, 15L, 333L}) {
                    for (const long outputs : {1L, 64L, 77L}) product_is_exact(type, tokens, inputs, outputs);
                }
            }
            for (const long tokens : {2L, 3L, 9L, 20L}) product_is_exact(type, tokens, 2051, 65);  // several stretches of a block
        }
        if (cpu::chosen_isa() == cpu::Isa::avx2) product_is_exact(cpu::kLinearBfloat16, 258, 16640, 65);  // x in two parts
#if defined(__x86_64__)
        if (cpu::chosen_isa() != cpu::Isa::avx512_bf16) return;
        for (const long rows : {1L, 15L, 16L, 17L, 32L, 33L, 70L}) {
            for (const long inputs : {1L, 31L, 32L, 65L, 320L}) {
                for (const long columns : {1L, 16L, 33L, 64L}) tiles_multiply_as_vectors_do(rows, inputs, columns);
            }
        }
#endif
    });
    return failures;
}
