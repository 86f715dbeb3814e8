// The mixture of experts: see quintet/ops/moe.py for what each op gives. Tensors are addresses; sizes and strides are in
// elements.
//
// A token's result is a function of the token alone: not of others, of how many an expert has, or of threads.
#pragma once

#include <cstdint>

#include "cpu/kernels/floats.h"
#include "cpu/linear/linear.h"
#include "cpu/linear/lora.h"
#include "cpu/linear/panels.h"

namespace quintet::cpu {

struct RouteCall {
    float* weights;      // [T, k]
    int32_t* ids;        // [T, k]
    const void* logits;  // [T, experts]
    const float* bias;   // [experts]: route_grouped()'s; null for route()
    long tokens, experts, stride, k;
    long groups, kept;   // route_grouped()'s
    bool renormalize;
    FloatType type;
    float margin = 0.0F;  // route_sparse()'s
};

void route(const RouteCall& call);          // by softmax
void route_grouped(const RouteCall& call);  // by sigmoid
void route_limited(const RouteCall& call);  // by softmax, out of groups that rank by their largest

void route_sparse(const RouteCall& call);   // one after the other, each by softmax of those that are left and near it

struct LocalCall {
    int32_t* out;           // [T, k]
    const int32_t* ids;     // [T, k]
    const void* x;          // [T, >= seen]
    const int32_t* places;  // [experts, columns]
    long tokens, k, experts, columns;
    long x_stride;          // from token to token
    long seen;              // numbers of x that choose a column
    FloatType type;         // of x
};

void local_experts(const LocalCall& call);

struct CountCall {
    int32_t* loads;      // [experts]: added to
    const int32_t* ids;  // [count]
    long count, experts;
};

void count_experts(const CountCall& call);

struct GroupedCall {
    void* out;              // [rows, outputs]
    const void* x;          // [rows, inputs]
    const void* weight;     // of each expert as pack_linear() left it, one after the other
    const int32_t* counts;  // [experts]
    long rows, experts, inputs, outputs;
    long x_stride;          // from row to row
    LinearType type;
};

// Throws std::invalid_argument for counts that are below 0, or more than there are rows.
void grouped_linear(const GroupedCall& call);

// Adapters of experts, beside both products: number s experts + e is that of expert e in slot s.
struct ExpertsLora {
    const int32_t* slots = nullptr;       // [T]: 1 + a token's slot, or 0; null: there are no adapters
    const int32_t* ranks = nullptr;       // [adapters, parts + 1]: rows of gate_up's parts, and of down
    const int32_t* columns = nullptr;     // [stretches, 2] of gate_up's outputs, as in LoraCall, and those of down
    const void *gate_up_a = nullptr, *gate_up_b = nullptr;  // [adapters, parts, rank, hidden], [adapters, rank, 2 inner]
    const void *down_a = nullptr, *down_b = nullptr;        // [adapters, rank, inner], [adapters, rank, hidden]
    long slot_count = 0, parts = 0, rank = 0, stretches = 0;
};

struct ExpertsCall {
    void* out;                      // [T, hidden]
    const void* x;                  // [T, hidden]
    const void *gate_up, *down;     // packed [experts, 2 inner, hidden] and [experts, hidden, inner]
    const float* weights;           // [T, k]
    const int32_t* ids;             // [T, k]
    void* first;                    // scratch [T k, max(hidden, inner)]
    void* second;                   // scratch [T k, max(hidden, 2 inner)]
    int32_t* numbers;               // scratch [T k + 2 experts]; with adapters 2 T k more
    long tokens, experts, k, hidden, inner;
    long x_stride;                  // from token to token
    int activation;                 // below kActivations of kernels/elementwise.h
    LinearType type;
    // [experts, 2 inner] and [experts, hidden]; where they are, outputs of gate and up take turns, and BiasedRow says
    // what comes out of them
    const void *gate_up_bias = nullptr, *down_bias = nullptr;
    float alpha = 0.0F, limit = 0.0F;
    ExpertsLora lora = {};
};

void experts(const ExpertsCall& call);

// The products of one stack, [rows, inputs] -> [rows, outputs] at out, both sorted by expert.
struct ExpertsProduct {
    // x is as sorted.places have it, rows `stride` elements apart; `spare` holds [rows, inputs].
    void (*multiply)(const void* stack, const SortedRows& sorted, void* out, const void* x, long stride, void* spare);
    const void* stack;
};

// experts() whose products are these, instead of those with call's gate_up and down.
void experts_by(const ExpertsCall& call, const ExpertsProduct& gate_up, const ExpertsProduct& down);

}  // namespace quintet::cpu
