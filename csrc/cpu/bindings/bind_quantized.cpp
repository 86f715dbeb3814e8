// Quantized products for Python.
#include <nanobind/stl/string.h>

#include <cstring>
#include <string>

#include "cpu/bindings/bind.h"
#include "cpu/bindings/bind_checks.h"
#include "cpu/quantized/blocks.h"
#include "cpu/graph.h"
#include "cpu/quantized/quantized.h"

namespace nb = nanobind;

namespace quintet::cpu {

namespace {

QuantizedScheme scheme_of(int scheme, long inputs, long outputs, long groups) {
    expect(scheme >= 0 && scheme < kQuantizedSchemes, "scheme must be 0 to " + std::to_string(kQuantizedSchemes - 1) + ", not " + std::to_string(scheme));
    expect(inputs >= 1 && outputs >= 1 && groups >= 1, "a weight has inputs, outputs and groups");
    if (scheme == kW8a8) {
        expect(groups == 1 && inputs <= kMostInputs,
               "W8A8 has one group, of " + std::to_string(kMostInputs) + " inputs at most");
    } else {
        const long group = inputs / groups;
        expect(group * groups == inputs && group % kRowPadding == 0 && group <= kLargestGroup,
               std::to_string(inputs) + " inputs do not make " + std::to_string(groups) + " groups of 16, 32, .. " +
                   std::to_string(kLargestGroup));
        expect(!leveled(static_cast<QuantizedScheme>(scheme)) || (inputs % kLevelInputs == 0 && kLevelInputs % group == 0),
               "numbers of two levels have stretches of " + std::to_string(kLevelInputs) + " inputs");
    }
    return static_cast<QuantizedScheme>(scheme);
}

void multiply(int scheme, int kind, uintptr_t out, uintptr_t x, long x_stride, uintptr_t weight, uintptr_t scales,
              uintptr_t bias, long tokens, long inputs, long outputs, long groups, uintptr_t zeros, uintptr_t mins,
              uintptr_t order, long span, bool powers, uintptr_t table) {
    QuantizedCall call{reinterpret_cast<void*>(out), reinterpret_cast<const void*>(x),
                             reinterpret_cast<const void*>(weight), reinterpret_cast<const void*>(scales),
                             reinterpret_cast<const void*>(bias), tokens, inputs, outputs, groups, x_stride, linear_type(kind),
                             scheme_of(scheme, inputs, outputs, groups)};
    expect(tokens >= 0 && (tokens <= 1 || x_stride >= inputs), "x has rows of its inputs");
    expect(span >= 0 && span % (inputs / groups) == 0, "a row's scales are of whole groups");
    expect(call.scheme != kW8a8 || (!zeros && !mins && !powers), "W8A8 of one group has scales, and nothing beside");
    expect(!leveled(call.scheme) || (!zeros && !powers), "scales of two levels have minima beside them, and nothing else");
    expect(looked_up(call.scheme) == (table != 0), "a table is what values are looked up in");
    call.zeros = reinterpret_cast<const void*>(zeros);
    call.mins = reinterpret_cast<const void*>(mins);
    call.order = reinterpret_cast<const int32_t*>(order);
    call.span = span;
    call.powers = powers;
    if (table) std::memcpy(call.table, reinterpret_cast<const void*>(table), sizeof call.table);
    const nb::gil_scoped_release released;
    submit(quantized, call);
}

bool pack(int scheme, int kind, uintptr_t packed, uintptr_t scales, uintptr_t weight, long outputs, long inputs, long groups,
          long stride) {
    const QuantizedWeight w{reinterpret_cast<void*>(packed), reinterpret_cast<void*>(scales),
                            reinterpret_cast<const void*>(weight), outputs, inputs, groups, stride, linear_type(kind),
                            scheme_of(scheme, inputs, outputs, groups)};
    expect(outputs <= 1 || stride >= inputs, "a weight has rows of its inputs");
    expect(w.scheme < kTable4, "floats do not become places in a table, nor scales of two levels");
    const nb::gil_scoped_release released;
    return pack_quantized(w);
}

void lay(uintptr_t packed, uintptr_t values, uintptr_t bytes, long outputs, long inputs, bool four) {
    expect(outputs >= 1 && inputs >= 1 && (!four || inputs % 2 == 0), "a weight has outputs and inputs, of 4 bits even ones");
    const QuantizedLaying laying{reinterpret_cast<void*>(packed), reinterpret_cast<const void*>(values), outputs, inputs, four,
                                 reinterpret_cast<const uint8_t*>(bytes)};
    const nb::gil_scoped_release released;
    lay_quantized(laying);
}

int scale(uintptr_t scales, uintptr_t mins, uintptr_t scales_in, uintptr_t mins_in, long outputs, long groups, long repeat,
          bool powers) {
    expect(outputs >= 1 && groups >= 1 && repeat >= 1, "a weight has outputs and groups");
    expect((mins == 0) == (mins_in == 0), "minima go where there is room for them");
    const ScalesLaying laying{reinterpret_cast<void*>(scales), reinterpret_cast<void*>(mins),
                              reinterpret_cast<const float*>(scales_in), reinterpret_cast<const float*>(mins_in), outputs,
                              groups, repeat, powers};
    const nb::gil_scoped_release released;
    return static_cast<int>(lay_scales(laying));
}

const BlockKind& kind_of(const std::string& name, long outputs, long inputs, long stride) {
    const BlockKind* const kind = block_kind(name.c_str());
    expect(kind != nullptr, name + " is no type of blocks that is read here");
    expect(outputs >= 1 && inputs >= 1 && inputs % kind->values == 0 && stride >= inputs / kind->values * kind->bytes,
           "rows are of whole blocks");
    return *kind;
}

void unpack(const std::string& name, uintptr_t values, uintptr_t scales, uintptr_t mins, uintptr_t rows, long outputs,
            long inputs, long stride) {
    const BlockKind& kind = kind_of(name, outputs, inputs, stride);
    expect(kind.mins == (mins != 0), "minima go where there is room for them");
    const BlocksUnpacking call{reinterpret_cast<const uint8_t*>(rows), reinterpret_cast<uint8_t*>(values),
                               reinterpret_cast<float*>(scales), reinterpret_cast<float*>(mins), outputs, inputs, stride, &kind};
    const nb::gil_scoped_release released;
    unpack_blocks(call);
}

bool lay_rows(const std::string& name, uintptr_t packed, uintptr_t scales, uintptr_t mins, uintptr_t rows, long outputs,
              long inputs, long stride) {
    const BlockKind& kind = kind_of(name, outputs, inputs, stride);
    expect((kind.levels || kind.fives) && kind.mins == (mins != 0),
           "blocks with levels or of 5 bits go where there is room for what they have");
    const BlocksLaying call{reinterpret_cast<const uint8_t*>(rows), reinterpret_cast<uint8_t*>(packed),
                            reinterpret_cast<int8_t*>(scales), reinterpret_cast<int8_t*>(mins), outputs, inputs, stride, &kind};
    const nb::gil_scoped_release released;
    return lay_blocks(call);
}

}  // namespace

void bind_quantized(nb::module_& m) {
    nb::list blocks;
    for (const BlockKind& kind : block_kinds()) blocks.append(kind.name);
    m.attr("BLOCKS") = nb::tuple(blocks);
    m.def("quantized", &multiply, nb::arg("scheme"), nb::arg("kind"), nb::arg("out"), nb::arg("x"), nb::arg("x_stride"),
          nb::arg("weight"), nb::arg("scales"), nb::arg("bias"), nb::arg("tokens"), nb::arg("inputs"), nb::arg("outputs"),
          nb::arg("groups"), nb::arg("zeros") = 0, nb::arg("mins") = 0, nb::arg("order") = 0, nb::arg("span") = 0,
          nb::arg("powers") = false, nb::arg("table") = 0,
          "x [tokens, inputs] times a weight that pack_quantized() packed, plus bias (0: none), into out [tokens, outputs], "
          "which is contiguous. `scheme` is 0 for int8, 1 for int4, 2 for W8A8 of one group, 3 for W4A8, 4 for W8A8 in "
          "groups, 5 and 6 for 4 bits looked up in `table` with rows of 16 and of 8 bits, 7 to 10 for what lay_blocks() laid, of 4 "
          "bits and of 6 with rows of 16 and of 8, 11 and 12 for 5 bits with them; `kind`, of out, x and bias, as in "
          "linear(); addresses, and sizes in elements. Beside scales: zero points, minima, the inputs' order, how many inputs "
          "share a scale of a row (0: a group), and whether powers of two follow a block's scales.");
    m.def("lay_quantized", &lay, nb::arg("packed"), nb::arg("values"), nb::arg("bytes"), nb::arg("outputs"),
          nb::arg("inputs"), nb::arg("four"),
          "Values [outputs, inputs] of 8 bits, stored as `bytes` [256] says, or with `four` of 4 bits, two in a byte, to where "
          "quantized() finds them.");
    m.def("lay_scales", &scale, nb::arg("scales"), nb::arg("mins"), nb::arg("scales_in"), nb::arg("mins_in"),
          nb::arg("outputs"), nb::arg("groups"), nb::arg("repeat"), nb::arg("powers"),
          "float32 [outputs, groups] to float16 [blocks, groups * repeat, LINEAR_COLUMNS], with `powers` 128 numbers more after "
          "each block's scales: the columns' powers of two in float32. 0: held to one part in 1024; 1: not all of them; 2: not "
          "all are finite.");
    m.def("pack_quantized", &pack, nb::arg("scheme"), nb::arg("kind"), nb::arg("packed"), nb::arg("scales"),
          nb::arg("weight"), nb::arg("outputs"), nb::arg("inputs"), nb::arg("groups"), nb::arg("stride"),
          "Quantizes a weight [outputs, inputs] of `kind`, rows `stride` elements apart, into blocks of LINEAR_COLUMNS outputs "
          "and their scales. False where it holds numbers that are not finite, or too large for a scale in float16.");
    m.def("unpack_blocks", &unpack, nb::arg("name"), nb::arg("values"), nb::arg("scales"), nb::arg("mins"), nb::arg("rows"),
          nb::arg("outputs"), nb::arg("inputs"), nb::arg("stride"),
          "Rows of a GGUF type's blocks, `stride` bytes apart, to values [outputs, inputs] of 8 bits, or of 4 with two in a byte, "
          "and float32 scales and minima (0: it has none) [outputs, groups].");
    m.def("lay_blocks", &lay_rows, nb::arg("name"), nb::arg("packed"), nb::arg("scales"), nb::arg("mins"), nb::arg("rows"),
          nb::arg("outputs"), nb::arg("inputs"), nb::arg("stride"),
          "Rows of a K-quant's or Q5_0's blocks to where quantized() finds them: packed [blocks, inputs / 4, 128 or 192], scales and minima "
          "int8 [blocks, groups + inputs / 128, LINEAR_COLUMNS]: codes, then float16 for each 256 inputs; of Q5_0 [blocks, inputs / 4, "
          "160] and float16 [blocks, groups, LINEAR_COLUMNS]. False where a number is not finite.");
}

}  // namespace quintet::cpu
