// Attention within a step without Python: buffers of the exact size, for the sanitizers, and a scalar reference in double.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "cpu/features.h"
#include "cpu/attention/whole_attention.h"
#include "tests/isas.h"

int whole_attention_failures();

namespace {

namespace cpu = quintet::cpu;

constexpr long kReach = 11;

int failures = 0;

void fail(const char* what, const char* isa, int type, double off) {
    ++failures;
    std::printf("FAILED: %s: %s, type %d: off by %g\n", what, isa, type, off);
}

struct Shape {
    long heads, kv_heads, dim, window;
    bool causal;
    float softcap;
    bool more;  // sinks, slopes and biases
};

// From -2 to 2, in steps that bfloat16 holds exactly.
float number(long i) { return static_cast<float>((i * 37 + i / 7 * 11) % 65 - 32) / 16.0F; }

// q, k and v of a token stand side by side, as one product leaves them.
struct Step {
    Shape shape;
    bool half;  // bfloat16
    std::vector<int32_t> query_start_loc;
    std::vector<float> sinks, slopes, biases;  // of keys up to kReach away
    std::vector<uint8_t> qkv, out;

    Step(const Shape& of, bool bfloat16, const std::vector<int32_t>& seq_lens) : shape(of), half(bfloat16), query_start_loc{0} {
        for (const int32_t length : seq_lens) query_start_loc.push_back(query_start_loc.back() + length);
        qkv.resize(static_cast<size_t>(query_start_loc.back() * stride() * size()));
        out.resize(static_cast<size_t>(query_start_loc.back() * of.heads * of.dim * size()));
        for (long i = 0; i < query_start_loc.back() * stride(); ++i) put(number(i + i / 101), i);
        for (long h = 0; of.more && h < of.heads; ++h) {
            sinks.push_back(number(h));
            slopes.push_back(std::ldexp(1.0F, -static_cast<int>(h) - 1));
            for (long i = 0; i < 2 * kReach + 1; ++i) biases.push_back(number(i + 5 * h));
        }
    }

    long size() const { return half ? 2 : 4; }
    long stride() const { return (shape.heads + 2 * shape.kv_heads) * shape.dim; }

    void put(float x, long i) {
        uint32_t bits;
        std::memcpy(&bits, &x, sizeof bits);
        const uint32_t upper = bits >> 16;
        std::memcpy(qkv.data() + i * size(), half ? &upper : &bits, static_cast<size_t>(size()));
    }

    double get(const std::vector<uint8_t>& from, long i) const {
        uint32_t bits = 0;
        std::memcpy(&bits, from.data() + i * size(), static_cast<size_t>(size()));
        if (half) bits <<= 16;
        float x;
        std::memcpy(&x, &bits, sizeof x);
        return x;
    }

    void run() {
        const long q = shape.heads * shape.dim, kv = shape.kv_heads * shape.dim;
        cpu::whole_attention({out.data(), qkv.data(), qkv.data() + q * size(), qkv.data() + (q + kv) * size(),
                              shape.more ? sinks.data() : nullptr, shape.more ? slopes.data() : nullptr,
                              shape.more ? biases.data() : nullptr, kReach, stride(), stride(), stride(), shape.heads, shape.kv_heads, shape.dim, shape.window, 0, shape.causal, 0.25F,
                              shape.softcap},
                             {query_start_loc.data(), query_start_loc.back(), static_cast<long>(query_start_loc.size()) - 1},
                             half ? cpu::kBfloat16 : cpu::kFloat32);
    }

    bool seen(long own, long other) const {
        if (shape.causal && other > own) return false;
        return shape.window == 0 || std::labs(other - own) < shape.window;
    }

