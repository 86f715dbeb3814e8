// Low-rank adapters without Python: buffers of the exact size, for the sanitizers; exact numbers, for the sums.
#include <cstdint>
#include <cstdio>
#include <vector>

#include "cpu/linear/lora.h"
#include "tests/isas.h"
#include "tests/numbers.h"

namespace {

namespace cpu = quintet::cpu;

int failures = 0;

struct Sizes {
    long tokens, inputs, first, second, rank;  // first, second: widths of two parts
};

constexpr long kAdapters = 3, kParts = 2, kStrides = 4;  // kStrides: elements between rows of y and of x

long slot_of(long token) { return (token * token + token / 3) % (kAdapters + 1); }

class Numbers {
public:
    Numbers(long count, cpu::FloatType type, long seed) : type_(type), bytes_(static_cast<size_t>(count * cpu::size_of(type))) {
        for (long i = 0; i < count; ++i) put(i, whole(i + seed));
    }
    void* data() { return bytes_.data(); }
    void put(long i, long value) {
        const uint32_t bits = bits_of(value, static_cast<cpu::LinearType>(type_));
        __builtin_memcpy(at(i), &bits, static_cast<size_t>(cpu::size_of(type_)));
    }
    uint32_t bits(long i) {
        uint32_t bits = 0;
        __builtin_memcpy(&bits, at(i), static_cast<size_t>(cpu::size_of(type_)));
        return bits;
    }

private:
    uint8_t* at(long i) { return bytes_.data() + i * cpu::size_of(type_); }

    cpu::FloatType type_;
    std::vector<uint8_t> bytes_;
};

// A x of numbers that are 0 but in a few places stays small, and so does what is added to y.
void sums_are_exact(cpu::FloatType type, const Sizes& s) {
    const long outputs = s.first + s.second, y_stride = outputs + kStrides, x_stride = s.inputs + kStrides;
    Numbers y((s.tokens - 1) * y_stride + outputs, type, 5), x((s.tokens - 1) * x_stride + s.inputs, type, 1);
    Numbers a(kAdapters * kParts * s.rank * s.inputs, type, 2), b(kAdapters * s.rank * outputs, type, 3);
    const int32_t columns[] = {0, static_cast<int32_t>(s.first), 1, static_cast<int32_t>(s.second)};
    std::vector<int32_t> slots(static_cast<size_t>(s.tokens)), ranks(kAdapters * kParts);
    for (long t = 0; t < s.tokens; ++t) slots[static_cast<size_t>(t)] = static_cast<int32_t>(slot_of(t));
    for (long i = 0; i < kAdapters * kParts; ++i) ranks[static_cast<size_t>(i)] = static_cast<int32_t>((s.rank + i) % (s.rank + 1));
    const auto is_kept = [&](long k) { return k % 16 == s.inputs % 16 || k == s.inputs - 1 || k == 0; };
    for (long t = 0; t < s.tokens; ++t) {
        for (long k = 0; k < s.inputs; ++k) {
            if (!is_kept(k)) x.put(t * x_stride + k, 0);
        }
    }
    std::vector<uint32_t> want;
    for (long i = 0; i < s.tokens * outputs; ++i) {
        const long t = i / outputs, n = i % outputs, part = n < s.first ? 0 : 1, adapter = slots[static_cast<size_t>(t)] - 1;
        long sum = whole(t * y_stride + n + 5);
        const long rank = adapter < 0 ? 0 : ranks[static_cast<size_t>(adapter * kParts + part)];
        for (long r = 0; r < rank; ++r) {
            long low = 0;
            for (long k = 0; k < s.inputs; ++k) {
                if (!is_kept(k)) continue;
                low += whole(t * x_stride + k + 1) * whole(((adapter * kParts + part) * s.rank + r) * s.inputs + k + 2);
            }
            sum += low * whole((adapter * s.rank + r) * outputs + n + 3);
        }
        const long most = type == cpu::FloatType::bfloat16 ? 256 : 2048;  // so far every whole number is one of the type's
        want.push_back(sum >= -most && sum <= most ? bits_of(sum, static_cast<cpu::LinearType>(type)) : ~0U);
    }
    cpu::add_lora({.y = y.data(), .x = x.data(), .a = a.data(), .b = b.data(), .ranks = ranks.data(), .slots = slots.data(),
                   .columns = columns, .tokens = s.tokens, .inputs = s.inputs, .outputs = outputs, .adapters = kAdapters,
                   .parts = kParts, .rank = s.rank, .stretches = 2, .y_stride = y_stride, .x_stride = x_stride,
                   .ranks_stride = kParts, .type = type});
    for (long i = 0; i < s.tokens * outputs; ++i) {
        const uint32_t expected = want[static_cast<size_t>(i)];
        if (expected == ~0U || y.bits(i / outputs * y_stride + i % outputs) == expected) continue;
        ++failures;
        std::printf("lora: type %d, %ld tokens, %ld inputs, %ld + %ld outputs, rank %ld: element %ld is wrong\n",
                    static_cast<int>(type), s.tokens, s.inputs, s.first, s.second, s.rank, i);
        return;
    }
}

}  // namespace

int lora_failures() {
    with_each_isa([] {
        for (const auto type : {cpu::FloatType::float32, cpu::FloatType::bfloat16, cpu::FloatType::float16}) {
            for (const long tokens : {1L, 2L, 9L, 23L, 90L}) {
                for (const long inputs : {1L, 32L, 77L}) {
                    sums_are_exact(type, {tokens, inputs, 1, 33, 1});
                    sums_are_exact(type, {tokens, inputs, 300, 64, 5});
                    sums_are_exact(type, {tokens, inputs, 35, 17, 70});
                }
            }
            sums_are_exact(type, {40, 1500, 700, 100, 16});  // enough for all threads
        }
    });
    return failures;
}
