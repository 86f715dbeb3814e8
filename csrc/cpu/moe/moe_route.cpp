// Who serves a token: the largest of a row of logits.
#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include "common/pool.h"
#include "cpu/quantized/halves.h"
#include "cpu/moe/moe.h"

namespace quintet::cpu {

namespace {

constexpr long kThreadLogits = 2L << 10;  // that are worth another thread's waking: about 10 us

struct Row {  // one token's, while it is routed
    std::vector<float> logits, values, ranks;
    std::vector<uint64_t> keys, groups;
};

void load(const RouteCall& call, long token, std::vector<float>& out) {
    out.resize(static_cast<size_t>(call.experts));
    if (call.type == FloatType::float32) {
        std::copy_n(static_cast<const float*>(call.logits) + token * call.stride, call.experts, out.begin());
        return;
    }
    const uint16_t* const row = static_cast<const uint16_t*>(call.logits) + token * call.stride;
    std::transform(row, row + call.experts, out.begin(), [&](uint16_t bits) { return widened(bits, call.type); });
}

// A larger number for a larger x, and for the smaller id of equal ones. NaN is above all, as where torch sorts.
uint64_t key_of(float x, size_t id) {
    const uint32_t bits = std::bit_cast<uint32_t>(x == 0.0F ? 0.0F : x);  // 0 equals -0
    const uint32_t order = std::isnan(x) ? UINT32_MAX : bits >> 31 ? ~bits : bits | 0x80000000;
    return static_cast<uint64_t>(order) << 32 | (UINT32_MAX - static_cast<uint32_t>(id));
}

size_t id_of(uint64_t key) { return UINT32_MAX - static_cast<uint32_t>(key); }

// The k largest are then the first keys, in order.
void select(const std::vector<float>& x, long k, std::vector<uint64_t>& keys) {
    keys.resize(x.size());
    for (size_t i = 0; i < x.size(); ++i) keys[i] = key_of(x[i], i);
    std::partial_sort(keys.begin(), keys.begin() + k, keys.end(), std::greater<>());
}

void softmax(const std::vector<float>& x, std::vector<float>& out) {
    const float largest = *std::max_element(x.begin(), x.end());
    out.resize(x.size());
    float sum = 0.0F;
    for (size_t i = 0; i < x.size(); ++i) sum += out[i] = std::exp(x[i] - largest);
    for (float& each : out) each /= sum;
}

// Ranks outside of the `kept` groups whose two largest add up to the most become those of nobody; with `one`, whose
// largest is the most.
void keep_groups(const RouteCall& call, Row& row, bool one) {
    const long each = call.experts / call.groups;
    std::vector<float>& sums = row.logits;  // no longer needed
    sums.resize(static_cast<size_t>(call.groups));
    for (long g = 0; g < call.groups; ++g) {
        const float* const ranks = row.ranks.data() + g * each;
        uint64_t most = 0, second = 0;
        for (long i = 0; i < each; ++i) {
            const uint64_t key = key_of(ranks[i], static_cast<size_t>(i));
            second = std::max(second, std::min(most, key));
            most = std::max(most, key);
        }
        sums[static_cast<size_t>(g)] = one ? ranks[id_of(most)] : ranks[id_of(most)] + ranks[id_of(second)];
    }
    select(sums, call.kept, row.groups);
    for (auto key = row.groups.begin() + call.kept; key != row.groups.end(); ++key) {
        std::fill_n(row.ranks.begin() + static_cast<long>(id_of(*key)) * each, each, -std::numeric_limits<float>::infinity());
    }
}

void by_softmax(const RouteCall& call, Row& row) {
    softmax(row.logits, row.values);
    select(row.logits, call.k, row.keys);
}

void by_sigmoid(const RouteCall& call, Row& row) {
    row.values.resize(row.logits.size());
    row.ranks.resize(row.logits.size());
    for (size_t i = 0; i < row.logits.size(); ++i) {
        row.values[i] = 1.0F / (1.0F + std::exp(-row.logits[i]));
        row.ranks[i] = row.values[i] + call.bias[i];
    }
    if (call.kept < call.groups) keep_groups(call, row, false);
    select(row.ranks, call.k, row.keys);
}

void by_limits(const RouteCall& call, Row& row) {
    softmax(row.logits, row.values);
    row.ranks.resize(row.values.size());
    for (size_t i = 0; i < row.values.size(); ++i) row.ranks[i] = row.values[i] + call.bias[i];
    if (call.kept < call.groups) keep_groups(call, row, true);
    select(row.ranks, call.k, row.keys);
}

// row.keys has them in order, and row.values their weights.
void one_by_one(const RouteCall& call, Row& row) {
    row.keys.resize(static_cast<size_t>(call.k));
    row.values.resize(row.logits.size());
    row.ranks = row.logits;  // of those that are left
    for (uint64_t& best : row.keys) {
        best = 0;
        for (size_t i = 0; i < row.ranks.size(); ++i) best = std::max(best, key_of(row.ranks[i], i));
        const size_t id = id_of(best);
        const float most = row.ranks[id];
        float sum = 0.0F;
        for (const float x : row.ranks) {
            const bool far = (most - x) / std::max(std::abs(x), most) > call.margin;
            if (!far) sum += std::exp(x - most);
        }
        row.values[id] = 1.0F / sum;
        row.ranks[id] = -std::numeric_limits<float>::infinity();
    }
}

void write(const RouteCall& call, long token, const Row& row) {
    float* const weights = call.weights + token * call.k;
    int32_t* const ids = call.ids + token * call.k;
    float sum = 0.0F;
    for (long j = 0; j < call.k; ++j) {
        const size_t id = id_of(row.keys[static_cast<size_t>(j)]);
        ids[j] = static_cast<int32_t>(id);
        sum += weights[j] = row.values[id];
    }
    if (!call.renormalize) return;
    for (long j = 0; j < call.k; ++j) weights[j] /= sum;
}

void for_tokens(const RouteCall& call, void (*choose)(const RouteCall& call, Row& row)) {
    parallel_for(call.tokens, std::max(1L, kThreadLogits / call.experts), [&](long first, long last) {
        thread_local Row row;
        for (long token = first; token < last; ++token) {
            load(call, token, row.logits);
            choose(call, row);
            write(call, token, row);
        }
    });
}

}  // namespace

void route(const RouteCall& call) { for_tokens(call, by_softmax); }
void route_grouped(const RouteCall& call) { for_tokens(call, by_sigmoid); }
void route_limited(const RouteCall& call) { for_tokens(call, by_limits); }
void route_sparse(const RouteCall& call) { for_tokens(call, one_by_one); }

}  // namespace quintet::cpu
