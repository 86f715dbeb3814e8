// What carries one state per request, for Python.
#include <stdexcept>
#include <string>

#include "cpu/bindings/bind.h"
#include "cpu/graph.h"
#include "cpu/states/states.h"

namespace nb = nanobind;

namespace quintet::cpu {

namespace {

template <typename T = const void>
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

// Requests' tokens and states, as Python gives them: query_start_loc, block_table, requests, columns, units, drafts.
StateRows rows_of(const nb::tuple& rows) {
    if (rows.size() != 6) throw std::invalid_argument("rows are six numbers");
    const auto number = [&](size_t place) { return nb::cast<long>(rows[place]); };
    at_least("requests", number(2), 0);
    at_least("drafts", number(5), 0);
    at_least("columns", number(3), number(5) ? 4 : 2);
    if (number(5) > kMostDrafts) throw std::invalid_argument("there are " + std::to_string(kMostDrafts) + " drafts at most");
    at_least("units", number(4), 1);
    return {at<const int>(nb::cast<uintptr_t>(rows[0])), at<const int>(nb::cast<uintptr_t>(rows[1])), number(2), number(3),
            number(4), number(5)};
}

// Numbers of a state, and of what drafts do to it.
long unit_size(const StateRows& rows, long heads, long dim, long width) {
    return heads * (dim * width + rows.drafts * (1 + dim + width));
}

void divided(long heads, long groups) {
    at_least("groups", groups, 1);
    at_least("heads", heads, groups);
    if (heads % groups) throw std::invalid_argument("heads must be a multiple of groups");
}

void conv(int kind, uintptr_t out, uintptr_t x, uintptr_t gates, uintptr_t weight, uintptr_t bias, uintptr_t state,
          long x_stride, long gate_stride, long channels, long taps, bool silu, const nb::tuple& rows) {
    const ConvCall call = {at<void>(out), at(x), at(gates), at(weight), at(bias), at<void>(state), x_stride, gate_stride,
                           channels, taps, silu, type_of(kind), rows_of(rows)};
    at_least("channels", channels, 1);
    at_least("taps", taps, 2);
    if (taps > kMostTaps) throw std::invalid_argument("there are " + std::to_string(kMostTaps) + " taps at most");
    const nb::gil_scoped_release released;
    submit(short_conv, call);
}

void space(int kind, uintptr_t out, uintptr_t x, uintptr_t dt, uintptr_t into, uintptr_t out_of, uintptr_t a_log,
           uintptr_t dt_bias, uintptr_t skip, uintptr_t steps, uintptr_t sides, uintptr_t state, const nb::tuple& strides,
           long tokens, long heads, long groups, long dim, long width, long unit, float least, const nb::tuple& rows) {
    if (strides.size() != 4) throw std::invalid_argument("strides are four numbers");
    const auto stride = [&](size_t place) { return nb::cast<long>(strides[place]); };
    const SpaceCall call = {at<float>(out), at(x), at(dt), at(into), at(out_of), at<const float>(a_log),
                            at<const float>(dt_bias), at<const float>(skip), at<float>(steps), at<float>(sides),
                            at<float>(state), stride(0), stride(1), stride(2), stride(3), tokens, heads, groups, dim, width,
                            unit, least, type_of(kind), rows_of(rows)};
    if (dt && !dt_bias) throw std::invalid_argument("a dt comes with a bias");
    at_least("tokens", tokens, 0);
    at_least("dim", dim, 1);
    at_least("width", width, 1);
    divided(heads, groups);
    at_least("unit", unit, unit_size(call.rows, heads, dim, width));
    const nb::gil_scoped_release released;
    submit(state_space, call);
}

void selective(int kind, uintptr_t out, uintptr_t x, uintptr_t dt, uintptr_t into, uintptr_t out_of, uintptr_t a_log,
               uintptr_t dt_bias, uintptr_t skip, uintptr_t sides, uintptr_t state, const nb::tuple& strides, long tokens,
               long channels, long width, const nb::tuple& rows) {
    if (strides.size() != 4) throw std::invalid_argument("strides are four numbers");
    const auto stride = [&](size_t place) { return nb::cast<long>(strides[place]); };
    const SelectiveCall call = {at<float>(out), at(x), at(dt), at(into), at(out_of), at<const float>(a_log),
                                at<const float>(dt_bias), at<const float>(skip), at<float>(sides), at<float>(state),
                                stride(0), stride(1), stride(2), stride(3), tokens, channels, width, type_of(kind),
                                rows_of(rows)};
    if (!dt || !dt_bias) throw std::invalid_argument("a scan is selective by its dt and the bias of it");
    at_least("tokens", tokens, 0);
    at_least("channels", channels, 1);
    at_least("width", width, 1);
    if (width > kMostWidth) throw std::invalid_argument("a channel keeps " + std::to_string(kMostWidth) + " numbers at most");
    const nb::gil_scoped_release released;
    submit(selective_scan, call);
}

void delta(int kind, uintptr_t out, uintptr_t q, uintptr_t k, uintptr_t v, uintptr_t forget, uintptr_t learn, uintptr_t a_log,
           uintptr_t dt_bias, uintptr_t steps, uintptr_t units, uintptr_t state, const nb::tuple& strides, long tokens,
           long heads, long groups, long values, long width, long unit, bool by_channel, float lower_bound, float beta_scale,
           const nb::tuple& rows) {
    if (strides.size() != 5) throw std::invalid_argument("strides are five numbers");
    const auto stride = [&](size_t place) { return nb::cast<long>(strides[place]); };
    const DeltaCall call = {at<float>(out), at(q), at(k), at(v), at(forget), at(learn), at<const float>(a_log),
                            at<const float>(dt_bias), at<float>(steps), at<float>(units), at<float>(state), stride(0),
                            stride(1), stride(2), stride(3), stride(4), tokens, heads, groups, values, width, unit, by_channel, lower_bound,
                            beta_scale, type_of(kind), rows_of(rows)};
    at_least("tokens", tokens, 0);
    at_least("values", values, 1);
    at_least("width", width, 1);
    divided(heads, groups);
    at_least("unit", unit, unit_size(call.rows, heads, values, width));
    if (by_channel && call.rows.drafts) throw std::invalid_argument("states with a decay for each channel have no drafts");
    if (call.rows.drafts && width > kMostWidth)
        throw std::invalid_argument("a row of a state with drafts has " + std::to_string(kMostWidth) + " numbers at most");
    const nb::gil_scoped_release released;
    submit(delta_rule, call);
}

void norm(int kind, uintptr_t out, uintptr_t x, uintptr_t gate, uintptr_t weight, long gate_stride, long tokens, long pieces,
          long width, long weights, float eps, bool after) {
    const GatedNormCall call = {at<void>(out), at<const float>(x), at(gate), at(weight), gate_stride, tokens, pieces, width,
                                weights, eps, after, type_of(kind)};
    at_least("tokens", tokens, 0);
    at_least("pieces", pieces, 1);
    at_least("width", width, 1);
    if (weights != 1 && weights != pieces) throw std::invalid_argument("one weight for all pieces, or one for each");
    const nb::gil_scoped_release released;
    submit(gated_norm, call);
}

void sigmoid(int kind, uintptr_t out, uintptr_t x, uintptr_t gate, long x_stride, long gate_stride, long rows, long width) {
    const SigmoidCall call = {at<void>(out), at(x), at(gate), x_stride, gate_stride, rows, width, type_of(kind)};
    at_least("rows", rows, 0);
    at_least("width", width, 0);
    const nb::gil_scoped_release released;
    submit(sigmoid_gate, call);
}

}  // namespace

void bind_states(nb::module_& m) {
    m.def("short_conv", &conv, nb::arg("kind"), nb::arg("out"), nb::arg("x"), nb::arg("gates"), nb::arg("weight"),
          nb::arg("bias"), nb::arg("state"), nb::arg("x_stride"), nb::arg("gate_stride"), nb::arg("channels"), nb::arg("taps"),
          nb::arg("silu"), nb::arg("rows"),
          "Each channel of x over its request's last tokens, as quintet/ops/states.py has it. `kind` is 0 for float32, 1 for "
          "bfloat16, 2 for float16; addresses, and token strides in elements; gates and bias may be 0. rows: (query_start_loc, block_table, "
          "requests, columns, units, drafts), see csrc/cpu/kernels/states.h.");
    m.def("state_space", &space, nb::arg("kind"), nb::arg("out"), nb::arg("x"), nb::arg("dt"), nb::arg("into"),
          nb::arg("out_of"), nb::arg("a_log"), nb::arg("dt_bias"), nb::arg("skip"), nb::arg("steps"), nb::arg("sides"),
          nb::arg("state"), nb::arg("strides"), nb::arg("tokens"), nb::arg("heads"), nb::arg("groups"), nb::arg("dim"),
          nb::arg("width"), nb::arg("unit"), nb::arg("least"), nb::arg("rows"),
          "Of x, dt, into and out_of, whose strides come in this order; steps [2, tokens, heads] and sides [2, tokens, "
          "groups, width] are scratch in float32.");
    m.def("selective_scan", &selective, nb::arg("kind"), nb::arg("out"), nb::arg("x"), nb::arg("dt"), nb::arg("into"),
          nb::arg("out_of"), nb::arg("a_log"), nb::arg("dt_bias"), nb::arg("skip"), nb::arg("sides"), nb::arg("state"),
          nb::arg("strides"), nb::arg("tokens"), nb::arg("channels"), nb::arg("width"), nb::arg("rows"),
          "Of x, dt, into and out_of, whose strides come in this order; sides [2, tokens, width] is scratch in float32.");
    m.def("delta_rule", &delta, nb::arg("kind"), nb::arg("out"), nb::arg("q"), nb::arg("k"), nb::arg("v"), nb::arg("forget"),
          nb::arg("learn"), nb::arg("a_log"), nb::arg("dt_bias"), nb::arg("steps"), nb::arg("units"), nb::arg("state"),
          nb::arg("strides"), nb::arg("tokens"), nb::arg("heads"), nb::arg("groups"), nb::arg("values"), nb::arg("width"),
          nb::arg("unit"), nb::arg("by_channel"), nb::arg("lower_bound"), nb::arg("beta_scale"), nb::arg("rows"),
          "Of q, k, v, forget and learn, whose strides come in this order; steps, [tokens, heads] and as many as forget, and "
          "units [2, tokens, groups, width], are scratch in float32. by_channel: forget and dt_bias have numbers of a key each.");
    m.def("gated_norm", &norm, nb::arg("kind"), nb::arg("out"), nb::arg("x"), nb::arg("gate"), nb::arg("weight"),
          nb::arg("gate_stride"), nb::arg("tokens"), nb::arg("pieces"), nb::arg("width"), nb::arg("weights"), nb::arg("eps"),
          nb::arg("after"), "Of x, float32 and contiguous; a weight of 0 is none.");
    m.def("sigmoid_gate", &sigmoid, nb::arg("kind"), nb::arg("out"), nb::arg("x"), nb::arg("gate"), nb::arg("x_stride"),
          nb::arg("gate_stride"), nb::arg("rows"), nb::arg("width"), "x times the sigmoid of the gate.");
}

}  // namespace quintet::cpu
