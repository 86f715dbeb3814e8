// The mixture of experts for Python.
#include <algorithm>
#include <climits>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include <nanobind/stl/vector.h>

#include "cpu/bindings/bind.h"
#include "cpu/bindings/bind_checks.h"
#include "cpu/graph.h"
#include "cpu/kernels/elementwise.h"
#include "cpu/moe/moe.h"

namespace nb = nanobind;

namespace quintet::cpu {

namespace {

template <typename T = void>
T* at(uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

void within(const char* name, long value, long least, long most) {
    if (value >= least && value <= most) return;
    throw std::invalid_argument(std::string(name) + " must be " + std::to_string(least) + " to " + std::to_string(most) +
                                ", not " + std::to_string(value));
}

// The same numbers name both enumerations' types.
int type_of(int kind) {
    within("kind (0: float32, 1: bfloat16, 2: float16)", kind, 0, kFloatTypes - 1);
    return kind;
}

template <bool Limited>
void choose(int kind, uintptr_t weights, uintptr_t ids, uintptr_t logits, uintptr_t bias, long tokens, long experts,
            long stride, long k, long groups, long kept, bool renormalize) {
    const FloatType type = static_cast<FloatType>(type_of(kind));
    within("tokens", tokens, 0, INT32_MAX);
    within("experts", experts, 1, INT32_MAX);
    within("k", k, 1, experts);
    within("groups", groups, 1, experts);
    within("kept", kept, 1, groups);
    if (experts % groups) throw std::invalid_argument("experts must be a multiple of groups");
    if (Limited && !bias) throw std::invalid_argument("route_limited() has a bias");
    if (kept < groups && !Limited) within("experts of a group", experts / groups, 2, experts);
    const nb::gil_scoped_release released;
    submit(Limited ? route_limited : bias ? route_grouped : route, {at<float>(weights), at<int32_t>(ids), at(logits), at<const float>(bias), tokens,
                                          experts, stride, k, groups, kept, renormalize, type, 0.0F});
}

void choose_sparsely(int kind, uintptr_t weights, uintptr_t ids, uintptr_t logits, long tokens, long experts, long stride,
                     long k, float margin) {
    const FloatType type = static_cast<FloatType>(type_of(kind));
    within("tokens", tokens, 0, INT32_MAX);
    within("experts", experts, 1, INT32_MAX);
    within("k", k, 1, experts);
    const nb::gil_scoped_release released;
    submit(route_sparse, {at<float>(weights), at<int32_t>(ids), at(logits), nullptr, tokens, experts, stride, k, 1, 1, false,
                          type, margin});
}

void find(int kind, uintptr_t out, uintptr_t ids, uintptr_t x, uintptr_t places, long tokens, long k, long experts,
          long columns, long x_stride, long seen) {
    const FloatType type = static_cast<FloatType>(type_of(kind));
    within("tokens", tokens, 0, INT32_MAX);
    within("k", k, 1, INT32_MAX);
    within("experts", experts, 1, INT32_MAX);
    within("columns", columns, 1, INT32_MAX);
    within("seen", seen, 0, INT32_MAX);
    if (tokens > 1) within("x_stride", x_stride, seen, LONG_MAX);
    const nb::gil_scoped_release released;
    submit(local_experts, {at<int32_t>(out), at<const int32_t>(ids), at(x), at<const int32_t>(places), tokens, k, experts,
                           columns, x_stride, seen, type});
}

void count(uintptr_t loads, uintptr_t ids, long count, long experts) {
    within("count", count, 0, LONG_MAX);
    within("experts", experts, 1, INT32_MAX);
    const nb::gil_scoped_release released;
    submit(count_experts, {at<int32_t>(loads), at<const int32_t>(ids), count, experts});
}

void multiply(int kind, uintptr_t out, uintptr_t x, long x_stride, uintptr_t weight, uintptr_t counts, long rows,
              long experts, long inputs, long outputs) {
    const LinearType type = static_cast<LinearType>(type_of(kind));
    within("rows", rows, 0, INT32_MAX);
    within("experts", experts, 0, INT32_MAX);
    within("inputs", inputs, 1, INT32_MAX);
    within("outputs", outputs, 1, INT32_MAX);
    if (rows > 1) within("x_stride", x_stride, inputs, LONG_MAX);
    const nb::gil_scoped_release released;
    submit(grouped_linear, {at(out), at(x), at(weight), at<const int32_t>(counts), rows, experts, inputs, outputs, x_stride,
                            type});
}

void serve(int kind, uintptr_t out, uintptr_t x, long x_stride, uintptr_t gate_up, uintptr_t down, uintptr_t weights,
           uintptr_t ids, uintptr_t first, uintptr_t second, uintptr_t numbers, long tokens, long count, long k, long hidden,
           long inner, int activation, uintptr_t gate_up_bias, uintptr_t down_bias, float alpha, float limit,
           const std::vector<long>& lora) {
    const LinearType type = static_cast<LinearType>(type_of(kind));
    within("tokens", tokens, 0, INT32_MAX);
    within("experts", count, 1, INT32_MAX);
    within("k", k, 1, INT32_MAX / std::max(1L, tokens));  // rows are counted in 32 bits
    within("hidden", hidden, 1, INT32_MAX);
    within("inner", inner, 1, INT32_MAX / 2);
    within("activation", activation, 0, kActivations - 1);
    if (tokens > 1) within("x_stride", x_stride, hidden, LONG_MAX);
    const nb::gil_scoped_release released;
    submit(experts, {at(out), at(x), at(gate_up), at(down), at<const float>(weights), at<const int32_t>(ids), at(first),
                     at(second), at<int32_t>(numbers), tokens, count, k, hidden, inner, x_stride, activation, type,
                     at(gate_up_bias), at(down_bias), alpha, limit, experts_lora(lora, count)});
}

}  // namespace

void bind_moe(nb::module_& m) {
    m.attr("EXPERT_BIASES") = true;  // experts() and quantized_experts() know them
    m.attr("EXPERT_LORA") = true;    // and adapters of experts
    m.def("route", &choose<false>, nb::arg("kind"), nb::arg("weights"), nb::arg("ids"), nb::arg("logits"), nb::arg("bias"),
          nb::arg("tokens"), nb::arg("experts"), nb::arg("stride"), nb::arg("k"), nb::arg("groups"), nb::arg("kept"),
          nb::arg("renormalize"),
          "The k largest of logits [tokens, experts]: float32 weights and int32 ids [tokens, k]. With a float32 bias by "
          "sigmoid, out of `kept` of the groups; without (0) by softmax. `kind` is 0 for float32, 1 for bfloat16, 2 for "
          "float16; addresses, and sizes in elements.");
    m.def("route_limited", &choose<true>, nb::arg("kind"), nb::arg("weights"), nb::arg("ids"), nb::arg("logits"),
          nb::arg("bias"), nb::arg("tokens"), nb::arg("experts"), nb::arg("stride"), nb::arg("k"), nb::arg("groups"),
          nb::arg("kept"), nb::arg("renormalize"),
          "route() by softmax, chosen by that plus a float32 bias, out of the `kept` groups with the largest.");
    m.def("route_sparse", &choose_sparsely, nb::arg("kind"), nb::arg("weights"), nb::arg("ids"), nb::arg("logits"),
          nb::arg("tokens"), nb::arg("experts"), nb::arg("stride"), nb::arg("k"), nb::arg("margin"),
          "route() by one expert after the other, each by softmax of those that are left and within the margin of it.");
    m.def("local_experts", &find, nb::arg("kind"), nb::arg("out"), nb::arg("ids"), nb::arg("x"), nb::arg("places"),
          nb::arg("tokens"), nb::arg("k"), nb::arg("experts"), nb::arg("columns"), nb::arg("x_stride"), nb::arg("seen"),
          "Into int32 out [tokens, k], of places [experts, columns] those of ids [tokens, k], -1 for ids that are none. The "
          "column is chosen by the bits of a token's first `seen` numbers in x, in float32.");
    m.def("count_experts", &count, nb::arg("loads"), nb::arg("ids"), nb::arg("count"), nb::arg("experts"),
          "Adds to int32 loads [experts] how often each is among `count` ids.");
    m.def("grouped_linear", &multiply, nb::arg("kind"), nb::arg("out"), nb::arg("x"), nb::arg("x_stride"),
          nb::arg("weight"), nb::arg("counts"), nb::arg("rows"), nb::arg("experts"), nb::arg("inputs"), nb::arg("outputs"),
          "x [rows, inputs] times packed weights, the first counts[0] (int32) rows times the first, and so on, into out "
          "[rows, outputs]; other rows give 0. ValueError for counts that do not fit.");
    m.def("experts", &serve, nb::arg("kind"), nb::arg("out"), nb::arg("x"), nb::arg("x_stride"), nb::arg("gate_up"),
          nb::arg("down"), nb::arg("weights"), nb::arg("ids"), nb::arg("first"), nb::arg("second"), nb::arg("numbers"),
          nb::arg("tokens"), nb::arg("experts"), nb::arg("k"), nb::arg("hidden"), nb::arg("inner"), nb::arg("activation"),
          nb::arg("gate_up_bias") = 0, nb::arg("down_bias") = 0, nb::arg("alpha") = 0.0F, nb::arg("limit") = 0.0F,
          nb::arg("lora") = std::vector<long>{},
          "x [tokens, hidden] through the gated experts of each token, added up by float32 weights [tokens, k] in the order "
          "of k. Scratch: `first` [tokens k, max(hidden, inner)], `second` [tokens k, max(hidden, 2 inner)], int32 "
          "`numbers` [tokens k + 2 experts], and with adapters 2 tokens k more. With biases [experts, 2 inner] and [experts, hidden], outputs of gate and up take "
          "turns, and what comes out of them is (up + 1) * gate * sigmoid(alpha * gate), both within the limit; without biases the limit, if it is not 0, holds for gate and up before the activation. `lora`: empty, "
          "or the addresses and sizes of adapters in the order of ExpertsLora in csrc/cpu/moe/moe.h.");
}

}  // namespace quintet::cpu
