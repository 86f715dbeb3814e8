// Products with 8-bit floats for Python.
#include <string>

#include "cpu/bindings/bind.h"
#include "cpu/bindings/bind_checks.h"
#include "cpu/quantized/float8.h"
#include "cpu/graph.h"

namespace nb = nanobind;

namespace quintet::cpu {

namespace {

Float8Format format_of(int format) {
    expect(format >= 0 && format < kFloat8Formats, "format must be 0 (e4m3fn) or 1 (e5m2), not " + std::to_string(format));
    return static_cast<Float8Format>(format);
}

void multiply(int format, int kind, uintptr_t out, uintptr_t x, long x_stride, uintptr_t weight, uintptr_t scales,
              uintptr_t bias, long tokens, long inputs, long outputs, long group) {
    const Float8Call call{reinterpret_cast<void*>(out), reinterpret_cast<const void*>(x),
                          reinterpret_cast<const void*>(weight), reinterpret_cast<const float*>(scales),
                          reinterpret_cast<const void*>(bias), tokens, inputs, outputs, group, x_stride, linear_type(kind),
                          format_of(format)};
    expect(inputs >= 1 && outputs >= 1, "a weight has inputs and outputs");
    expect(group >= 1 && (group % 2 == 0 || group == inputs), "a group is of an even number of inputs, or of all");
    expect(tokens >= 0 && (tokens <= 1 || x_stride >= inputs), "x has rows of its inputs");
    const nb::gil_scoped_release released;
    submit(float8, call);
}

bool pack(int format, uintptr_t packed, uintptr_t weight, long outputs, long inputs, long stride) {
    const Float8Format known = format_of(format);
    expect(inputs >= 1 && outputs >= 1, "a weight has inputs and outputs");
    expect(outputs <= 1 || stride >= inputs, "a weight has rows of its inputs");
    const nb::gil_scoped_release released;
    return pack_float8(reinterpret_cast<void*>(packed), reinterpret_cast<const void*>(weight), outputs, inputs, stride, known);
}

}  // namespace

void bind_float8(nb::module_& m) {
    m.def("float8", &multiply, nb::arg("format"), nb::arg("kind"), nb::arg("out"), nb::arg("x"), nb::arg("x_stride"),
          nb::arg("weight"), nb::arg("scales"), nb::arg("bias"), nb::arg("tokens"), nb::arg("inputs"), nb::arg("outputs"),
          nb::arg("group"),
          "x [tokens, inputs] times a weight that pack_float8() packed, with float32 scales [blocks, groups, LINEAR_COLUMNS], "
          "plus bias (0: none), into out [tokens, outputs], which is contiguous. `format` is 0 for e4m3fn, 1 for e5m2; "
          "`kind`, of out, x and bias, as in linear(); `group` inputs share scales; addresses, and sizes in elements.");
    m.def("pack_float8", &pack, nb::arg("format"), nb::arg("packed"), nb::arg("weight"), nb::arg("outputs"),
          nb::arg("inputs"), nb::arg("stride"),
          "A weight [outputs, inputs] in bytes, rows `stride` apart, in the order in which float8() reads it. False where it "
          "holds numbers that are not finite.");
}

}  // namespace quintet::cpu
