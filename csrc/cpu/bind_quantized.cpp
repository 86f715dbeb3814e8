// Quantized products for Python.
#include <stdexcept>
#include <string>

#include "cpu/bind.h"
#include "cpu/graph.h"
#include "cpu/quantized.h"

namespace nb = nanobind;

namespace quintet::cpu {

namespace {

void expect(bool holds, const std::string& what) {
    if (!holds) throw std::invalid_argument(what);
}

LinearType type_of(int kind) {
    expect(kind >= 0 && kind < kLinearTypes,
           "kind must be 0 (float32), 1 (bfloat16) or 2 (float16), not " + std::to_string(kind));
    return static_cast<LinearType>(kind);
}

QuantizedScheme scheme_of(int scheme, long inputs, long outputs, long groups) {
    expect(scheme >= 0 && scheme < kQuantizedSchemes, "scheme must be 0 to 3, not " + std::to_string(scheme));
    expect(inputs >= 1 && outputs >= 1 && groups >= 1, "a weight has inputs, outputs and groups");
    if (scheme == kW8a8) {
        expect(groups == 1 && inputs <= kMostInputs,
               "W8A8 has one group, of " + std::to_string(kMostInputs) + " inputs at most");
    } else {
        const long group = inputs / groups;
        expect(group * groups == inputs && group % kRowPadding == 0 && group <= kLargestGroup,
               std::to_string(inputs) + " inputs do not make " + std::to_string(groups) + " groups of 16, 32, .. " +
                   std::to_string(kLargestGroup));
    }
    return static_cast<QuantizedScheme>(scheme);
}

void multiply(int scheme, int kind, uintptr_t out, uintptr_t x, long x_stride, uintptr_t weight, uintptr_t scales,
              uintptr_t bias, long tokens, long inputs, long outputs, long groups) {
    const QuantizedCall call{reinterpret_cast<void*>(out), reinterpret_cast<const void*>(x),
                             reinterpret_cast<const void*>(weight), reinterpret_cast<const void*>(scales),
                             reinterpret_cast<const void*>(bias), tokens, inputs, outputs, groups, x_stride, type_of(kind),
                             scheme_of(scheme, inputs, outputs, groups)};
    expect(tokens >= 0 && (tokens <= 1 || x_stride >= inputs), "x has rows of its inputs");
    const nb::gil_scoped_release released;
    submit(quantized, call);
}

bool pack(int scheme, int kind, uintptr_t packed, uintptr_t scales, uintptr_t weight, long outputs, long inputs, long groups,
          long stride) {
    const QuantizedWeight w{reinterpret_cast<void*>(packed), reinterpret_cast<void*>(scales),
                            reinterpret_cast<const void*>(weight), outputs, inputs, groups, stride, type_of(kind),
                            scheme_of(scheme, inputs, outputs, groups)};
    expect(outputs <= 1 || stride >= inputs, "a weight has rows of its inputs");
    const nb::gil_scoped_release released;
    return pack_quantized(w);
}

void look_up(int scheme, int kind, uintptr_t out, uintptr_t ids, uintptr_t weight, uintptr_t scales, long tokens, long inputs,
             long outputs, long groups) {
    const bool plain = scales == 0;
    const GatherCall call{reinterpret_cast<void*>(out), reinterpret_cast<const int32_t*>(ids),
                          reinterpret_cast<const void*>(weight), reinterpret_cast<const void*>(scales), tokens, inputs,
                          outputs, groups, type_of(kind), plain ? kInt8 : scheme_of(scheme, inputs, outputs, groups)};
    expect(tokens >= 0 && inputs >= 1 && outputs >= 1, "a table has rows of its inputs");
    expect(plain || !nibbles(call.scheme), "rows are taken out of weights of 8 bits, or of plain ones");
    const nb::gil_scoped_release released;
    submit(gather, call);
}

}  // namespace

void bind_quantized(nb::module_& m) {
    m.def("quantized", &multiply, nb::arg("scheme"), nb::arg("kind"), nb::arg("out"), nb::arg("x"), nb::arg("x_stride"),
          nb::arg("weight"), nb::arg("scales"), nb::arg("bias"), nb::arg("tokens"), nb::arg("inputs"), nb::arg("outputs"),
          nb::arg("groups"),
          "x [tokens, inputs] times a weight that pack_quantized() packed, plus bias (0: none), into out [tokens, outputs], "
          "which is contiguous. `scheme` is 0 for int8, 1 for int4, 2 for W8A8, 3 for W4A8; `kind`, of out, x and bias, as in "
          "linear(); addresses, and sizes in elements.");
    m.def("pack_quantized", &pack, nb::arg("scheme"), nb::arg("kind"), nb::arg("packed"), nb::arg("scales"),
          nb::arg("weight"), nb::arg("outputs"), nb::arg("inputs"), nb::arg("groups"), nb::arg("stride"),
          "Quantizes a weight [outputs, inputs] of `kind`, rows `stride` elements apart, into blocks of LINEAR_COLUMNS outputs "
          "and their scales. False where it holds numbers that are not finite, or too large for a scale in float16.");
    m.def("gather", &look_up, nb::arg("scheme"), nb::arg("kind"), nb::arg("out"), nb::arg("ids"), nb::arg("weight"),
          nb::arg("scales"), nb::arg("tokens"), nb::arg("inputs"), nb::arg("outputs"), nb::arg("groups"),
          "Rows ids [tokens] (int32) of a weight of 8 bits, or with scales 0 of one that pack_linear() packed in `kind`, into "
          "out [tokens, inputs].");
}

}  // namespace quintet::cpu
