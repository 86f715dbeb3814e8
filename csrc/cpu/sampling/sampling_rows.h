// What the files of sampling share: the kernels in use, rows shared out to threads, the tokens of a row that reach a bar.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>

#include "common/pool.h"
#include "cpu/kernels/sampling.h"
#include "cpu/sampling/sampling.h"

namespace quintet::cpu {

constexpr float kNever = -std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

const SamplingKernels& sampling_kernels();

inline long blocks_of(long vocab) { return (vocab + kSamplingBlock - 1) / kSamplingBlock; }

// Memory for one row's work. Pages that nobody writes to take none.
struct Scratch {
    float* maxima;    // [blocks]
    float* some;      // [V]
    float* more;      // [V]
    uint64_t* pairs;  // [V]
};

// The calling thread's, for as long as it lives: memory that is given back and taken again has its pages made again,
// which costs more than a row. Taken before a row is shared out, so that nothing is thrown in other threads.
inline uint64_t* kept_memory(size_t words) {
    thread_local std::unique_ptr<uint64_t[]> memory;
    thread_local size_t size = 0;
    if (size < words) {
        memory.reset();
        size = 0;
        memory = std::make_unique_for_overwrite<uint64_t[]>(words);
        size = words;
    }
    return memory.get();
}

// body(r, scratch) for every row: who takes which changes nothing but the time.
template <typename Body>
void for_rows(long rows, long vocab, const Body& body) {
    const long threads = pool_threads(), parts = rows < threads ? rows : threads, blocks = blocks_of(vocab);
    if (parts < 1) return;
    const long words = vocab + vocab + (blocks + 1) / 2;  // two floats to a word
    uint64_t* const memory = kept_memory(static_cast<size_t>(parts * words));
    std::atomic<long> next{0}, members{0};
    parallel_for(parts, 1, [&](long, long) {
        uint64_t* const pairs = memory + members.fetch_add(1) * words;
        float* const floats = reinterpret_cast<float*>(pairs + vocab);
        const Scratch scratch{floats + 2 * vocab, floats, floats + vocab, pairs};
        for (long r = next.fetch_add(1); r < rows; r = next.fetch_add(1)) body(r, scratch);
    });
}

// One row, not yet scaled, and what a first look at it tells.
struct Logits {
    const float* row;
    const float* maxima;  // of blocks
    long vocab;
    float temperature;  // 1 for a greedy row
    float largest;      // scaled; NaN if there is any NaN

    float scaled(long token) const { return row[token] / temperature; }
    // A logit below all those that are `bar` or more once they are divided.
    float unscaled(float bar) const {
        const float logit = bar * temperature;
        return logit - std::abs(logit) * 1e-6F - std::numeric_limits<float>::min();
    }
};

inline Logits look_at(const float* row, long vocab, float temperature, const Scratch& scratch) {
    const bool numbers = sampling_kernels().maxima(row, vocab, scratch.maxima);
    const float by = temperature > 0.0F ? temperature : 1.0F;
    const float most = *std::max_element(scratch.maxima, scratch.maxima + blocks_of(vocab));
    return {row, scratch.maxima, vocab, by, numbers ? most / by : kNaN};
}

// A logit that at least `count` tokens reach, seldom far below the count-th largest.
inline float reached_by(const Logits& logits, long count, float* scratch) {
    const long blocks = blocks_of(logits.vocab);
    if (count > blocks) return kNever;
    std::copy(logits.maxima, logits.maxima + blocks, scratch);
    std::nth_element(scratch, scratch + (count - 1), scratch + blocks, [](float a, float b) { return a > b; });
    return scratch[count - 1];
}

// body(token, logit) for those that reach `least`, in order. They are listed first: whether one does is hard to foretell.
template <typename Body>
void for_reaching(const Logits& logits, float least, const Body& body) {
    int32_t listed[kSamplingBlock + 1];
    for (long b = 0; b < blocks_of(logits.vocab); ++b) {
        if (logits.maxima[b] < least) continue;
        const long first = b * kSamplingBlock, end = std::min(first + kSamplingBlock, logits.vocab);
        long count = 0;
        for (long token = first; token < end; ++token) {
            listed[count] = static_cast<int32_t>(token);
            count += logits.row[token] >= least ? 1 : 0;
        }
        for (long i = 0; i < count; ++i) body(listed[i], logits.row[listed[i]]);
    }
}

// The scaled logits that min_p, top_k and top_p leave: those >= least. Exponentials being rounded, top_p may mean any
// bar from `wide` to `narrow`, and almost always all three are one.
struct Kept {
    float wide, least, narrow;
};

struct Cuts {
    long top_k;  // 0: off
    float top_p, log_min_p;
};

Kept kept_of(const Logits& logits, const Cuts& cuts, const Scratch& scratch);

}  // namespace quintet::cpu
