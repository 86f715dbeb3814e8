// Low-rank adapters for Python.
#include "cpu/bindings/bind.h"
#include "cpu/bindings/bind_checks.h"
#include "cpu/graph.h"
#include "cpu/linear/lora.h"

namespace nb = nanobind;

namespace quintet::cpu {

namespace {

void add(int kind, uintptr_t y, long y_stride, uintptr_t x, long x_stride, uintptr_t a, uintptr_t b, uintptr_t ranks,
         long ranks_stride, uintptr_t slots, uintptr_t columns, long stretches, long tokens, long inputs, long outputs,
         long adapters, long parts, long rank) {
    expect(kind >= 0 && kind < kFloatTypes,
           "kind must be 0 (float32), 1 (bfloat16) or 2 (float16), not " + std::to_string(kind));
    expect(tokens >= 0 && tokens <= INT32_MAX, "tokens must be 0 to 2^31 - 1, not " + std::to_string(tokens));
    expect(inputs > 0 && outputs > 0 && adapters > 0 && parts > 0 && rank > 0 && stretches > 0,
           "inputs, outputs, adapters, parts, rank and stretches must be 1 or more");
    expect(tokens <= 1 || (y_stride >= outputs && x_stride >= inputs), "rows of y and of x must not overlap");
    const nb::gil_scoped_release released;
    submit(add_lora, {.y = reinterpret_cast<void*>(y),
                      .x = reinterpret_cast<const void*>(x),
                      .a = reinterpret_cast<const void*>(a),
                      .b = reinterpret_cast<const void*>(b),
                      .ranks = reinterpret_cast<const int32_t*>(ranks),
                      .slots = reinterpret_cast<const int32_t*>(slots),
                      .columns = reinterpret_cast<const int32_t*>(columns),
                      .tokens = tokens,
                      .inputs = inputs,
                      .outputs = outputs,
                      .adapters = adapters,
                      .parts = parts,
                      .rank = rank,
                      .stretches = stretches,
                      .y_stride = y_stride,
                      .x_stride = x_stride,
                      .ranks_stride = ranks_stride,
                      .type = static_cast<FloatType>(kind)});
}

void scale(int kind, uintptr_t y, long y_stride, uintptr_t gains, uintptr_t offsets, uintptr_t slots, long tokens,
           long outputs, long adapters) {
    expect(kind >= 0 && kind < kFloatTypes,
           "kind must be 0 (float32), 1 (bfloat16) or 2 (float16), not " + std::to_string(kind));
    expect(tokens >= 0 && outputs > 0 && adapters > 0, "outputs and adapters must be 1 or more");
    expect(tokens <= 1 || y_stride >= outputs, "rows of y must not overlap");
    const nb::gil_scoped_release released;
    submit(scale_adapted, {.y = reinterpret_cast<void*>(y),
                           .gains = reinterpret_cast<const float*>(gains),
                           .offsets = reinterpret_cast<const float*>(offsets),
                           .slots = reinterpret_cast<const int32_t*>(slots),
                           .tokens = tokens,
                           .outputs = outputs,
                           .adapters = adapters,
                           .y_stride = y_stride,
                           .type = static_cast<FloatType>(kind)});
}

void find_rows(uintptr_t out, uintptr_t ids, uintptr_t slots, long tokens, long adapters, long rows, long first) {
    expect(tokens >= 0 && adapters > 0 && rows > 0 && adapters * rows <= INT32_MAX,
           "adapters and rows must be 1 or more, and their product must be an int32");
    const nb::gil_scoped_release released;
    submit(adapter_rows, {.out = reinterpret_cast<int32_t*>(out),
                          .ids = reinterpret_cast<const int32_t*>(ids),
                          .slots = reinterpret_cast<const int32_t*>(slots),
                          .tokens = tokens,
                          .adapters = adapters,
                          .rows = rows,
                          .first = first});
}

}  // namespace

void bind_lora(nb::module_& m) {
    m.def("add_lora", &add, nb::arg("kind"), nb::arg("y"), nb::arg("y_stride"), nb::arg("x"), nb::arg("x_stride"),
          nb::arg("a"), nb::arg("b"), nb::arg("ranks"), nb::arg("ranks_stride"), nb::arg("slots"), nb::arg("columns"),
          nb::arg("stretches"), nb::arg("tokens"), nb::arg("inputs"), nb::arg("outputs"), nb::arg("adapters"),
          nb::arg("parts"), nb::arg("rank"),
          "y [tokens, outputs] += low-rank products of x [tokens, inputs] by each token's adapter: a [adapters, parts, "
          "rank, inputs] and b [adapters, rank, outputs], contiguous; ranks [adapters, parts], slots [tokens] (0: none) "
          "and columns [stretches, 2] (part, width) are int32. `kind` is 0 for float32, 1 for bfloat16, 2 for float16; "
          "addresses, and sizes and strides in elements. Recorded, it reads ranks and slots anew.");
    m.def("scale_adapted", &scale, nb::arg("kind"), nb::arg("y"), nb::arg("y_stride"), nb::arg("gains"),
          nb::arg("offsets"), nb::arg("slots"), nb::arg("tokens"), nb::arg("outputs"), nb::arg("adapters"),
          "y [tokens, outputs] becomes y * gains + offsets of each token's adapter: both float32 [adapters, outputs]; "
          "slots as in add_lora().");
    m.def("adapter_rows", &find_rows, nb::arg("out"), nb::arg("ids"), nb::arg("slots"), nb::arg("tokens"),
          nb::arg("adapters"), nb::arg("rows"), nb::arg("first"),
          "Into out [tokens]: (slot - 1) * rows + id - first; -1 without an adapter, or a row. All int32.");
}

}  // namespace quintet::cpu
