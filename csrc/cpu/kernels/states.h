// What carries one state per request from token to token, one object for each instruction set.
//
// These files are compiled with flags that the processor at hand may not obey: see ceiling.h for what they may include.
// A state advances token by token, and each number of it in one order: where a prompt is cut changes no bit.
#pragma once

#include "cpu/kernels/floats.h"

namespace quintet::cpu {

constexpr long kMostTaps = 8;  // of a convolution
constexpr long kMostWidth = 256;  // numbers that a channel of a selective scan keeps, or a row of a state with drafts
constexpr long kMostDrafts = 16;  // of a request in a step

// Whose tokens these are, and where each request's state lies: row r has the tokens
// query_start_loc[r]..query_start_loc[r + 1] - 1, reads its state from unit block_table[r * columns], 0 being zeros,
// and writes it to unit block_table[r * columns + 1], another one.
//
// With drafts, a unit has room for what so many tokens do to a state, and a row has two more numbers: tokens that unit
// block_table[r * columns] keeps and that come before the step's, and tokens at the end of the step's that the state does
// not take in: the unit that is written keeps what they do. For state spaces and the delta rule these are, behind the state,
// [drafts, heads, 1 + rows + width] numbers: decay, given and key of state = decay * state + given key'.
struct StateRows {
    const int* query_start_loc;
    const int* block_table;
    long requests, columns, units;
    long drafts;  // 0: rows have two numbers
};

struct ConvCall {
    void* out;           // [tokens, channels]
    const void* x;       // [tokens, channels]
    const void* gates;   // [tokens, 2 channels]: factors before, then after; or null
    const void* weight;  // [channels, taps]
    const void* bias;    // [channels], or null
    void* state;         // [units, channels, taps - 1 + drafts]
    long x_stride, gate_stride, channels, taps;
    bool silu;
    FloatType type;
    StateRows rows;
};

struct SpaceCall {
    float* out;          // [tokens, heads, dim]
    const void* x;       // [tokens, heads, dim]
    const void* dt;      // [tokens, heads], or null: 1
    const void* into;    // [tokens, groups, width]
    const void* out_of;  // [tokens, groups, width]
    const float *a_log, *dt_bias, *skip;  // [heads]; the last may be null, and the bias where dt is
    float* steps;        // [2, tokens, heads]: what is made of dt, and what of a state stays
    float* sides;        // [2, tokens, groups, width]: what goes in and what brings out, in float32
    float* state;        // [units, heads, dim, width], and what drafts do to it
    long x_stride, dt_stride, into_stride, out_of_stride;
    long tokens, heads, groups, dim, width;
    long unit;           // numbers from one unit to the next
    float least;
    FloatType type;
    StateRows rows;
    bool past_caches = false;  // whether states are written past the caches: state_space() says
};

struct SelectiveCall {
    float* out;          // [tokens, channels]
    const void* x;       // [tokens, channels]
    const void* dt;      // [tokens, channels]
    const void* into;    // [tokens, width]
    const void* out_of;  // [tokens, width]
    const float* a_log;  // [channels, width]
    const float *dt_bias, *skip;  // [channels]; the last may be null
    float* sides;        // [2, tokens, width]: what goes in and what brings out, in float32
    float* state;        // [units, channels, width]
    long x_stride, dt_stride, into_stride, out_of_stride;
    long tokens, channels, width;
    FloatType type;
    StateRows rows;
};

struct DeltaCall {
    float* out;           // [tokens, heads, values]
    const void* q;        // [tokens, groups, width]
    const void* k;        // [tokens, groups, width]
    const void* v;        // [tokens, heads, values]
    const void* forget;   // [tokens, heads], or by_channel [tokens, heads, width]
    const void* learn;    // [tokens, heads]
    const float *a_log, *dt_bias;  // [heads]; dt_bias by_channel [heads, width]
    float* steps;         // [tokens, heads], the rate of learning; then what of a state stays, as large as forget
    float* units;         // [2, tokens, groups, width]: q and k of length 1, q divided by the root of the width
    float* state;         // [units, heads, values, width], and what drafts do to it
    long q_stride, k_stride, v_stride, forget_stride, learn_stride;
    long tokens, heads, groups, values, width;
    long unit;            // numbers from one unit to the next
    bool by_channel;      // each number of a key has a decay; there is no room for drafts
    float lower_bound;    // of the decays' logarithms, below 0; 0: there is none
    float beta_scale;     // what sigmoid(learn) is multiplied by
    FloatType type;
    StateRows rows;
};

struct GatedNormCall {
    void* out;           // [tokens, pieces, width]
    const float* x;      // [tokens, pieces, width]
    const void* gate;    // [tokens, pieces * width]
    const void* weight;  // [weights, width], or null: there is no norm
    long gate_stride, tokens, pieces, width, weights;  // weights: 1 or pieces
    float eps;
    bool after;          // the gate comes after the norm
    FloatType type;
};

struct SigmoidCall {
    void* out;         // [rows, width]
    const void* x;     // [rows, width]
    const void* gate;  // [rows, width]
    long x_stride, gate_stride, rows, width;
    FloatType type;
};

struct StateKernels {  // each for units first..last-1
    OfTypes<void (*)(const ConvCall& call, long first, long last)> conv;    // request * blocks + block, of kConvBlock channels
    OfTypes<void (*)(const SpaceCall& call, long first, long last)> moves;  // tokens: fills steps and sides
    OfTypes<void (*)(const SpaceCall& call, long first, long last)> space;  // request * heads + head
    OfTypes<void (*)(const SelectiveCall& call, long first, long last)> sides;  // tokens: fills sides
    OfTypes<void (*)(const SelectiveCall& call, long first, long last)> selective;  // as those of conv
    OfTypes<void (*)(const DeltaCall& call, long first, long last)> rates;  // tokens: fills steps
    OfTypes<void (*)(const DeltaCall& call, long first, long last)> unit;   // token * groups + group
    OfTypes<void (*)(const DeltaCall& call, long first, long last)> delta;  // request * heads + head
    OfTypes<void (*)(const GatedNormCall& call, long first, long last)> norm;  // token * pieces + piece
    OfTypes<void (*)(const SigmoidCall& call, long first, long last)> sigmoid;  // rows
};

constexpr long kConvBlock = 64;  // channels: whole vectors of every instruction set

extern const StateKernels kStatesBaseline;
#if defined(__x86_64__)
extern const StateKernels kStatesAvx2;
extern const StateKernels kStatesAvx512;
#endif

}  // namespace quintet::cpu
