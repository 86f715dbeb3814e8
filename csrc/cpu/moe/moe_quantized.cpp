#include "cpu/moe/moe_quantized.h"

namespace quintet::cpu {

namespace {

void multiply(const void* erased, const SortedRows& sorted, void* out, const void* x, long stride, void* spare) {
    const ExpertsStack& stack = *static_cast<const ExpertsStack*>(erased);
    if (stack.float8) return float8_stack(stack.floats, sorted, out, x, stride, spare);
    quantized_stack(stack.whole, sorted, out, x, stride);
}

}  // namespace

void quantized_experts(const QuantizedExpertsCall& call) {
    experts_by(call.experts, {multiply, &call.gate_up}, {multiply, &call.down});
}

}  // namespace quintet::cpu
