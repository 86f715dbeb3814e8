// The mixture of experts with quantized weights: experts() by the products of quantized.h and float8.h.
#pragma once

#include "cpu/quantized/float8.h"
#include "cpu/moe/moe.h"
#include "cpu/quantized/quantized.h"

namespace quintet::cpu {

// One of both.
struct ExpertsStack {
    bool float8;  // which is meant
    QuantizedStack whole;
    Float8Stack floats;
};

struct QuantizedExpertsCall {
    ExpertsCall experts;  // without gate_up and down
    ExpertsStack gate_up, down;
};

// A token's result is a function of the token alone, as experts()' is.
void quantized_experts(const QuantizedExpertsCall& call);

}  // namespace quintet::cpu
