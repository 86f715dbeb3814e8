#include "cpu/moe/moe.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "cpu/elementwise/elementwise.h"
#include "cpu/kernels/moe.h"
#include "cpu/rows.h"

namespace quintet::cpu {

namespace {

// Throws for counts that do not fit; -> how many rows have an expert.
long owned_rows(const GroupedCall& call) {
    long sum = 0;
    for (long e = 0; e < call.experts; ++e) {
        if (call.counts[e] < 0) throw std::invalid_argument("expert " + std::to_string(e) + " has fewer than 0 rows");
        sum += call.counts[e];
    }
    if (sum > call.rows) {
        throw std::invalid_argument("experts have " + std::to_string(sum) + " rows, of " + std::to_string(call.rows));
    }
    return sum;
}

// Numbers then hold where (token, j) goes among rows sorted by expert, stably, or -1; and the experts' counts.
// -> how many rows there are.
long sort_by_expert(const ExpertsCall& call) {
    const long pairs = call.tokens * call.k;
    int32_t* const places = call.numbers;
    int32_t* const counts = places + pairs;
    int32_t* const next = counts + call.experts;
    std::fill(counts, counts + call.experts, 0);
    const auto known = [&](int32_t id) { return id >= 0 && id < call.experts; };
    for (long i = 0; i < pairs; ++i) {
        if (known(call.ids[i])) ++counts[call.ids[i]];
    }
    int32_t start = 0;
    for (long e = 0; e < call.experts; ++e) {
        next[e] = start;
        start += counts[e];
    }
    for (long i = 0; i < pairs; ++i) places[i] = known(call.ids[i]) ? next[call.ids[i]]++ : -1;
    return start;
}

// each(row, its expert) for the rows that are sorted by expert.
template <typename Each>
void for_owned(const ExpertsCall& call, long rows, long bytes, const Each& each) {
    const int32_t* const counts = call.numbers + call.tokens * call.k;
    for_rows(rows, bytes, [&](long first, long last) {
        long expert = 0, end = counts[0];
        for (long row = first; row < last; ++row) {
            while (row >= end) end += counts[++expert];
            each(row, expert);
        }
    });
}

// [T k]: the token of each sorted row; then [T k]: its adapter, as LoraCall has them.
int32_t* adapted_rows(const ExpertsCall& call) { return call.numbers + call.tokens * call.k + 2 * call.experts; }

void find_adapters(const ExpertsCall& call) {
    const ExpertsLora& lora = call.lora;
    if (!lora.slots) return;
    const long pairs = call.tokens * call.k;
    int32_t* const rows = adapted_rows(call);
    for (long i = 0; i < pairs; ++i) {
        const long row = call.numbers[i], slot = lora.slots[i / call.k];
        if (row < 0) continue;
        rows[row] = static_cast<int32_t>(i / call.k);
        const bool has_adapter = slot > 0 && slot <= lora.slot_count;
        rows[pairs + row] = has_adapter ? static_cast<int32_t>((slot - 1) * call.experts + call.ids[i] + 1) : 0;
    }
}

// Adds what the rows' adapters change to the outputs of the first product, or of the second, which are in `second`.
void add_adapters(const ExpertsCall& call, long rows, bool is_first) {
    const ExpertsLora& lora = call.lora;
    if (!lora.slots) return;
    const long outputs = is_first ? 2 * call.inner : call.hidden;
    add_lora({.y = call.second,
              .x = is_first ? call.x : call.first,
              .a = is_first ? lora.gate_up_a : lora.down_a,
              .b = is_first ? lora.gate_up_b : lora.down_b,
              .ranks = lora.ranks + (is_first ? 0 : lora.parts),
              .slots = adapted_rows(call) + call.tokens * call.k,
              .columns = lora.columns + (is_first ? 0 : 2 * lora.stretches),
              .tokens = rows,
              .inputs = is_first ? call.hidden : call.inner,
              .outputs = outputs,
              .adapters = lora.slot_count * call.experts,
              .parts = is_first ? lora.parts : 1,
              .rank = lora.rank,
              .stretches = is_first ? lora.stretches : 1,
              .y_stride = outputs,
              .x_stride = is_first ? call.x_stride : call.inner,
              .ranks_stride = lora.parts + 1,
              .type = static_cast<FloatType>(call.type),
              .x_rows = is_first ? adapted_rows(call) : nullptr});
}

// From second [rows, 2 inner] to first [rows, inner].
void activate(const ExpertsCall& call, long rows) {
    const FloatType type = static_cast<FloatType>(call.type);
    const long inner = call.inner, size = size_of(type);
    char *const out = static_cast<char*>(call.first), *const x = static_cast<char*>(call.second);
    if (!call.gate_up_bias) {
        return gated({out, x, x + inner * size, rows, inner, 2 * inner, 2 * inner, call.limit, type,
                      static_cast<Elementwise>(call.activation)});
    }
    const auto kernel = QUINTET_KERNELS(kMoe).clamped[type];
    const char* const bias = static_cast<const char*>(call.gate_up_bias);
    for_owned(call, rows, 3 * inner * size, [&](long row, long expert) {
        kernel({out + row * inner * size, x + 2 * row * inner * size, bias + 2 * expert * inner * size, inner, call.alpha,
                call.limit});
    });
}

void add_down_bias(const ExpertsCall& call, long rows) {
    if (!call.down_bias) return;
    const FloatType type = static_cast<FloatType>(call.type);
    const auto kernel = QUINTET_KERNELS(kMoe).biased[type];
    const long bytes = call.hidden * size_of(type);
    for_owned(call, rows, 2 * bytes, [&](long row, long expert) {
        char* const out = static_cast<char*>(call.second) + row * bytes;
        kernel({out, out, static_cast<const char*>(call.down_bias) + expert * bytes, call.hidden, 0.0F, 0.0F});
    });
}

void sum_by_token(const ExpertsCall& call, long size) {
    const auto sum = QUINTET_KERNELS(kMoe).sum[static_cast<FloatType>(call.type)];
    const long bytes = call.hidden * size;
    for_rows(call.tokens, (call.k + 1) * bytes, [&](long first, long last) {
        for (long t = first; t < last; ++t) {
            sum({static_cast<char*>(call.out) + t * bytes, call.second, call.weights + t * call.k,
                 call.numbers + t * call.k, call.k, call.hidden, call.hidden});
        }
    });
}

// One stack as pack_linear() left it, but for counts and rows.
void multiply(const void* stack, const SortedRows& sorted, void* out, const void* x, long stride, void* spare) {
    const GroupedCall& call = *static_cast<const GroupedCall*>(stack);
    const LinearType type = call.type;
    const long size = size_of(static_cast<FloatType>(type)), pair = linear_pair(type);
    const long blocks = (call.outputs + kLinearColumns - 1) / kLinearColumns;
    const long bytes = (call.inputs + pair - 1) / pair * pair * kLinearColumns * size;  // of a block
    const Gathered rows = gathered(sorted, x, stride * size, call.inputs * size, spare);
    const LinearMultiply kernel = linear_multiply(type);
    for_panels(sorted, call.inputs, call.outputs, [&](const Panel& panel, long block) {
        alignas(64) float sums[kLinearRows * kLinearColumns];
        const long column = block * kLinearColumns;
        kernel({static_cast<char*>(out) + (panel.first * call.outputs + column) * size,
                static_cast<const char*>(rows.x) + panel.first * rows.stride,
                static_cast<const char*>(call.weight) + (panel.matrix * blocks + block) * bytes, nullptr, call.outputs,
                rows.stride / size, panel.rows, std::min(kLinearColumns, call.outputs - column), call.inputs, sums});
    });
}

}  // namespace

void grouped_linear(const GroupedCall& call) {
    const long owned = owned_rows(call), row_bytes = call.outputs * size_of(static_cast<FloatType>(call.type));
    if (owned < call.rows) {
        char* const rest = static_cast<char*>(call.out) + owned * row_bytes;
        std::memset(rest, 0, static_cast<size_t>((call.rows - owned) * row_bytes));
    }
    multiply(&call, {call.counts, call.experts, owned}, call.out, call.x, call.x_stride, nullptr);
}

void experts(const ExpertsCall& call) {
    const long hidden = call.hidden, inner = call.inner;
    const GroupedCall gate_up{nullptr, nullptr, call.gate_up, nullptr, 0, call.experts, hidden, 2 * inner, 0, call.type};
    const GroupedCall down{nullptr, nullptr, call.down, nullptr, 0, call.experts, inner, hidden, 0, call.type};
    experts_by(call, {multiply, &gate_up}, {multiply, &down});
}

void experts_by(const ExpertsCall& call, const ExpertsProduct& gate_up, const ExpertsProduct& down) {
    const int32_t* const counts = call.numbers + call.tokens * call.k;
    const long rows = sort_by_expert(call);
    gate_up.multiply(gate_up.stack, {counts, call.experts, rows, call.numbers, call.tokens, call.k}, call.second, call.x,
                     call.x_stride, call.first);
    find_adapters(call);
    add_adapters(call, rows, true);
    activate(call, rows);
    down.multiply(down.stack, {counts, call.experts, rows}, call.second, call.first, call.inner, nullptr);
    add_adapters(call, rows, false);
    add_down_bias(call, rows);
    sum_by_token(call, size_of(static_cast<FloatType>(call.type)));
}

}  // namespace quintet::cpu
