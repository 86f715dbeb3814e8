#include "cpu/moe_quantized.h"

namespace quintet::cpu {

namespace {

template <typename T>
const T* further(const T* at, long bytes) {
    return at ? reinterpret_cast<const T*>(reinterpret_cast<const char*>(at) + bytes) : nullptr;
}

const void* further(const void* at, long bytes) { return further(static_cast<const char*>(at), bytes); }

void multiply(const void* erased, long expert, void* out, const void* x, long rows) {
    const QuantizedStack& stack = *static_cast<const QuantizedStack*>(erased);
    if (stack.float8) {
        Float8Call call = stack.floats;
        call.out = out;
        call.x = x;
        call.tokens = rows;
        call.weight = further(call.weight, expert * stack.weight_bytes);
        call.scales = further(call.scales, expert * stack.scale_bytes);
        return float8(call);
    }
    QuantizedCall call = stack.whole;
    call.out = out;
    call.x = x;
    call.tokens = rows;
    call.weight = further(call.weight, expert * stack.weight_bytes);
    call.scales = further(call.scales, expert * stack.scale_bytes);
    call.zeros = further(call.zeros, expert * stack.zero_bytes);
    call.mins = further(call.mins, expert * stack.min_bytes);
    quantized(call);
}

}  // namespace

void quantized_experts(const QuantizedExpertsCall& call) {
    experts_by(call.experts, {multiply, &call.gate_up}, {multiply, &call.down});
}

}  // namespace quintet::cpu
