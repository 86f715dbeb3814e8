// The sampling ops for Python.
#include <stdexcept>
#include <string>

#include "cpu/bindings/bind.h"
#include "cpu/graph.h"
#include "cpu/sampling/sampling.h"

namespace nb = nanobind;

namespace quintet::cpu {

namespace {

template <typename T>
T* at(uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

LogitType type_of(int bits, bool brain) {
    if (bits == 32) return LogitType::float32;
    if (bits == 16) return brain ? LogitType::bfloat16 : LogitType::float16;
    throw std::invalid_argument("logits have 16 or 32 bits, not " + std::to_string(bits));
}

template <typename T>
Rows<T> rows_of(uintptr_t address, long stride, long rows, long vocab) {
    if (rows < 0) throw std::invalid_argument("rows must be 0 or more, not " + std::to_string(rows));
    if (vocab < 1 || vocab > INT32_MAX) {
        throw std::invalid_argument("vocab must be 1 to " + std::to_string(INT32_MAX) + ", not " + std::to_string(vocab));
    }
    if (rows > 1 && stride < vocab) throw std::invalid_argument("rows of logits overlap");
    return {at<T>(address), stride, rows, vocab};
}

Places places_of(uintptr_t rows, uintptr_t ids, long count) {
    if (count < 0) throw std::invalid_argument("places must be 0 or more, not " + std::to_string(count));
    return {at<const int32_t>(rows), at<const int32_t>(ids), count};
}

struct Widening {
    Rows<const void> rows;
    LogitType type;
    float* out;
};

void widen_rows(const Widening& call) { widen(call.rows, call.type, call.out); }

// Logits of a request for each row, as every function below takes them first.
struct Table {
    uintptr_t logits;
    long stride, rows, vocab;

    Rows<const float> read() const { return rows_of<const float>(logits, stride, rows, vocab); }
    Rows<float> write() const { return rows_of<float>(logits, stride, rows, vocab); }
    Rows<const void> any() const { return rows_of<const void>(logits, stride, rows, vocab); }
};

DrawColumns columns_of(uintptr_t temperature, uintptr_t top_k, uintptr_t top_p, uintptr_t log_min_p, uintptr_t keys,
                       uintptr_t positions) {
    return {at<const float>(temperature), at<const int32_t>(top_k), at<const float>(top_p), at<const float>(log_min_p),
            at<const int32_t>(keys), at<const int32_t>(positions)};
}

void bind_draws(nb::module_& m) {
    m.def(
        "greedy",
        [](const Table& logits, int bits, bool brain, uintptr_t out) {
            const Rows<const void> rows = logits.any();
            const LogitType type = type_of(bits, brain);
            const nb::gil_scoped_release released;
            greedy(rows, type, at<int32_t>(out));
        },
        nb::arg("logits"), nb::arg("bits"), nb::arg("brain"), nb::arg("out"),
        "The first of each row's largest, of floats of 32 or 16 bits (`brain`: bfloat16); -1 if it is not finite.");
    m.def(
        "sample",
        [](const Table& logits, uintptr_t temperature, uintptr_t top_k, uintptr_t top_p, uintptr_t log_min_p,
           uintptr_t keys, uintptr_t positions, uintptr_t out) {
            const Rows<const float> rows = logits.read();
            const DrawColumns columns = columns_of(temperature, top_k, top_p, log_min_p, keys, positions);
            const nb::gil_scoped_release released;
            return sample(rows, columns, at<int32_t>(out));
        },
        nb::arg("logits"), nb::arg("temperature"), nb::arg("top_k"), nb::arg("top_p"), nb::arg("log_min_p"),
        nb::arg("keys"), nb::arg("positions"), nb::arg("out"),
        "A token for each row; -2 where the last bit of a logarithm or an exponential decides. Returns how many are -2.");
    m.def(
        "filter_logits",
        [](const Table& logits, uintptr_t top_k, uintptr_t top_p, uintptr_t log_min_p, uintptr_t out,
           uintptr_t unsure) {
            const Rows<const float> rows = logits.read();
            const DrawColumns columns = columns_of(0, top_k, top_p, log_min_p, 0, 0);
            const nb::gil_scoped_release released;
            return filter_logits(rows, columns, at<float>(out), at<int32_t>(unsure));
        },
        nb::arg("logits"), nb::arg("top_k"), nb::arg("top_p"), nb::arg("log_min_p"), nb::arg("out"), nb::arg("unsure"),
        "The logits that stay, and -inf; unsure is 1 where the last bit of an exponential decides. Returns their number.");
    m.def(
        "gumbel",
        [](uintptr_t keys, uintptr_t positions, uintptr_t ids, long rows, long id_rows, long count, uintptr_t out) {
            if (rows < 0 || count < 0) throw std::invalid_argument("sizes must be 0 or more");
            if (id_rows != 1 && id_rows != rows) throw std::invalid_argument("token_ids has 1 row or one for each key");
            const nb::gil_scoped_release released;
            gumbel(at<const int32_t>(keys), at<const int32_t>(positions), at<const int32_t>(ids), rows, id_rows, count,
                   at<float>(out));
        },
        nb::arg("keys"), nb::arg("positions"), nb::arg("token_ids"), nb::arg("rows"), nb::arg("id_rows"),
        nb::arg("count"), nb::arg("out"));
    m.def(
        "top_logprobs",
        [](const Table& logits, uintptr_t tokens, uintptr_t wanted, long num, bool normalize, uintptr_t ids,
           uintptr_t values, uintptr_t ranks) {
            const Rows<const float> rows = logits.read();
            const TopLogprobs asked{at<const int32_t>(tokens), at<const int32_t>(wanted), num, normalize,
                                    at<int32_t>(ids), at<float>(values), at<int32_t>(ranks)};
            const nb::gil_scoped_release released;
            top_logprobs(rows, asked);
        },
        nb::arg("logits"), nb::arg("token_ids"), nb::arg("wanted"), nb::arg("num"), nb::arg("normalize"),
        nb::arg("ids"), nb::arg("values"), nb::arg("ranks"));
}

void bind_edits(nb::module_& m) {
    m.def(
        "widen",
        [](const Table& logits, int bits, bool brain, uintptr_t out) {
            const Rows<const void> rows = logits.any();
            const LogitType type = type_of(bits, brain);
            const nb::gil_scoped_release released;
            submit(widen_rows, {rows, type, at<float>(out)});  // routers call it within a step
        },
        nb::arg("logits"), nb::arg("bits"), nb::arg("brain"), nb::arg("out"));
    m.def(
        "scale_logits",
        [](const Table& logits, uintptr_t temperature, uintptr_t out) {
            const Rows<const float> rows = logits.read();
            const nb::gil_scoped_release released;
            scale_logits(rows, at<const float>(temperature), at<float>(out));
        },
        nb::arg("logits"), nb::arg("temperature"), nb::arg("out"));
    m.def(
        "penalize",
        [](const Table& logits, uintptr_t rows, uintptr_t ids, long count, uintptr_t counts, uintptr_t penalties) {
            penalize(logits.write(), places_of(rows, ids, count), at<const int32_t>(counts), at<const float>(penalties));
        },
        nb::arg("logits"), nb::arg("rows"), nb::arg("ids"), nb::arg("count"), nb::arg("counts"), nb::arg("penalties"));
    m.def(
        "bias_tokens",
        [](const Table& logits, uintptr_t rows, uintptr_t ids, long count, uintptr_t values) {
            bias_tokens(logits.write(), places_of(rows, ids, count), at<const float>(values));
        },
        nb::arg("logits"), nb::arg("rows"), nb::arg("ids"), nb::arg("count"), nb::arg("values"));
    m.def(
        "ban_tokens",
        [](const Table& logits, uintptr_t rows, uintptr_t ids, long count) {
            ban_tokens(logits.write(), places_of(rows, ids, count));
        },
        nb::arg("logits"), nb::arg("rows"), nb::arg("ids"), nb::arg("count"));
    m.def(
        "keep_tokens",
        [](const Table& logits, uintptr_t bits) {
            const Rows<float> rows = logits.write();
            const nb::gil_scoped_release released;
            keep_tokens(rows, at<const int32_t>(bits));
        },
        nb::arg("logits"), nb::arg("bits"));
}

}  // namespace

void bind_sampling(nb::module_& m) {
    nb::class_<Table>(m, "Logits", "Rows of logits by their address; `stride` elements from row to row.")
        .def(
            "__init__",
            [](Table* self, uintptr_t logits, long stride, long rows, long vocab) {
                new (self) Table{logits, stride, rows, vocab};
            },
            nb::arg("address"), nb::arg("stride"), nb::arg("rows"), nb::arg("vocab"));
    bind_draws(m);
    bind_edits(m);
}

}  // namespace quintet::cpu
