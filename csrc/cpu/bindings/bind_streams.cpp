// What is computed around layers of several streams, for Python.
#include <stdexcept>
#include <string>
#include <vector>

#include <nanobind/stl/vector.h>

#include "cpu/elementwise/hyper_streams.h"
#include "cpu/elementwise/streams.h"
#include "cpu/bindings/bind.h"
#include "cpu/graph.h"

namespace nb = nanobind;

namespace quintet::cpu {

namespace {

template <typename T = void>
T* at(uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

void within(const char* name, long value, long least, long most) {
    if (value < least || value > most) {
        throw std::invalid_argument(std::string(name) + " must be " + std::to_string(least) + " to " +
                                    std::to_string(most) + ", not " + std::to_string(value));
    }
}

FloatType type_of(int kind) {
    within("kind (0: float32, 1: bfloat16, 2: float16)", kind, 0, kFloatTypes - 1);
    return static_cast<FloatType>(kind);
}

// With `made`, correct_streams(): what is scaled is the last of `out`.
void streams(int kind, const std::vector<uintptr_t>& out, const std::vector<uintptr_t>& in, uintptr_t coefs, uintptr_t made,
             uintptr_t weight, long tokens, long width, long coef_stride, long active) {
    StreamsCall call{};
    call.type = type_of(kind);
    const long count = static_cast<long>(in.size());
    within("streams", count, 1, kMostStreams);
    if (out.size() != in.size() + (made ? 1 : 0)) throw std::invalid_argument("as many streams come out as go in");
    within("tokens", tokens, 0, INT32_MAX);
    within("width", width, 1, INT32_MAX);
    within("active", active, 0, count - 1);
    for (long i = 0; i < count; ++i) {
        call.out[i] = at(out[static_cast<size_t>(i)]);
        call.in[i] = at<const void>(in[static_cast<size_t>(i)]);
    }
    call.coefs = at(coefs);
    call.made = at(made);
    call.weight = at(weight);
    call.scaled = made ? at(out.back()) : nullptr;
    call.tokens = tokens;
    call.width = width;
    call.count = count;
    call.coef_stride = coef_stride;
    call.active = active;
    const nb::gil_scoped_release released;
    submit(made ? correct_streams : predict_streams, call);
}

// With `like`, as_large().
void sized(int kind, uintptr_t out, uintptr_t x, uintptr_t like, long tokens, long width, long stride, float deviations) {
    const FloatType type = type_of(kind);
    within("tokens", tokens, 0, INT32_MAX);
    within("width", width, 1, INT32_MAX / 2);
    const nb::gil_scoped_release released;
    submit(like ? as_large : keep_above, {at(out), at(x), at(like), tokens, width, stride, deviations, type});
}

void scale(int kind, uintptr_t out, uintptr_t x, uintptr_t factors, long tokens, long width, long stride) {
    const FloatType type = type_of(kind);
    within("tokens", tokens, 0, INT32_MAX);
    within("width", width, 1, INT32_MAX);
    const nb::gil_scoped_release released;
    submit(scale_rows, {at(out), at(x), at<const float>(factors), tokens, width, stride, type});
}

void known(uintptr_t out, uintptr_t ids, long tokens, long count) {
    within("tokens", tokens, 0, INT32_MAX);
    within("count", count, 1, INT32_MAX);
    const nb::gil_scoped_release released;
    submit(known_ids, {at<int32_t>(out), at<const int32_t>(ids), tokens, count});
}

void gates(uintptr_t out, uintptr_t logits, uintptr_t scale, uintptr_t base, long tokens, long streams, long width, float eps,
           float magnitude, float output_eps, long iterations) {
    within("tokens", tokens, 0, INT32_MAX);
    within("streams", streams, 1, kMostStreams);
    if (width != streams && width != 2 * streams && width != (2 + streams) * streams) {
        throw std::invalid_argument("width must be n, 2 n or (2 + n) n for n streams, not " + std::to_string(width));
    }
    const nb::gil_scoped_release released;
    submit(stream_gates, {at<float>(out), at<const float>(logits), at<const float>(scale), at<const float>(base), tokens,
                          streams, width, eps, magnitude, output_eps, iterations});
}

// op: 0 collapse_streams(), 1 expand_streams(), 2 repeat_streams().
void mixed(int kind, int op, uintptr_t out, uintptr_t x, uintptr_t layer_output, uintptr_t gates, long tokens, long streams,
           long width, long gate_stride, bool matrices) {
    const FloatType type = type_of(kind);
    within("op", op, 0, 2);
    within("tokens", tokens, 0, INT32_MAX);
    within("streams", streams, 1, kMostStreams);
    within("width", width, 1, INT32_MAX / kMostStreams);
    within("gate_stride", gate_stride, 0, INT32_MAX);
    const nb::gil_scoped_release released;
    submit(op == 0 ? collapse_streams : op == 1 ? expand_streams : repeat_streams,
           {at(out), at(x), at(layer_output), at<const float>(gates), tokens, streams, width, gate_stride, matrices, type});
}

}  // namespace

void bind_streams(nb::module_& m) {
    m.def("streams", &streams, nb::arg("kind"), nb::arg("out"), nb::arg("in"), nb::arg("coefs"), nb::arg("made"),
          nb::arg("weight"), nb::arg("tokens"), nb::arg("width"), nb::arg("coef_stride"), nb::arg("active"),
          "Streams [tokens, width] each plus sums of all by coefs [tokens, n n]; with `made` [tokens, width], plus what it is "
          "above the active one, by coefs [tokens, n] + 1, and behind them the active one times the weight [width].");
    m.def("sized", &sized, nb::arg("kind"), nb::arg("out"), nb::arg("x"), nb::arg("like"), nb::arg("tokens"),
          nb::arg("width"), nb::arg("stride"), nb::arg("deviations"),
          "x [tokens, width], each row as large as that of `like`. Without, x [tokens, 2 width]: what the first half of a row "
          "has above its mean and so many deviations, and the second as it is.");
    m.def("scale_rows", &scale, nb::arg("kind"), nb::arg("out"), nb::arg("x"), nb::arg("factors"), nb::arg("tokens"),
          nb::arg("width"), nb::arg("stride"), "Rows of x [tokens, width], each times its float32 factor.");
    m.def("stream_gates", &gates, nb::arg("out"), nb::arg("logits"), nb::arg("scale"), nb::arg("base"), nb::arg("tokens"),
          nb::arg("streams"), nb::arg("width"), nb::arg("eps"), nb::arg("magnitude"), nb::arg("output_eps"),
          nb::arg("iterations"), "Weights of inputs, outputs and streams, of float32 logits [tokens, width].");
    m.def("mixed_streams", &mixed, nb::arg("kind"), nb::arg("op"), nb::arg("out"), nb::arg("x"), nb::arg("layer_output"),
          nb::arg("gates"), nb::arg("tokens"), nb::arg("streams"), nb::arg("width"), nb::arg("gate_stride"),
          nb::arg("matrices"),
          "Op 0: streams [tokens, streams width] added up by gates; 1: as many, with what a layer made; 2: x [tokens, width] "
          "in each of them.");
    m.def("known_ids", &known, nb::arg("out"), nb::arg("ids"), nb::arg("tokens"), nb::arg("count"),
          "int32 ids, 0 in the place of those that are not below the count.");
}

}  // namespace quintet::cpu
