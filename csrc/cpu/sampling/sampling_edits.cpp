// Edits of logits: of whole rows, and of a list of places.
#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>

#include "cpu/sampling/sampling_rows.h"

namespace quintet::cpu {

namespace {

constexpr long kGrain = 1 << 15;  // elements that one thread goes through before another is woken for the rest

// body(row, first, last) for stretches of rows, on all threads.
template <typename Body>
void for_stretches(long rows, long vocab, const Body& body) {
    const long pieces = (vocab + kGrain - 1) / kGrain;
    parallel_for(rows * pieces, 1, [&](long begin, long end) {
        for (long i = begin; i < end; ++i) {
            const long first = i % pieces * kGrain;
            body(i / pieces, first, std::min(first + kGrain, vocab));
        }
    });
}

float float_of(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

float widened(float x, LogitType) { return x; }

float widened(uint16_t x, LogitType type) {
    if (type == LogitType::bfloat16) return float_of(static_cast<uint32_t>(x) << 16);
    const uint32_t sign = (x & 0x8000U) << 16, size = x & 0x7FFFU;
    if (size >= 0x7C00) return float_of(sign | 0x7F800000U | (size & 0x3FFU) << 13);
    const float whole = float_of(size << 13) * 0x1p112F;  // subnormals come out right, too
    return sign ? -whole : whole;
}

template <typename T>
void widen_rows(const Rows<const void>& logits, LogitType type, float* out) {
    for_stretches(logits.rows, logits.vocab, [&](long r, long first, long last) {
        const T* const row = static_cast<const T*>(logits.at) + r * logits.stride;
        float* const own = out + r * logits.vocab;
        if (type == LogitType::float16) {
            for (long i = first; i < last; ++i) own[i] = widened(row[i], LogitType::float16);
        } else {
            for (long i = first; i < last; ++i) own[i] = widened(row[i], LogitType::bfloat16);
        }
    });
}

// Calls edit(m, logit) for each place and writes what it gives. All are read first: places may be repeated.
template <typename Edit>
void at_places(const Rows<float>& logits, const Places& places, const Edit& edit) {
    const auto values = std::make_unique_for_overwrite<float[]>(static_cast<size_t>(places.count));
    for (long m = 0; m < places.count; ++m) {
        const long r = places.rows[m], id = places.ids[m];
        if (r < 0 || r >= logits.rows || id < 0 || id >= logits.vocab) {
            throw std::invalid_argument("place " + std::to_string(m) + " is row " + std::to_string(r) + ", token " +
                                        std::to_string(id) + ", and there are " + std::to_string(logits.rows) +
                                        " rows of " + std::to_string(logits.vocab) + " tokens");
        }
        values[static_cast<size_t>(m)] = edit(m, logits.row(r)[id]);
    }
    for (long m = 0; m < places.count; ++m) {
        logits.row(places.rows[m])[places.ids[m]] = values[static_cast<size_t>(m)];
    }
}

// A product rounded by itself: of two floats a double holds it exactly, and no compiler can join it to a sum.
float product(float a, float b) { return static_cast<float>(static_cast<double>(a) * static_cast<double>(b)); }

constexpr std::array<uint32_t, 32> kBits = [] {
    std::array<uint32_t, 32> bits{};
    for (uint32_t i = 0; i < bits.size(); ++i) bits[i] = 1U << i;
    return bits;
}();

// A table, and not a shift by i: every x86-64 then takes several tokens at once, and no branch guesses which are kept.
void keep_word(float* logits, uint32_t bits, long count) {
    if (bits == ~0U) return;
    if (bits == 0) {
        std::fill_n(logits, count, kNever);
    } else if (count == 32) {
        for (std::size_t i = 0; i < 32; ++i) logits[i] = (bits & kBits[i]) != 0 ? logits[i] : kNever;
    } else {
        for (long i = 0; i < count; ++i) logits[i] = (bits >> i & 1) != 0 ? logits[i] : kNever;
    }
}

}  // namespace

void widen(const Rows<const void>& logits, LogitType type, float* out) {
    if (type == LogitType::float32) {
        widen_rows<float>(logits, type, out);
    } else {
        widen_rows<uint16_t>(logits, type, out);
    }
}

void scale_logits(const Rows<const float>& logits, const float* temperature, float* out) {
    for_stretches(logits.rows, logits.vocab, [&](long r, long first, long last) {
        const float* const row = logits.row(r);
        float* const own = out + r * logits.vocab;
        const float by = temperature[r] > 0.0F ? temperature[r] : 1.0F;
        for (long i = first; i < last; ++i) own[i] = row[i] / by;
    });
}

void penalize(const Rows<float>& logits, const Places& places, const int32_t* counts, const float* penalties) {
    at_places(logits, places, [&](long m, float logit) {
        const float* const row = penalties + 3L * places.rows[m];
        const float size = logit > 0.0F ? logit / row[0] : product(logit, row[0]);
        return size - product(row[1], static_cast<float>(counts[m])) - (counts[m] > 0 ? row[2] : 0.0F);
    });
}

void bias_tokens(const Rows<float>& logits, const Places& places, const float* values) {
    at_places(logits, places, [&](long m, float logit) { return logit + values[m]; });
}

void ban_tokens(const Rows<float>& logits, const Places& places) {
    at_places(logits, places, [](long, float) { return kNever; });
}

void keep_tokens(const Rows<float>& logits, const int32_t* bits) {
    const long words = (logits.vocab + 31) / 32;
    for_stretches(logits.rows, words, [&](long r, long first, long last) {
        for (long word = first; word < last; ++word) {
            const long token = 32 * word;
            keep_word(logits.row(r) + token, static_cast<uint32_t>(bits[r * words + word]),
                      std::min(32L, logits.vocab - token));
        }
    });
}

}  // namespace quintet::cpu
