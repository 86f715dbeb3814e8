#include "cpu/moe.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "common/share.h"
#include "cpu/elementwise.h"
#include "cpu/kernels/moe.h"
#include "cpu/rows.h"

namespace quintet::cpu {

namespace {

// Rows of one expert that are computed at once.
struct Panel {
    long expert, first, rows;
};

// Throws for counts that do not fit; -> how many rows have an expert.
long owned_rows(const GroupedCall& call, long* active) {
    long sum = 0;
    *active = 0;
    for (long e = 0; e < call.experts; ++e) {
        if (call.counts[e] < 0) throw std::invalid_argument("expert " + std::to_string(e) + " has fewer than 0 rows");
        sum += call.counts[e];
        *active += call.counts[e] > 0;
    }
    if (sum > call.rows) {
        throw std::invalid_argument("experts have " + std::to_string(sum) + " rows, of " + std::to_string(call.rows));
    }
    return sum;
}

// This thread's list, valid until the next call. Experts without rows are not in it.
const std::vector<Panel>& panels_of(const GroupedCall& call, long blocks) {
    thread_local std::vector<Panel> panels;
    panels.clear();
    long first = 0;
    for (long e = 0; e < call.experts; ++e) {
        const long rows = call.counts[e];
        if (rows == 0) continue;
        const long count = linear_panels(rows, blocks);
        for (long i = 0; i < count; ++i) {
            const long start = rows * i / count, end = rows * (i + 1) / count;
            panels.push_back({e, first + start, end - start});
        }
        first += rows;
    }
    return panels;
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

void gather_rows(const ExpertsCall& call, long size) {
    const long bytes = call.hidden * size;
    for_rows(call.tokens * call.k, 2 * bytes, [&](long first, long last) {
        for (long i = first; i < last; ++i) {
            if (call.numbers[i] < 0) continue;
            std::memcpy(static_cast<char*>(call.first) + call.numbers[i] * bytes,
                        static_cast<const char*>(call.x) + i / call.k * call.x_stride * size, static_cast<size_t>(bytes));
        }
    });
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

// From second [rows, 2 inner] to first [rows, inner].
void activate(const ExpertsCall& call, long rows) {
    const FloatType type = static_cast<FloatType>(call.type);
    const long inner = call.inner, size = size_of(type);
    char *const out = static_cast<char*>(call.first), *const x = static_cast<char*>(call.second);
    if (!call.gate_up_bias) {
        return gated({out, x, x + inner * size, rows, inner, 2 * inner, 2 * inner, 0.0F, type,
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

}  // namespace

void grouped_linear(const GroupedCall& call) {
    const LinearType type = call.type;
    const long size = size_of(static_cast<FloatType>(type)), pair = linear_pair(type);
    const long blocks = (call.outputs + kLinearColumns - 1) / kLinearColumns;
    const long bytes = (call.inputs + pair - 1) / pair * pair * kLinearColumns * size;  // of a block
    long active = 0;
    const long owned = owned_rows(call, &active), row_bytes = call.outputs * size;
    if (owned < call.rows) {
        char* const rest = static_cast<char*>(call.out) + owned * row_bytes;
        std::memset(rest, 0, static_cast<size_t>((call.rows - owned) * row_bytes));
    }
    const std::vector<Panel>& panels = panels_of(call, blocks * std::max(1L, active));
    const LinearMultiply multiply = linear_multiply(type);
    const auto run = [&](long item) {  // a panel's blocks one after another, as they lie
        alignas(64) float sums[kLinearRows * kLinearColumns];
        const Panel& panel = panels[static_cast<size_t>(item / blocks)];
        const long block = item % blocks, column = block * kLinearColumns;
        multiply({static_cast<char*>(call.out) + (panel.first * call.outputs + column) * size,
                  static_cast<const char*>(call.x) + panel.first * call.x_stride * size,
                  static_cast<const char*>(call.weight) + (panel.expert * blocks + block) * bytes, nullptr, call.outputs,
                  call.x_stride, panel.rows, std::min(kLinearColumns, call.outputs - column), call.inputs, sums});
    };
    const long items = static_cast<long>(panels.size()) * blocks;
    share_out(items, linear_parts(items, owned * call.inputs * call.outputs), run);
}

void experts(const ExpertsCall& call) {
    const long pairs = call.tokens * call.k, inner = call.inner;
    const FloatType type = static_cast<FloatType>(call.type);
    const int32_t* const counts = call.numbers + pairs;
    const long rows = sort_by_expert(call);
    gather_rows(call, size_of(type));
    grouped_linear({call.second, call.first, call.gate_up, counts, rows, call.experts, call.hidden, 2 * inner, call.hidden,
                    call.type});
    activate(call, rows);
    grouped_linear({call.second, call.first, call.down, counts, rows, call.experts, inner, call.hidden, inner, call.type});
    add_down_bias(call, rows);
    sum_by_token(call, size_of(type));
}

void experts_by(const ExpertsCall& call, const ExpertsProduct& gate_up, const ExpertsProduct& down) {
    const long pairs = call.tokens * call.k, inner = call.inner;
    const FloatType type = static_cast<FloatType>(call.type);
    const int32_t* const counts = call.numbers + pairs;
    const auto multiply = [&](const ExpertsProduct& product, long inputs, long outputs) {
        long first = 0;
        for (long e = 0; e < call.experts; ++e) {
            if (counts[e] == 0) continue;
            product.multiply(product.stack, e, static_cast<char*>(call.second) + first * outputs * size_of(type),
                             static_cast<const char*>(call.first) + first * inputs * size_of(type), counts[e]);
            first += counts[e];
        }
    };
    const long rows = sort_by_expert(call);
    gather_rows(call, size_of(type));
    multiply(gate_up, call.hidden, 2 * inner);
    activate(call, rows);
    multiply(down, inner, call.hidden);
    add_down_bias(call, rows);
    sum_by_token(call, size_of(type));
}

}  // namespace quintet::cpu
