// Log-probabilities of the likeliest tokens, by selection.
#include <cmath>
#include <stdexcept>
#include <string>

#include "cpu/sampling/sampling_rows.h"

namespace quintet::cpu {

namespace {

// Sorts as the best logit first, equal ones (both zeros are) in order of their ids, NaN before everything.
uint64_t place_of(float logit, long token) {
    const float x = logit == 0.0F ? 0.0F : logit;
    uint32_t bits;
    __builtin_memcpy(&bits, &x, sizeof bits);
    const uint32_t rising = std::isnan(x) ? ~0U : bits >> 31 ? ~bits : bits | 1U << 31;
    return static_cast<uint64_t>(~rising) << 32 | static_cast<uint32_t>(token);
}

void likeliest(const Logits& logits, long num, int32_t* ids, const Scratch& scratch) {
    long count = 0;
    const auto add = [&](long token, float logit) { scratch.pairs[count++] = place_of(logit, token); };
    if (std::isnan(logits.largest)) {
        for (long i = 0; i < logits.vocab; ++i) add(i, logits.row[i]);
    } else {
        for_reaching(logits, reached_by(logits, num, scratch.some), add);
    }
    if (num < count) std::nth_element(scratch.pairs, scratch.pairs + num, scratch.pairs + count);
    std::sort(scratch.pairs, scratch.pairs + num);
    for (long i = 0; i < num; ++i) ids[i] = static_cast<int32_t>(scratch.pairs[i] & 0xFFFFFFFF);
}

long rank_of(const Logits& logits, float logit) {
    long above = 0;
    for (long b = 0; b < blocks_of(logits.vocab); ++b) {
        if (logits.maxima[b] <= logit) continue;
        const long first = b * kSamplingBlock, end = std::min(first + kSamplingBlock, logits.vocab);
        int some = 0;
        for (long i = first; i < end; ++i) some += logits.row[i] > logit;
        above += some;
    }
    return above + 1;
}

void top_logprobs_of(const float* row, long vocab, const TopLogprobs& asked, long r, const Scratch& scratch) {
    const long columns = asked.num + 1;
    int32_t* const ids = asked.ids + r * columns;
    float* const values = asked.values + r * columns;
    if (!asked.wanted[r]) {
        std::fill(ids, ids + columns, 0);
        std::fill(values, values + columns, 0.0F);
        asked.ranks[r] = 0;
        return;
    }
    const Logits logits = look_at(row, vocab, 1.0F, scratch);
    ids[0] = std::max(asked.tokens[r], 0);
    if (asked.num) likeliest(logits, asked.num, ids + 1, scratch);
    asked.ranks[r] = static_cast<int32_t>(rank_of(logits, row[ids[0]]));
    const bool finite = std::isfinite(logits.largest);
    const double sum = asked.normalize && finite ? sampling_kernels().exp_sum(row, vocab, logits.largest) : 1.0;
    const double by = static_cast<double>(logits.largest) + std::log(sum);
    for (long i = 0; i < columns; ++i) {
        const float logit = row[ids[i]];
        values[i] = !asked.normalize ? logit : finite ? static_cast<float>(static_cast<double>(logit) - by) : kNaN;
    }
}

}  // namespace

void top_logprobs(const Rows<const float>& logits, const TopLogprobs& asked) {
    if (asked.num < 0 || asked.num > logits.vocab) {
        throw std::invalid_argument("num must be 0 to " + std::to_string(logits.vocab) + ", not " +
                                    std::to_string(asked.num));
    }
    for (long r = 0; r < logits.rows; ++r) {
        if (asked.tokens[r] >= logits.vocab) {
            throw std::invalid_argument("token_ids of row " + std::to_string(r) + " is " +
                                        std::to_string(asked.tokens[r]) + ", and there are " +
                                        std::to_string(logits.vocab) + " tokens");
        }
    }
    for_rows(logits.rows, logits.vocab, [&](long r, const Scratch& scratch) {
        top_logprobs_of(logits.row(r), logits.vocab, asked, r, scratch);
    });
}

}  // namespace quintet::cpu
