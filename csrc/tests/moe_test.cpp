// The mixture of experts without Python: buffers of the exact size, for the sanitizers; exact numbers, for the sums.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <initializer_list>
#include <stdexcept>
#include <vector>

#include "common/pool.h"
#include "cpu/features.h"
#include "cpu/kernels/elementwise.h"
#include "cpu/moe/moe.h"
#include "tests/isas.h"
#include "tests/numbers.h"

namespace {

namespace cpu = quintet::cpu;

int failures = 0;

using Bytes = std::vector<uint8_t>;

Bytes numbers(long count, cpu::LinearType type, long seed) {
    const size_t size = type == cpu::kLinearFloat32 ? 4 : 2;
    Bytes bytes(static_cast<size_t>(count) * size);
    for (long i = 0; i < count; ++i) {
        const uint32_t bits = bits_of(whole(i + seed), type);
        __builtin_memcpy(bytes.data() + static_cast<size_t>(i) * size, &bits, size);
    }
    return bytes;
}

// Experts' weights [outputs, inputs], one after another.
Bytes packed(long experts, long outputs, long inputs, cpu::LinearType type, long seed) {
    const long size = type == cpu::kLinearFloat32 ? 4 : 2, pair = cpu::linear_pair(type);
    const long each = (outputs + cpu::kLinearColumns - 1) / cpu::kLinearColumns * cpu::kLinearColumns *
                      ((inputs + pair - 1) / pair) * pair * size;
    const Bytes plain = numbers(experts * outputs * inputs, type, seed);
    Bytes out(static_cast<size_t>(experts * each));
    for (long e = 0; e < experts; ++e) {
        cpu::pack_linear(out.data() + e * each, plain.data() + e * outputs * inputs * size, outputs, inputs, inputs, type);
    }
    return out;
}

struct Layer {
    cpu::LinearType type;
    long tokens, experts, k, hidden, inner;
};

// relu(gate) * up and its product, added up over a token's experts: whole numbers throughout.
long exact(const Layer& l, const std::vector<int32_t>& ids, long t, long column) {
    long total = 0;
    for (long j = 0; j < l.k; ++j) {
        const long e = ids[static_cast<size_t>(t * l.k + j)];
        if (e < 0 || e >= l.experts) continue;
        for (long i = 0; i < l.inner; ++i) {
            long gate = 0, up = 0;
            for (long d = 0; d < l.hidden; ++d) {
                gate += whole(t * l.hidden + d + 1) * whole((e * 2 * l.inner + i) * l.hidden + d + 2);
                up += whole(t * l.hidden + d + 1) * whole((e * 2 * l.inner + l.inner + i) * l.hidden + d + 2);
            }
            total += (j + 1) * std::max(0L, gate) * up * whole((e * l.hidden + column) * l.inner + i + 3);
        }
    }
    return total;
}

// With two adapters of ranks 0 to 3: of tokens that have one, the sanitizers watch the sums.
void adapters_keep_other_tokens(const Layer& l, cpu::ExpertsCall call) {
    constexpr long kSlots = 2, kRank = 3;
    const long adapters = kSlots * l.experts, row = l.hidden * (l.type == cpu::kLinearFloat32 ? 4 : 2);
    const Bytes gate_up_a = numbers(adapters * 2 * kRank * l.hidden, l.type, 5);
    const Bytes gate_up_b = numbers(adapters * kRank * 2 * l.inner, l.type, 6);
    const Bytes down_a = numbers(adapters * kRank * l.inner, l.type, 7);
    const Bytes down_b = numbers(adapters * kRank * l.hidden, l.type, 8);
    const int32_t inner = static_cast<int32_t>(l.inner);
    const int32_t columns[] = {0, inner, 1, inner, 0, static_cast<int32_t>(l.hidden)};
    std::vector<int32_t> ranks(static_cast<size_t>(3 * adapters)), slots(static_cast<size_t>(l.tokens));
    std::vector<int32_t> scratch(static_cast<size_t>(3 * l.tokens * l.k + 2 * l.experts));
    for (size_t i = 0; i < ranks.size(); ++i) ranks[i] = static_cast<int32_t>(i % (kRank + 1));
    for (size_t t = 0; t < slots.size(); ++t) slots[t] = static_cast<int32_t>((t + 1) % (kSlots + 1));
    Bytes out(static_cast<size_t>(l.tokens * row));
    const auto* const base = static_cast<const uint8_t*>(call.out);
    call.out = out.data();
    call.numbers = scratch.data();
    call.lora = {.slots = slots.data(),
                 .ranks = ranks.data(),
                 .columns = columns,
                 .gate_up_a = gate_up_a.data(),
                 .gate_up_b = gate_up_b.data(),
                 .down_a = down_a.data(),
                 .down_b = down_b.data(),
                 .slot_count = kSlots,
                 .parts = 2,
                 .rank = kRank,
                 .stretches = 2};
    cpu::experts(call);
    for (long t = 0; t < l.tokens; ++t) {
        if (slots[static_cast<size_t>(t)] != 0 || std::equal(base + t * row, base + (t + 1) * row, out.data() + t * row)) continue;
        ++failures;
        std::printf("experts: %ld tokens, %ld of %ld: token %ld without an adapter changes\n", l.tokens, l.k, l.experts, t);
        return;
    }
}

void experts_are_exact(const Layer& l) {
    const long size = l.type == cpu::kLinearFloat32 ? 4 : 2, pairs = l.tokens * l.k;
    const Bytes x = numbers(l.tokens * l.hidden, l.type, 1);
    const Bytes gate_up = packed(l.experts, 2 * l.inner, l.hidden, l.type, 2);
    const Bytes down = packed(l.experts, l.hidden, l.inner, l.type, 3);
    std::vector<float> weights(static_cast<size_t>(pairs));
    std::vector<int32_t> ids(weights.size()), scratch(static_cast<size_t>(pairs + 2 * l.experts));
    for (long i = 0; i < pairs; ++i) {
        weights[static_cast<size_t>(i)] = static_cast<float>(i % l.k + 1);
        ids[static_cast<size_t>(i)] = static_cast<int32_t>((i * 5 + i / 7) % (l.experts + 2) - 1);  // -1, or too large
    }
    Bytes out(static_cast<size_t>(l.tokens * l.hidden * size));
    Bytes first(static_cast<size_t>(pairs * std::max(l.hidden, l.inner) * size));
    Bytes second(static_cast<size_t>(pairs * std::max(l.hidden, 2 * l.inner) * size));
    cpu::ExpertsCall call{out.data(), x.data(), gate_up.data(), down.data(), weights.data(), ids.data(), first.data(),
                          second.data(), scratch.data(), l.tokens, l.experts, l.k, l.hidden, l.inner, l.hidden,
                          static_cast<int>(cpu::Elementwise::relu), l.type};
    cpu::experts(call);
    adapters_keep_other_tokens(l, call);
    if (l.type != cpu::kLinearFloat32) return;  // what is between is rounded: watched only
    for (long i = 0; i < l.tokens * l.hidden; ++i) {
        float got;
        __builtin_memcpy(&got, out.data() + i * size, sizeof got);
        const long want = exact(l, ids, i / l.hidden, i % l.hidden);
        if (got == static_cast<float>(want)) continue;
        ++failures;
        std::printf("experts: %ld tokens, %ld of %ld, %ld to %ld: element %ld is %g, not %ld\n", l.tokens, l.k, l.experts,
                    l.hidden, l.inner, i, static_cast<double>(got), want);
        return;
    }
}

void routes_are_in_order(cpu::FloatType type, long tokens, long experts, long k, long groups, long kept) {
    const Bytes logits = numbers(tokens * experts, static_cast<cpu::LinearType>(type), 4);
    const std::vector<float> bias(static_cast<size_t>(experts), 0.5F);
    for (const bool grouped : {false, true}) {
        std::vector<float> weights(static_cast<size_t>(tokens * k));
        std::vector<int32_t> ids(weights.size());
        (grouped ? cpu::route_grouped : cpu::route)({weights.data(), ids.data(), logits.data(),
                                                     grouped ? bias.data() : nullptr, tokens, experts, experts, k, groups,
                                                     kept, true, type});
        for (long i = 0; i < tokens * k; ++i) {
            const size_t at = static_cast<size_t>(i);
            const bool after = i % k == 0 || weights[at] < weights[at - 1] ||
                               (weights[at] == weights[at - 1] && (ids[at] > ids[at - 1] || grouped));
            if (ids[at] >= 0 && ids[at] < experts && after) continue;
            ++failures;
            std::printf("route: %ld tokens, %ld of %ld: place %ld is not in order\n", tokens, k, experts, i);
            return;
        }
    }
}

void counts_that_do_not_fit_are_refused() {
    const Bytes weight = packed(2, 3, 4, cpu::kLinearFloat32, 1), x = numbers(5 * 4, cpu::kLinearFloat32, 2);
    for (const std::vector<int32_t>& counts : {std::vector<int32_t>{3, 3}, std::vector<int32_t>{6, -1}}) {
        Bytes out(5 * 3 * 4);
        try {
            cpu::grouped_linear({out.data(), x.data(), weight.data(), counts.data(), 5, 2, 4, 3, 4, cpu::kLinearFloat32});
            ++failures;
            std::printf("grouped_linear: counts that do not fit are taken\n");
        } catch (const std::invalid_argument&) {
        }
    }
}

}  // namespace

int moe_failures() {
    for (const char* isa : kIsas) {
        try {
            cpu::choose_isa(isa);
        } catch (const std::invalid_argument&) {
            continue;
        }
        for (const int threads : {1, 3}) {
            quintet::set_pool_threads(threads);
            for (const auto type : {cpu::kLinearFloat32, cpu::kLinearBfloat16, cpu::kLinearFloat16}) {
                for (const Layer& l : {Layer{type, 1, 1, 1, 1, 1}, Layer{type, 0, 3, 2, 4, 4}, Layer{type, 5, 3, 2, 67, 2},
                                       Layer{type, 9, 4, 3, 6, 65}, Layer{type, 130, 2, 3, 16, 8}}) {
                    experts_are_exact(l);
                }
                routes_are_in_order(static_cast<cpu::FloatType>(type), 1, 5, 5, 1, 1);
                routes_are_in_order(static_cast<cpu::FloatType>(type), 90, 48, 3, 8, 3);
            }
        }
    }
    cpu::choose_isa(cpu::isa_name(cpu::isa()));
    counts_that_do_not_fit_are_refused();
    quintet::set_pool_threads(1);
    return failures;
}
