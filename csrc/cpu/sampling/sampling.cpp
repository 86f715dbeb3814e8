#include "cpu/sampling/sampling.h"

#include <cmath>
#include <cstdlib>

#include "cpu/features.h"
#include "cpu/sampling/sampling_rows.h"

namespace quintet::cpu {

namespace {

constexpr float kLargestNoise = 16.6356F;  // the largest uniform is 1 - 2**-24
constexpr int kWordBits = 23;              // of a random word that are used, from the top
constexpr uint32_t kParity = 0x1BD11BDA;

// ------------------------------------------------------------------------------------------------------------- greedy

constexpr uint32_t infinity_of(LogitType type) {
    return type == LogitType::float32 ? 0x7F800000 : type == LogitType::bfloat16 ? 0x7F80 : 0x7C00;
}

int32_t largest_token(const void* row, LogitType type, long vocab) {
    const SamplingKernels& kernel = sampling_kernels();
    const Largest most = type == LogitType::float32 ? kernel.largest32(static_cast<const int32_t*>(row), vocab)
                                                    : kernel.largest16(static_cast<const int16_t*>(row), vocab);
    const uint32_t infinity = infinity_of(type);
    const bool finite = most.size <= infinity && static_cast<uint32_t>(std::abs(most.key)) < infinity;
    return finite ? static_cast<int32_t>(most.at) : kNobody;
}

// -------------------------------------------------------------------------------------------------------------- noise

void mix(uint32_t& x0, uint32_t& x1, int by) {
    x0 += x1;
    x1 = (x1 << by | x1 >> (32 - by)) ^ x0;
}

// threefry2x32 with 20 rounds, for one token; a kernel does it for whole blocks.
uint32_t word_of(const NoiseOf& noise, uint32_t token) {
    constexpr int kRotations[2][4] = {{13, 15, 26, 6}, {17, 29, 16, 24}};
    const uint32_t schedule[3] = {noise.key[0], noise.key[1], noise.key[0] ^ noise.key[1] ^ kParity};
    uint32_t x0 = noise.position + schedule[0], x1 = token / 2 + schedule[1];
    for (uint32_t group = 0; group < 5; ++group) {
        for (const int by : kRotations[group % 2]) mix(x0, x1, by);
        x0 += schedule[(group + 1) % 3];
        x1 += schedule[(group + 2) % 3] + group + 1;
    }
    return token % 2 ? x1 : x0;
}

// Each logarithm to the nearest float32, as nearly as libm's double is to the truth.
float noise_of(uint32_t word) {
    const double uniform = (static_cast<double>(word >> (32 - kWordBits)) + 0.5) / (1 << kWordBits);
    const float rate = static_cast<float>(-std::log(uniform));
    return static_cast<float>(-std::log(static_cast<double>(rate)));
}

// No word below this gives noise of `noise` or more: 1 - exp(-x) <= x, and 2**-f <= 1 - f/2 for f in [0, 1].
uint32_t word_for(float noise) {
    if (!(noise > 0.0F)) return 0;
    const double octaves = static_cast<double>(noise) * 1.442695;  // a little under log2(e)
    const int whole = static_cast<int>(octaves);
    const double above = std::ldexp(1.0 - (octaves - whole) / 2, kWordBits - whole);
    const double least = (1 << kWordBits) - above - 1.5;
    return least > 0.0 ? static_cast<uint32_t>(least) << (32 - kWordBits) : 0;
}

NoiseOf noise_for(const int32_t* keys, const int32_t* positions, long r) {
    return {{static_cast<uint32_t>(keys[2 * r]), static_cast<uint32_t>(keys[2 * r + 1])},
            static_cast<uint32_t>(positions[r])};
}

// --------------------------------------------------------------------------------------------------------------- draw

// What both logarithms and a sum's rounding may be off by, here and in another implementation.
float margin_of(float score) { return 4e-6F + 3e-7F * std::abs(score); }

// The best of the tokens seen, in any order, and whether another is too close to call.
struct Best {
    long token = -1;
    float score = kNever, scaled = kNever;
    uint32_t word = 0;
    float rival = kNever;  // the best score but one

