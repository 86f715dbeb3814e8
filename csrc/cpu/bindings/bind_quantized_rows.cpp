// Rows of packed weights for Python.
#include <cstring>
#include <string>

#include "cpu/bindings/bind.h"
#include "cpu/bindings/bind_checks.h"
#include "cpu/graph.h"
#include "cpu/quantized/quantized_rows.h"

namespace nb = nanobind;

namespace quintet::cpu {

namespace {

void expect_rows(long tokens, long inputs, long outputs) {
    expect(tokens >= 0 && inputs >= 1 && outputs >= 1, "a table has rows of its inputs");
}

void look_up(int scheme, int kind, uintptr_t out, uintptr_t ids, uintptr_t weight, uintptr_t scales, long tokens, long inputs,
             long outputs, long groups, long first, uintptr_t zeros, uintptr_t mins, uintptr_t order, bool powers,
             uintptr_t table) {
    expect_rows(tokens, inputs, outputs);
    GatherCall call{reinterpret_cast<void*>(out), reinterpret_cast<const int32_t*>(ids), reinterpret_cast<const void*>(weight),
                    reinterpret_cast<const void*>(scales), tokens, inputs, outputs, groups, linear_type(kind), kInt8,
                    first};
    if (scales) {
        expect(scheme >= 0 && scheme < kQuantizedSchemes, "a scheme is 0 to " + std::to_string(kQuantizedSchemes - 1));
        expect(groups >= 1 && inputs % groups == 0, "groups are of equal size");
        call.scheme = static_cast<QuantizedScheme>(scheme);
        expect(!leveled(call.scheme) || inputs % kLevelInputs == 0, "levels are of 256 inputs");
        expect(looked_up(call.scheme) == (table != 0), "a table is what values are looked up in");
        call.zeros = reinterpret_cast<const void*>(zeros);
        call.mins = reinterpret_cast<const void*>(mins);
        call.order = reinterpret_cast<const int32_t*>(order);
        call.powers = powers;
        if (table) std::memcpy(call.table, reinterpret_cast<const void*>(table), sizeof call.table);
    }
    const nb::gil_scoped_release released;
    submit(gather, call);
}

void look_up_float8(int format, int kind, uintptr_t out, uintptr_t ids, uintptr_t weight, uintptr_t scales, long tokens,
                    long inputs, long outputs, long group, long first) {
    expect_rows(tokens, inputs, outputs);
    expect(format >= 0 && format < kFloat8Formats, "a format is 0 (e4m3fn) or 1 (e5m2)");
    expect(group >= 1, "scales are of groups");
    const Float8GatherCall call{reinterpret_cast<void*>(out), reinterpret_cast<const int32_t*>(ids),
                                reinterpret_cast<const void*>(weight), reinterpret_cast<const float*>(scales), tokens, inputs,
                                outputs, group, linear_type(kind), static_cast<Float8Format>(format), first};
    const nb::gil_scoped_release released;
    submit(gather_float8, call);
}

}  // namespace

void bind_quantized_rows(nb::module_& m) {
    m.def("gather", &look_up, nb::arg("scheme"), nb::arg("kind"), nb::arg("out"), nb::arg("ids"), nb::arg("weight"),
          nb::arg("scales"), nb::arg("tokens"), nb::arg("inputs"), nb::arg("outputs"), nb::arg("groups"), nb::arg("first") = 0,
          nb::arg("zeros") = 0, nb::arg("mins") = 0, nb::arg("order") = 0, nb::arg("powers") = false, nb::arg("table") = 0,
          "Rows ids [tokens] (int32), less `first`, of a weight that quantized() takes, or with scales 0 of one that "
          "pack_linear() packed in `kind`, into out [tokens, inputs]. Ids that are no rows give zeros.");
    m.def("gather_float8", &look_up_float8, nb::arg("format"), nb::arg("kind"), nb::arg("out"), nb::arg("ids"),
          nb::arg("weight"), nb::arg("scales"), nb::arg("tokens"), nb::arg("inputs"), nb::arg("outputs"), nb::arg("group"),
          nb::arg("first"), "The same of a weight that float8() takes.");
}

}  // namespace quintet::cpu
