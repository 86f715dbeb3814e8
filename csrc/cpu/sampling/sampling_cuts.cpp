// min_p, top_k and top_p as a bar for logits, without sorting the row.
#include <cstddef>

#include "cpu/sampling/sampling_rows.h"

namespace quintet::cpu {

namespace {

constexpr float kSlack = 2e-6F;  // of the mass: more than the errors of exponentials in float32, ours and others'
constexpr long kFew = 256;       // tokens that are sorted without more ado
constexpr int kBins = 1024;
constexpr long kTables = 4;      // additions to one bin wait for each other; neighbours go to different tables

struct Token {
    float logit, mass;
};

// Tokens in any order, and the mass of all those that are above each of them. None is without mass: top_p keeps no such.
struct Crowd {
    Token* tokens;
    long count;
    double above;
};

struct Range {
    float low, high;
};

Range range_of(const Crowd& crowd) {
    float low[kTables], high[kTables];  // each comparison waits for the one before it: four at a time
    std::fill(low, low + kTables, crowd.tokens[0].logit);
    std::fill(high, high + kTables, crowd.tokens[0].logit);
    for (long i = 0; i < crowd.count; ++i) {
        const float logit = crowd.tokens[i].logit;
        float& least = low[i % kTables];
        float& most = high[i % kTables];
        least = logit < least ? logit : least;
        most = logit > most ? logit : most;
    }
    return {*std::min_element(low, low + kTables), *std::max_element(high, high + kTables)};
}

// The bars in sorted tokens: one stays while what is above it is less than `wanted`; the likeliest always does.
Kept bars(const Crowd& crowd, float wanted, float slack) {
    std::sort(crowd.tokens, crowd.tokens + crowd.count, [](Token a, Token b) { return a.logit > b.logit; });
    const float first = crowd.tokens[0].logit;
    Kept kept{first, first, first};
    double above = crowd.above;
    for (long i = 0; i < crowd.count; ++i) {
        const float before = above > 0.0 ? static_cast<float>(above) : kNever;
        if (before > wanted + slack) break;
        const auto [logit, mass] = crowd.tokens[i];
        kept.wide = logit;
        if (before < wanted) kept.least = logit;
        if (before < wanted - slack) kept.narrow = logit;
        above += static_cast<double>(mass);
    }
    return kept;
}

// The tokens among which the bars are: one or more neighbours of many bins of equal width.
Crowd narrowed(const Crowd& crowd, float wanted, float slack) {
    const auto [low, high] = range_of(crowd);
    const float top = high, each = static_cast<float>(kBins) / (high - low);
    if (!(each < 1e30F)) return crowd;  // all are equal, or as good as
    const auto bin = [&](float logit) { return std::min(static_cast<int>((top - logit) * each), kBins - 1); };
    double tables[kTables][kBins] = {};
    for (long i = 0; i < crowd.count; ++i) {
        tables[i % kTables][bin(crowd.tokens[i].logit)] += static_cast<double>(crowd.tokens[i].mass);
    }
    int first = 0, last = 0;  // past each bin that ends below wanted - slack; the first one that ends above wanted + slack
    double upto = crowd.above, above = crowd.above;
    for (; last < kBins; ++last) {
        upto += (tables[0][last] + tables[1][last]) + (tables[2][last] + tables[3][last]);
        if (last < kBins - 1 && static_cast<float>(upto) < wanted - slack) {
            first = last + 1;
            above = upto;
        }
        if (static_cast<float>(upto) > wanted + slack) break;
    }
    long left = 0;
    for (long i = 0; i < crowd.count; ++i) {
        const Token token = crowd.tokens[i];
        const int b = bin(token.logit);
        crowd.tokens[left] = token;
        left += b >= first && b <= last ? 1 : 0;
    }
    return {crowd.tokens, left, above};
}

Kept nucleus(Crowd crowd, float wanted, float slack) {
    for (long before = crowd.count + 1; crowd.count > kFew && crowd.count < before;) {
        before = crowd.count;
        crowd = narrowed(crowd, wanted, slack);
    }
    return bars(crowd, wanted, slack);
}

// A token so small that all of its size together are no quarter of what top_p leaves out: no bar is as low.
float too_small(const Logits& logits, float top_p, double total) {
    const double share = 1.0 - static_cast<double>(top_p);
    if (share < 1e-5) return kNever;  // or the slack would be more than that
    const double mass = share * total / (4.0 * static_cast<double>(logits.vocab));
    return logits.unscaled(logits.largest + static_cast<float>(std::log(mass)));
}

Kept by_top_p(const Logits& logits, const Cuts& cuts, float least, const Scratch& scratch) {
    float* const mass = scratch.some;
    const double total = sampling_kernels().masses(logits.row, logits.vocab, logits.temperature, least, logits.largest,
                                                   mass);
    Crowd crowd{reinterpret_cast<Token*>(scratch.pairs), 0, 0.0};
    for_reaching(logits, too_small(logits, cuts.top_p, total), [&](long token, float logit) {
        crowd.tokens[crowd.count] = {logit / logits.temperature, mass[token]};
        crowd.count += mass[token] > 0.0F ? 1 : 0;
    });
    const float all = static_cast<float>(total);
    return nucleus(crowd, cuts.top_p * all, kSlack * all);
}

Kept by_top_k(const Logits& logits, const Cuts& cuts, float least, const Scratch& scratch) {
    const auto falling = [](float a, float b) { return a > b; };
    const long k = std::min(cuts.top_k, logits.vocab);
    float* const ranked = scratch.some;
    long count = 0;
    for_reaching(logits, reached_by(logits, k, ranked), [&](long, float logit) { ranked[count++] = logit; });
    std::nth_element(ranked, ranked + (k - 1), ranked + count, falling);
    for (long i = 0; i < k; ++i) ranked[i] /= logits.temperature;
    const long live = std::partition(ranked, ranked + k, [&](float x) { return x >= least; }) - ranked;
    if (cuts.top_p >= 1.0F) {
        const float last = *std::min_element(ranked, ranked + live);
        return {last, last, last};
    }
    Crowd crowd{reinterpret_cast<Token*>(scratch.pairs), 0, 0.0};
    double total = 0.0;
    for (long i = 0; i < live; ++i) {
        const float mass = static_cast<float>(std::exp(static_cast<double>(ranked[i] - logits.largest)));
        if (mass > 0.0F) crowd.tokens[crowd.count++] = {ranked[i], mass};
        total += static_cast<double>(mass);
    }
    const float all = static_cast<float>(total);
    return nucleus(crowd, cuts.top_p * all, kSlack * all);
}

}  // namespace

Kept kept_of(const Logits& logits, const Cuts& cuts, const Scratch& scratch) {
    const float least = logits.largest + cuts.log_min_p;  // NaN unless the largest is finite or min_p is on
    if (!std::isfinite(logits.largest) || least > logits.largest) return {least, least, least};
    if (cuts.top_k > 0) return by_top_k(logits, cuts, least, scratch);
    if (cuts.top_p < 1.0F) return by_top_p(logits, cuts, least, scratch);
    return {least, least, least};
}

}  // namespace quintet::cpu