    // The largest difference between what came out for a token's head and the textbook.
    double off(size_t r, long own, long head) const {
        const long first = query_start_loc[r], length = query_start_loc[r + 1] - first, group = shape.heads / shape.kv_heads;
        const long q = (first + own) * stride() + head * shape.dim;
        const size_t h = static_cast<size_t>(head);
        std::vector<double> acc(static_cast<size_t>(shape.dim), 0.0);
        double total = shape.more ? std::exp(static_cast<double>(sinks[h])) : 0.0;
        for (long p = 0; p < length; ++p) {
            if (!seen(own, p)) continue;
            const long k = (first + p) * stride() + (shape.heads + head / group) * shape.dim, v = k + shape.kv_heads * shape.dim;
            double score = 0.0;
            for (long i = 0; i < shape.dim; ++i) score += get(qkv, q + i) * get(qkv, k + i) * 0.25;
            if (shape.softcap > 0) score = shape.softcap * std::tanh(score / shape.softcap);
            if (shape.more) {
                const long apart = std::max(-kReach, std::min(kReach, p - own));
                score -= slopes[h] * static_cast<double>(std::labs(p - own));
                score += biases[h * (2 * kReach + 1) + static_cast<size_t>(apart + kReach)];
            }
            const double weight = std::exp(score);
            total += weight;
            for (long i = 0; i < shape.dim; ++i) acc[static_cast<size_t>(i)] += weight * get(qkv, v + i);
        }
        double worst = 0.0;
        for (long i = 0; i < shape.dim; ++i) {
            const double got = get(out, ((first + own) * shape.heads + head) * shape.dim + i);
            const double apart = std::fabs(got - acc[static_cast<size_t>(i)] / total);
            worst = apart <= worst ? worst : apart;  // NaN is the worst
        }
        return worst;
    }
};

void it_is_the_textbooks(const char* isa, const Shape& shape, bool half) {
    Step step(shape, half, {70, 1, 130, 33});
    step.run();
    for (size_t r = 0; r + 1 < step.query_start_loc.size(); ++r) {
        const long length = step.query_start_loc[r + 1] - step.query_start_loc[r];
        for (long t = 0; t < length; t += t + 4 < length ? 3 : 1) {
            for (long head = 0; head < shape.heads; ++head) {
                const double off = step.off(r, t, head);
                if (!(off <= (half ? 1.6e-2 : 2e-5))) return fail("attention within a step", isa, half, off);
            }
        }
    }
}

// A request of others, and its parts left to threads: the same bits as alone in one thread.
void company_changes_no_bit(const char* isa, const Shape& shape, bool half) {
    Step alone(shape, half, {200}), beside(shape, half, {200, 7, 31});
    beside.run();
    const int threads = quintet::pool_threads();
    quintet::set_pool_threads(1);
    alone.run();
    quintet::set_pool_threads(threads);
    const long numbers = 200 * alone.stride() * alone.size();
    if (std::memcmp(alone.qkv.data(), beside.qkv.data(), static_cast<size_t>(numbers)) != 0) fail("the test", isa, half, 0.0);
    if (std::memcmp(alone.out.data(), beside.out.data(), alone.out.size()) != 0) fail("company changes no bit", isa, half, 0.0);
}

void what_points_outside_is_refused() {
    Step step({2, 1, 16, 0, false, 0.0F, false}, false, {20, 3});
    const long tokens = step.query_start_loc.back();
    for (const int32_t wrong : {static_cast<int32_t>(tokens) + 1, -1}) {
        step.query_start_loc[1] = wrong;
        try {
            cpu::whole_attention({step.out.data(), step.qkv.data(), step.qkv.data(), step.qkv.data(), nullptr, nullptr, nullptr, 0, 64,
                                  64, 64, 2, 1, 16, 0, 0, false, 1.0F, 0.0F}, {step.query_start_loc.data(), tokens, 2}, cpu::kFloat32);
            fail("what points outside is refused", "", 0, 0.0);
        } catch (const std::invalid_argument&) {
        }
    }
}

}  // namespace

int whole_attention_failures() {
    const Shape shapes[] = {{4, 2, 32, 0, false, 0.0F, false}, {3, 3, 12, 0, false, 0.0F, false},
                            {6, 1, 64, 9, false, 0.0F, false}, {2, 2, 40, 0, true, 4.0F, true},
                            {2, 1, 7, 20, false, 0.0F, true},  {1, 1, 128, 70, true, 0.0F, false}};
    with_each_isa([&] {
        const char* const isa = cpu::isa_name(cpu::chosen_isa());
        for (const Shape& shape : shapes) {
            for (const bool half : {false, true}) {
                it_is_the_textbooks(isa, shape, half);
                company_changes_no_bit(isa, shape, half);
            }
        }
    });
    what_points_outside_is_refused();
    return failures;
}
