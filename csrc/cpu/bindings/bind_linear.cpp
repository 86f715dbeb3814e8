// Linear kernels for Python.
#include <stdexcept>
#include <string>

#include "cpu/bindings/bind.h"
#include "cpu/bindings/bind_checks.h"
#include "cpu/graph.h"
#include "cpu/linear/linear.h"

namespace nb = nanobind;

namespace quintet::cpu {

namespace {

void at_least(const char* name, long value, long least) {
    if (value < least) {
        throw std::invalid_argument(std::string(name) + " must be " + std::to_string(least) + " or more, not " +
                                    std::to_string(value));
    }
}

void multiply(int kind, uintptr_t out, uintptr_t x, long x_stride, uintptr_t weight, uintptr_t bias, long tokens,
              long inputs, long outputs) {
    const LinearType type = linear_type(kind);
    at_least("tokens", tokens, 0);
    at_least("inputs", inputs, 1);
    at_least("outputs", outputs, 1);
    if (tokens > 1) at_least("x_stride", x_stride, inputs);
    const nb::gil_scoped_release released;
    submit(linear, {reinterpret_cast<void*>(out), reinterpret_cast<const void*>(x),
                    reinterpret_cast<const void*>(weight), reinterpret_cast<const void*>(bias), tokens, inputs, outputs,
                    x_stride, type});
}

void by_heads(int kind, uintptr_t out, uintptr_t x, long token_stride, long head_stride, uintptr_t weight, long tokens,
              long heads, long inputs, long outputs) {
    const LinearType type = linear_type(kind);
    at_least("tokens", tokens, 0);
    at_least("heads", heads, 1);
    at_least("inputs", inputs, 1);
    at_least("outputs", outputs, 1);
    if (heads > 1) at_least("head_stride", head_stride, inputs);
    if (tokens > 1) at_least("token_stride", token_stride, (heads - 1) * head_stride + inputs);
    const nb::gil_scoped_release released;
    submit(linear_by_heads, {reinterpret_cast<void*>(out), reinterpret_cast<const void*>(x),
                             reinterpret_cast<const void*>(weight), tokens, heads, inputs, outputs, token_stride,
                             head_stride, type});
}

long scratch_bytes(int kind, long tokens, long inputs) {
    at_least("inputs", inputs, 1);
    return linear_scratch_bytes(tokens, inputs, linear_type(kind));
}

void pack(int kind, uintptr_t packed, uintptr_t weight, long outputs, long inputs, long stride) {
    const LinearType type = linear_type(kind);
    at_least("inputs", inputs, 1);
    at_least("outputs", outputs, 1);
    if (outputs > 1) at_least("stride", stride, inputs);
    const nb::gil_scoped_release released;
    pack_linear(reinterpret_cast<void*>(packed), reinterpret_cast<const void*>(weight), outputs, inputs, stride, type);
}

}  // namespace

void bind_linear(nb::module_& m) {
    m.attr("LINEAR_COLUMNS") = kLinearColumns;
    m.def("linear", &multiply, nb::arg("kind"), nb::arg("out"), nb::arg("x"), nb::arg("x_stride"), nb::arg("weight"),
          nb::arg("bias"), nb::arg("tokens"), nb::arg("inputs"), nb::arg("outputs"),
          "x [tokens, inputs] times a packed weight, plus bias (0: none), into out [tokens, outputs], which is contiguous. "
          "`kind` is 0 for float32, 1 for bfloat16, 2 for float16; addresses, and sizes in elements.");
    m.def("linear_scratch_bytes", &scratch_bytes, nb::arg("kind"), nb::arg("tokens"), nb::arg("inputs"),
          "Bytes that linear() keeps beside its operands: x in float32, where the processor has no product of such numbers.");
    m.def("linear_by_heads", &by_heads, nb::arg("kind"), nb::arg("out"), nb::arg("x"), nb::arg("token_stride"),
          nb::arg("head_stride"), nb::arg("weight"), nb::arg("tokens"), nb::arg("heads"), nb::arg("inputs"),
          nb::arg("outputs"),
          "x [tokens, heads, inputs], strides in elements, each head times its packed weight, into out [tokens, heads, "
          "outputs], which is contiguous.");
    m.def("pack_linear", &pack, nb::arg("kind"), nb::arg("packed"), nb::arg("weight"), nb::arg("outputs"),
          nb::arg("inputs"), nb::arg("stride"),
          "A weight [outputs, inputs], rows `stride` elements apart, in the order in which linear() reads it: blocks of "
          "LINEAR_COLUMNS outputs, zeros past the last; two inputs of bfloat16 side by side, also past the last.");
}

}  // namespace quintet::cpu
