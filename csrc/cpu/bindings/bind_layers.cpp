// The kernels between products and attention, for Python.
#include <stdexcept>
#include <string>

#include "cpu/bindings/bind.h"
#include "cpu/elementwise/elementwise.h"
#include "cpu/elementwise/embedding.h"
#include "cpu/graph.h"
#include "cpu/elementwise/norm.h"
#include "cpu/elementwise/rotary.h"

namespace nb = nanobind;

namespace quintet::cpu {

namespace {

template <typename T = void>
T* at(uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

FloatType type_of(int kind) {
    if (kind < 0 || kind >= kFloatTypes) {
        throw std::invalid_argument("kind must be 0 (float32), 1 (bfloat16) or 2 (float16), not " + std::to_string(kind));
    }
    return static_cast<FloatType>(kind);
}

void at_least(const char* name, long value, long least) {
    if (value < least) {
        throw std::invalid_argument(std::string(name) + " must be " + std::to_string(least) + " or more, not " +
                                    std::to_string(value));
    }
}

void rms(int kind, uintptr_t out, uintptr_t sum, uintptr_t x, uintptr_t residual, uintptr_t weight, long rows, long width,
         long inner, long outer_stride, long inner_stride, float eps, float offset) {
    const FloatType type = type_of(kind);
    at_least("rows", rows, 0);
    at_least("width", width, 1);
    at_least("inner", inner, 1);
    const nb::gil_scoped_release released;
    submit(rms_norm, {at(out), at(sum), at(x), at(residual), at(weight), nullptr, rows, width, inner, outer_stride,
                      inner_stride, eps, offset, type});
}

void layer(int kind, uintptr_t out, uintptr_t x, uintptr_t weight, uintptr_t bias, long rows, long width, long inner,
           long outer_stride, long inner_stride, float eps) {
    const FloatType type = type_of(kind);
    at_least("rows", rows, 0);
    at_least("width", width, 1);
    at_least("inner", inner, 1);
    const nb::gil_scoped_release released;
    submit(layer_norm, {at(out), nullptr, at(x), nullptr, at(weight), at(bias), rows, width, inner, outer_stride,
                        inner_stride, eps, 0.0F, type});
}

template <bool neighbours>
void turn(int kind, uintptr_t q_out, uintptr_t q, uintptr_t q_weight, long q_heads, long q_token, long q_head,
          uintptr_t k_out, uintptr_t k, uintptr_t k_weight, long k_heads, long k_token, long k_head, uintptr_t table,
          uintptr_t positions, long tokens, long dim, long turned, long positions_there, float eps, float offset) {
    const FloatType type = type_of(kind);
    at_least("tokens", tokens, 0);
    at_least("q's heads", q_heads, 0);
    at_least("k's heads", k_heads, 0);
    at_least("turned", turned, 0);
    at_least("dim", dim, turned);
    if (turned % 2) throw std::invalid_argument("turned must be even, not " + std::to_string(turned));
    const nb::gil_scoped_release released;
    submit(rotary, {{{at(q_out), at(q), at(q_weight), q_heads, q_token, q_head},
                     {at(k_out), at(k), at(k_weight), k_heads, k_token, k_head}},
                    at<const float>(table), at<const int>(positions), tokens, dim, turned, positions_there, eps, offset,
                    neighbours, type});
}

void compute(int kind, int op, bool gates, uintptr_t out, uintptr_t x, uintptr_t y, long rows, long width, long x_stride,
             long y_stride, float factor) {
    const FloatType type = type_of(kind);
    const int there = gates ? kActivations : kElementwise;
    if (op < 0 || op >= there) throw std::invalid_argument("op must be below " + std::to_string(there));
    at_least("rows", rows, 0);
    at_least("width", width, 0);
    const nb::gil_scoped_release released;
    submit(gates ? gated : elementwise, {at(out), at(x), at(y), rows, width, x_stride, y_stride, factor, type,
                                         static_cast<Elementwise>(op)});
}

void heads(int kind, uintptr_t out, uintptr_t x, uintptr_t factors, long tokens, long heads, long groups, long dim,
           long token_stride, long head_stride) {
    const FloatType type = type_of(kind);
    at_least("tokens", tokens, 0);
    at_least("groups", groups, 1);
    at_least("heads", heads, groups);
    at_least("dim", dim, 1);
    if (heads % groups) throw std::invalid_argument("heads must be a multiple of groups");
    const nb::gil_scoped_release released;
    submit(scale_heads, {at(out), at(x), at<const float>(factors), tokens, heads, groups, dim, token_stride, head_stride,
                         type});
}

void look_up(uintptr_t out, uintptr_t ids, uintptr_t table, long count, long rows, long width, long stride, long first,
             bool partial) {
    at_least("count", count, 0);
    at_least("rows", rows, 0);
    at_least("width", width, 0);
    const nb::gil_scoped_release released;
    submit(embedding, {at(out), at<const int32_t>(ids), at(table), count, rows, width, stride, first, partial});
}

void join(uintptr_t out, uintptr_t x, uintptr_t y, long rows, long x_width, long y_width, long x_stride, long y_stride) {
    at_least("rows", rows, 0);
    at_least("x_width", x_width, 0);
    at_least("y_width", y_width, 0);
    const nb::gil_scoped_release released;
    submit(beside, {at(out), at<const void>(x), at<const void>(y), rows, x_width, y_width, x_stride, y_stride});
}

void place(uintptr_t out, uintptr_t x, uintptr_t given, uintptr_t places, long tokens, long rows, long width, long x_stride,
           long given_stride, bool own) {
    at_least("tokens", tokens, 0);
    at_least("rows", rows, 0);
    at_least("width", width, 0);
    const nb::gil_scoped_release released;
    submit(place_rows, {at(out), at<const void>(x), at<const void>(given), at<const int32_t>(places), tokens, rows, width,
                        x_stride, given_stride, own});
}

}  // namespace

void bind_layers(nb::module_& m) {
    nb::list names;  // a number each, in this order: compute()'s `op`
    for (const char* name : {"gelu", "gelu_tanh", "relu", "relu2", "silu", "add", "scale", "softcap"}) names.append(name);
    m.attr("ELEMENTWISE") = nb::tuple(names);
    m.def("rms_norm", &rms, nb::arg("kind"), nb::arg("out"), nb::arg("sum"), nb::arg("x"), nb::arg("residual"),
          nb::arg("weight"), nb::arg("rows"), nb::arg("width"), nb::arg("inner"), nb::arg("outer_stride"),
          nb::arg("inner_stride"), nb::arg("eps"), nb::arg("offset"),
          "Of x [rows / inner, inner, width], or of x + residual, which is then written to sum. `kind` is 0 for float32, "
          "1 for bfloat16, 2 for float16; addresses, and sizes in elements. All but x is contiguous.");
    m.def("layer_norm", &layer, nb::arg("kind"), nb::arg("out"), nb::arg("x"), nb::arg("weight"), nb::arg("bias"),
          nb::arg("rows"), nb::arg("width"), nb::arg("inner"), nb::arg("outer_stride"), nb::arg("inner_stride"),
          nb::arg("eps"), "Of x as in rms_norm(); bias may be 0.");
    m.def("rotary", &turn<false>, nb::arg("kind"), nb::arg("q_out"), nb::arg("q"), nb::arg("q_weight"),
          nb::arg("q_heads"), nb::arg("q_token"), nb::arg("q_head"), nb::arg("k_out"), nb::arg("k"), nb::arg("k_weight"),
          nb::arg("k_heads"), nb::arg("k_token"), nb::arg("k_head"), nb::arg("table"), nb::arg("positions"),
          nb::arg("tokens"), nb::arg("dim"), nb::arg("turned"), nb::arg("positions_there"), nb::arg("eps"),
          nb::arg("offset"),
          "q and k [tokens, heads, dim], token and head strides in elements, turned by int32 positions after rms_norm() "
          "of each head, whose weights may be 0. ValueError for a position that the table does not hold.");
    m.def("pair_rotary", &turn<true>, nb::arg("kind"), nb::arg("q_out"), nb::arg("q"), nb::arg("q_weight"),
          nb::arg("q_heads"), nb::arg("q_token"), nb::arg("q_head"), nb::arg("k_out"), nb::arg("k"), nb::arg("k_weight"),
          nb::arg("k_heads"), nb::arg("k_token"), nb::arg("k_head"), nb::arg("table"), nb::arg("positions"),
          nb::arg("tokens"), nb::arg("dim"), nb::arg("turned"), nb::arg("positions_there"), nb::arg("eps"),
          nb::arg("offset"),
          "The same without norms, where neighbours are paired: the results have the first of each pair, then the second.");
    m.def("elementwise", &compute, nb::arg("kind"), nb::arg("op"), nb::arg("gated"), nb::arg("out"), nb::arg("x"),
          nb::arg("y"), nb::arg("rows"), nb::arg("width"), nb::arg("x_stride"), nb::arg("y_stride"), nb::arg("factor"),
          "ELEMENTWISE[op] of x [rows, width]; `gated`: an activation, times y; `factor` is the limit of both, or 0.");
    m.def("scale_heads", &heads, nb::arg("kind"), nb::arg("out"), nb::arg("x"), nb::arg("factors"), nb::arg("tokens"),
          nb::arg("heads"), nb::arg("groups"), nb::arg("dim"), nb::arg("token_stride"), nb::arg("head_stride"),
          "x [tokens, heads, dim], strides in elements, each head times its factor (float32 [groups]), into out, which is "
          "contiguous.");
    m.def("embedding", &look_up, nb::arg("out"), nb::arg("ids"), nb::arg("table"), nb::arg("count"), nb::arg("rows"),
          nb::arg("width"), nb::arg("stride"), nb::arg("first"), nb::arg("partial"),
          "Rows of the table by int32 ids; width and stride in bytes. What a partial table does not hold is zeros, and "
          "ValueError otherwise.");
    m.def("beside", &join, nb::arg("out"), nb::arg("x"), nb::arg("y"), nb::arg("rows"), nb::arg("x_width"), nb::arg("y_width"),
          nb::arg("x_stride"), nb::arg("y_stride"),
          "x [rows, x_width] and y [rows, y_width] side by side, into out [rows, x_width + y_width]; all in bytes.");
    m.def("place_rows", &place, nb::arg("out"), nb::arg("x"), nb::arg("given"), nb::arg("places"), nb::arg("tokens"),
          nb::arg("rows"), nb::arg("width"), nb::arg("x_stride"), nb::arg("given_stride"), nb::arg("own"),
          "x [tokens, width], with a row of given [rows, width] where places (int32 [tokens]) is not -1: that number, or "
          "the token's own; in bytes. ValueError for a row that there is not.");
}

}  // namespace quintet::cpu
