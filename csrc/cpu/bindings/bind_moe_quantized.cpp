// The mixture of experts with quantized weights, for Python.
#include <algorithm>
#include <climits>
#include <cstring>
#include <string>
#include <vector>

#include <nanobind/stl/vector.h>

#include "cpu/bindings/bind.h"
#include "cpu/bindings/bind_checks.h"
#include "cpu/graph.h"
#include "cpu/kernels/elementwise.h"
#include "cpu/moe/moe_quantized.h"

namespace nb = nanobind;

namespace quintet::cpu {

namespace {

// A stack as Python writes it: numbers and addresses, in this order.
enum Field { kFloat8, kScheme, kGroups, kSpan, kPowers, kTable, kWeight, kScales, kZeros, kMins, kWeightBytes, kScaleBytes,
             kZeroBytes, kMinBytes, kFields };

void check_whole(const std::vector<long>& f, long inputs) {
    const long groups = f[kGroups];
    expect(f[kScheme] >= 0 && f[kScheme] < kQuantizedSchemes, "a scheme is 0 to " + std::to_string(kQuantizedSchemes - 1));
    if (f[kScheme] == kW8a8) {
        expect(groups == 1 && inputs <= kMostInputs && !f[kZeros] && !f[kMins] && !f[kPowers], "W8A8 has one group");
    } else {
        const long group = groups > 0 ? inputs / groups : 0;
        expect(groups > 0 && group * groups == inputs && group % kRowPadding == 0 && group <= kLargestGroup,
               "groups are of 16, 32, .. inputs");
        expect(f[kSpan] >= 0 && f[kSpan] % group == 0, "a row's scales are of whole groups");
    }
    expect(looked_up(static_cast<QuantizedScheme>(f[kScheme])) == (f[kTable] != 0), "a table is what values are looked up in");
}

ExpertsStack stack_of(const std::vector<long>& f, LinearType type, long inputs, long outputs) {
    expect(f.size() == kFields, "a stack has " + std::to_string(kFields) + " numbers");
    const auto at = [&](Field field) { return reinterpret_cast<const void*>(static_cast<uintptr_t>(f[field])); };
    ExpertsStack stack{f[kFloat8] != 0, {}, {}};
    if (stack.float8) {
        expect(f[kScheme] >= 0 && f[kScheme] < kFloat8Formats, "a format is 0 (e4m3fn) or 1 (e5m2)");
        expect(f[kGroups] >= 1 && (f[kGroups] % 2 == 0 || f[kGroups] == inputs), "a group is even, or all");
        stack.floats = {{nullptr, nullptr, at(kWeight), static_cast<const float*>(at(kScales)), nullptr, 0, inputs, outputs,
                         f[kGroups], inputs, type, static_cast<Float8Format>(f[kScheme])},
                        f[kWeightBytes], f[kScaleBytes]};
        return stack;
    }
    check_whole(f, inputs);
    QuantizedCall& first = stack.whole.first;
    first = {nullptr, nullptr, at(kWeight), at(kScales), nullptr, 0, inputs, outputs, f[kGroups], inputs, type,
             static_cast<QuantizedScheme>(f[kScheme])};
    first.zeros = at(kZeros);
    first.mins = at(kMins);
    first.span = f[kSpan];
    first.powers = f[kPowers] != 0;
    if (f[kTable]) std::memcpy(first.table, at(kTable), sizeof first.table);
    stack.whole.weight_bytes = f[kWeightBytes];
    stack.whole.scale_bytes = f[kScaleBytes];
    stack.whole.zero_bytes = f[kZeroBytes];
    stack.whole.min_bytes = f[kMinBytes];
    return stack;
}

void serve(int kind, uintptr_t out, uintptr_t x, long x_stride, const std::vector<long>& gate_up,
           const std::vector<long>& down, uintptr_t weights, uintptr_t ids, uintptr_t first, uintptr_t second,
           uintptr_t numbers, long tokens, long count, long k, long hidden, long inner, int activation,
           uintptr_t gate_up_bias, uintptr_t down_bias, float alpha, float limit, const std::vector<long>& lora) {
    expect(tokens >= 0 && tokens <= INT32_MAX && count >= 1 && count <= INT32_MAX, "tokens and experts are counted in 32 bits");
    expect(k >= 1 && k <= INT32_MAX / std::max(1L, tokens), "rows are counted in 32 bits");
    expect(hidden >= 1 && hidden <= INT32_MAX && inner >= 1 && inner <= INT32_MAX / 2, "experts have features");
    expect(activation >= 0 && activation < kActivations, "no such activation");
    expect(tokens <= 1 || x_stride >= hidden, "x has rows of its features");
    const LinearType type = linear_type(kind);
    const ExpertsCall plain{reinterpret_cast<void*>(out), reinterpret_cast<const void*>(x), nullptr, nullptr,
                            reinterpret_cast<const float*>(weights), reinterpret_cast<const int32_t*>(ids),
                            reinterpret_cast<void*>(first), reinterpret_cast<void*>(second),
                            reinterpret_cast<int32_t*>(numbers), tokens, count, k, hidden, inner, x_stride, activation, type,
                            reinterpret_cast<const void*>(gate_up_bias), reinterpret_cast<const void*>(down_bias), alpha, limit,
                            experts_lora(lora, count)};
    const QuantizedExpertsCall call{plain, stack_of(gate_up, type, hidden, 2 * inner), stack_of(down, type, inner, hidden)};
    const nb::gil_scoped_release released;
    submit(quantized_experts, call);
}

}  // namespace

void bind_moe_quantized(nb::module_& m) {
    m.def("quantized_experts", &serve, nb::arg("kind"), nb::arg("out"), nb::arg("x"), nb::arg("x_stride"),
          nb::arg("gate_up"), nb::arg("down"), nb::arg("weights"), nb::arg("ids"), nb::arg("first"), nb::arg("second"),
          nb::arg("numbers"), nb::arg("tokens"), nb::arg("experts"), nb::arg("k"), nb::arg("hidden"), nb::arg("inner"),
          nb::arg("activation"), nb::arg("gate_up_bias") = 0, nb::arg("down_bias") = 0, nb::arg("alpha") = 0.0F,
          nb::arg("limit") = 0.0F, nb::arg("lora") = std::vector<long>{},
          "experts() with quantized stacks, each a list: whether its numbers are 8-bit floats; scheme (or format), groups (or "
          "inputs of a group), span, powers, table; addresses of weight, scales, zeros and mins; bytes from expert to expert "
          "of these four.");
}

}  // namespace quintet::cpu
