#include "cpu/elementwise/hyper_streams.h"

#include <cmath>
#include <cstring>

#include "cpu/kernels/vectors_baseline.h"
#include "cpu/rows.h"

namespace quintet::cpu {

namespace {

float sigmoid(float x) { return 1.0F / (1.0F + std::exp(-x)); }

// x [n, n] in place: softmax of rows + eps, then columns and rows in turns divided by their sums + eps.
void make_doubly_stochastic(float* x, long n, float eps, long iterations) {
    for (long j = 0; j < n; ++j) {
        float* const row = x + j * n;
        float most = row[0], total = 0.0F;
        for (long k = 1; k < n; ++k) most = row[k] > most ? row[k] : most;
        for (long k = 0; k < n; ++k) total += row[k] = std::exp(row[k] - most);
        for (long k = 0; k < n; ++k) row[k] = row[k] / total + eps;
    }
    const auto divide = [=](long lines, long step) {  // lines apart by `lines`, their numbers by `step`
        for (long line = 0; line < n; ++line) {
            float total = 0.0F;
            for (long k = 0; k < n; ++k) total += x[line * lines + k * step];
            for (long k = 0; k < n; ++k) x[line * lines + k * step] /= total + eps;
        }
    };
    divide(1, n);
    for (long turn = 1; turn < iterations; ++turn) {
        divide(n, 1);
        divide(1, n);
    }
}

template <typename E>
void collapse(const MixedStreamsCall& c) {
    const long n = c.streams, width = c.width;
    for_rows(c.tokens, (n + 1) * width * static_cast<long>(sizeof(E)), [&](long first, long last) {
        for (long token = first; token < last; ++token) {
            const float* const gates = c.gates + token * c.gate_stride;
            const E* const x = static_cast<const E*>(c.x) + token * n * width;
            E* const out = static_cast<E*>(c.out) + token * width;
            for (long at = 0; at < width; at += kLanes) {
                Floats sum = load_some(x + at, width - at) * gates[0];
                for (long i = 1; i < n; ++i) sum = fma(load_some(x + i * width + at, width - at), splat(gates[i]), sum);
                store_some(out + at, sum, width - at);
            }
        }
    });
}

template <typename E>
void expand(const MixedStreamsCall& c) {
    const long n = c.streams, width = c.width;
    for_rows(c.tokens, (2 * n + 1) * width * static_cast<long>(sizeof(E)), [&](long first, long last) {
        for (long token = first; token < last; ++token) {
            const float *const outputs = c.gates + token * c.gate_stride + n, *const matrix = outputs + n;
            const E* const x = static_cast<const E*>(c.x) + token * n * width;
            const E* const made = static_cast<const E*>(c.layer_output) + token * width;
            E* const out = static_cast<E*>(c.out) + token * n * width;
            for (long at = 0; at < width; at += kLanes) {
                const long left = width - at;
                const Floats y = load_some(made + at, left);
                Floats in[kMostStreams];
                for (long j = 0; j < n; ++j) in[j] = load_some(x + j * width + at, left);
                for (long k = 0; k < n; ++k) {
                    Floats sum = y * outputs[k];
                    if (!c.matrices) sum += in[k];
                    for (long j = 0; c.matrices && j < n; ++j) sum = fma(in[j], splat(matrix[j * n + k]), sum);
                    store_some(out + k * width + at, sum, left);
                }
            }
        }
    });
}

template <typename Call>
void by_type(const Call& call, void (*floats)(const Call&), void (*brain)(const Call&), void (*half)(const Call&)) {
    (call.type == FloatType::float32 ? floats : call.type == FloatType::bfloat16 ? brain : half)(call);
}

}  // namespace

void stream_gates(const StreamGatesCall& c) {
    const long n = c.streams;
    for_rows(c.tokens, c.width * 64, [&](long first, long last) {  // an exponential is as long as some loads
        for (long token = first; token < last; ++token) {
            const float* const logits = c.logits + token * c.width;
            float* const out = c.out + token * c.width;
            for (long i = 0; i < n; ++i) out[i] = sigmoid(logits[i] * c.scale[0] + c.base[i]) + c.eps;
            for (long i = n; i < 2 * n && i < c.width; ++i) {
                out[i] = sigmoid(logits[i] * c.scale[1] + c.base[i]) * c.magnitude + c.output_eps;
            }
            if (c.width <= 2 * n) continue;
            for (long i = 2 * n; i < c.width; ++i) out[i] = logits[i] * c.scale[2] + c.base[i];
            make_doubly_stochastic(out + 2 * n, n, c.eps, c.iterations);
        }
    });
}

void collapse_streams(const MixedStreamsCall& c) { by_type(c, collapse<float>, collapse<Bfloat16>, collapse<Float16>); }
void expand_streams(const MixedStreamsCall& c) { by_type(c, expand<float>, expand<Bfloat16>, expand<Float16>); }

void repeat_streams(const MixedStreamsCall& c) {
    const long bytes = c.width * size_of(c.type);
    for (long token = 0; token < c.tokens; ++token) {
        for (long i = 0; i < c.streams; ++i) {
            std::memcpy(static_cast<char*>(c.out) + (token * c.streams + i) * bytes,
                        static_cast<const char*>(c.x) + token * bytes, static_cast<size_t>(bytes));
        }
    }
}

}  // namespace quintet::cpu
