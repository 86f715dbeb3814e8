// What hyper-connections compute around layers of several streams: see quintet/ops/streams.py for what each op gives.
// Tensors are addresses; sizes are in elements. A token's results are its own alone, and the same bits on every
// instruction set.
#pragma once

#include "cpu/elementwise/streams.h"

namespace quintet::cpu {

struct StreamGatesCall {
    float* out;           // [T, width]
    const float* logits;  // [T, width]
    const float* scale;   // of each kind
    const float* base;    // [width]
    long tokens, streams, width;  // width: streams, 2 streams or (2 + streams) streams
    float eps, magnitude, output_eps;
    long iterations;
};

void stream_gates(const StreamGatesCall& call);

struct MixedStreamsCall {
    void* out;                 // [T, width] of collapse_streams(), [T, streams width] of the others
    const void* x;             // [T, streams width], or repeat_streams()'s [T, width]
    const void* layer_output;  // [T, width]: expand_streams()'s
    const float* gates;        // a row of gate_stride each; stride 0: one for all
    long tokens, streams, width, gate_stride;
    bool matrices;             // gates have them, behind 2 streams
    FloatType type;
};

void collapse_streams(const MixedStreamsCall& call);
void expand_streams(const MixedStreamsCall& call);
void repeat_streams(const MixedStreamsCall& call);

}  // namespace quintet::cpu
