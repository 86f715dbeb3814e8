// What carries one state per request from token to token. Tensors are addresses; strides, of tokens, are in elements.
#pragma once

#include "cpu/kernels/states.h"

namespace quintet::cpu {

// Threads share requests and heads, or channels; a request's result depends on neither.
void short_conv(const ConvCall& call);
void state_space(const SpaceCall& call);
void selective_scan(const SelectiveCall& call);
void delta_rule(const DeltaCall& call);
void gated_norm(const GatedNormCall& call);
void sigmoid_gate(const SigmoidCall& call);

}  // namespace quintet::cpu
