// The mixture of experts with quantized weights: experts() by the products of quantized.h and float8.h.
#pragma once

#include "cpu/float8.h"
#include "cpu/moe.h"
#include "cpu/quantized.h"

namespace quintet::cpu {

// One stack: the call of its first expert, but for rows, and how many bytes on the next one's weights are.
struct QuantizedStack {
    bool float8;              // which of the calls is meant
    QuantizedCall whole;
    Float8Call floats;
    long weight_bytes, scale_bytes, zero_bytes, min_bytes;
};

struct QuantizedExpertsCall {
    ExpertsCall experts;      // without gate_up and down
    QuantizedStack gate_up, down;
};

// A token's result is a function of the token alone, as experts()' is.
void quantized_experts(const QuantizedExpertsCall& call);

}  // namespace quintet::cpu