    void consider(long other, float logit, uint32_t bits) {
        const float sum = logit + noise_of(bits);
        const bool tie = logit == scaled && (bits ^ word) >> (32 - kWordBits) == 0;  // whatever the logarithm
        if (tie) {
            token = other < token ? other : token;
        } else if (sum > score) {
            *this = {other, sum, logit, bits, score};
        } else {
            rival = sum > rival ? sum : rival;
        }
    }
};

Best likeliest(const Logits& logits, const NoiseOf& noise) {
    long b = 0;
    while (logits.maxima[b] / logits.temperature != logits.largest) ++b;
    long token = b * kSamplingBlock;
    while (logits.row[token] != logits.maxima[b]) ++token;
    Best best;
    best.consider(token, logits.scaled(token), word_of(noise, static_cast<uint32_t>(token)));
    return best;
}

// Beginning with the likeliest token, a block is left out if no noise makes any of it win, and a token if its own
// random word shows that: logarithms are left to a few dozen.
Best draw(const Logits& logits, const NoiseOf& noise, float kept) {
    Best best = likeliest(logits, noise);
    const long first_token = best.token;
    Hit hits[kSamplingBlock];
    for (long b = 0; b < blocks_of(logits.vocab); ++b) {
        const float most = logits.maxima[b] / logits.temperature;
        const float goal = best.score - margin_of(best.score), least = std::max(kept, goal - kLargestNoise);
        if (most < least) continue;
        const long count = sampling_kernels().hits(logits.row, logits.vocab, b * kSamplingBlock, noise,
                                                   {logits.unscaled(least), word_for(goal - most)}, hits);
        for (long i = 0; i < count; ++i) {
            const float scaled = logits.scaled(hits[i].token);
            if (scaled >= kept && hits[i].token != first_token) best.consider(hits[i].token, scaled, hits[i].word);
        }
    }
    return best;
}

int32_t sample_row(const float* row, long vocab, const DrawColumns& columns, long r, const Scratch& scratch) {
    if (!(columns.temperature[r] > 0.0F)) return largest_token(row, LogitType::float32, vocab);
    const Logits logits = look_at(row, vocab, columns.temperature[r], scratch);
    const Kept kept = kept_of(logits, {columns.top_k[r], columns.top_p[r], columns.log_min_p[r]}, scratch);
    if (!std::isfinite(logits.largest) || kept.wide > logits.largest) return kNobody;
    const Best best = draw(logits, noise_for(columns.keys, columns.positions, r), kept.wide);
    const bool sure = best.rival < best.score - margin_of(best.score) && best.scaled >= kept.narrow;
    return sure ? static_cast<int32_t>(best.token) : kUnsure;
}

}  // namespace

const SamplingKernels& sampling_kernels() {
#if defined(__x86_64__)
    switch (chosen_isa()) {
        case Isa::amx:
        case Isa::avx512_bf16:
        case Isa::avx512: return kSamplingAvx512;
        case Isa::avx2_vnni:
        case Isa::avx2: return kSamplingAvx2;
        default: break;
    }
#endif
    return kSamplingBaseline;
}

void greedy(const Rows<const void>& logits, LogitType type, int32_t* out) {
    const long bytes = type == LogitType::float32 ? 4 : 2;
    parallel_for(logits.rows, 1, [&](long begin, long end) {
        for (long r = begin; r < end; ++r) {
            out[r] = largest_token(static_cast<const char*>(logits.at) + r * logits.stride * bytes, type, logits.vocab);
        }
    });
}

long sample(const Rows<const float>& logits, const DrawColumns& columns, int32_t* out) {
    for_rows(logits.rows, logits.vocab, [&](long r, const Scratch& scratch) {
        out[r] = sample_row(logits.row(r), logits.vocab, columns, r, scratch);
    });
    return std::count(out, out + logits.rows, kUnsure);
}

long filter_logits(const Rows<const float>& logits, const DrawColumns& columns, float* out, int32_t* unsure) {
    for_rows(logits.rows, logits.vocab, [&](long r, const Scratch& scratch) {
        const Logits row = look_at(logits.row(r), logits.vocab, 1.0F, scratch);
        const Kept kept = kept_of(row, {columns.top_k[r], columns.top_p[r], columns.log_min_p[r]}, scratch);
        float* const own = out + r * logits.vocab;
        for (long i = 0; i < logits.vocab; ++i) own[i] = row.row[i] >= kept.least ? row.row[i] : kNever;
        unsure[r] = kept.wide < kept.narrow;
    });
    return std::count(unsure, unsure + logits.rows, 1);
}

void gumbel(const int32_t* keys, const int32_t* positions, const int32_t* ids, long rows, long id_rows, long count,
            float* out) {
    for (long r = 0; r < rows; ++r) {
        const NoiseOf noise = noise_for(keys, positions, r);
        const int32_t* const own = ids + (id_rows > 1 ? r * count : 0);
        parallel_for(count, 1024, [&](long first, long last) {
            for (long i = first; i < last; ++i) {
                out[r * count + i] = noise_of(word_of(noise, static_cast<uint32_t>(own[i])));
            }
        });
    }
}

}  // namespace quintet::cpu
