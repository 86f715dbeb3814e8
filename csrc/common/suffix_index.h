// Texts in a ring, and where the last few tokens of a text stood in them before: drafts for speculative decoding.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

namespace quintet {

// What quintet/engine/spec_decode/suffix_index.py computes, and gives the same results.
struct SuffixDraft {
    std::vector<int32_t> tokens;
    double score = 0;  // sum of the shares of the tokens: how many of them are expected to be right
    long match = 0;    // last tokens of the query that stood there before
};

struct SuffixQuery {
    const int32_t* tokens;
    long count;
    uint32_t owner;   // texts of others are not looked at
    long most;        // tokens of the draft
    double factor;    // most of them for each token that matches
    double share;     // least share of the matches that go on so
    long depth;       // most tokens that match, and of the draft, together
};

class SuffixIndex {
public:
    explicit SuffixIndex(long capacity);  // tokens, separators included; std::invalid_argument unless 16 to 2^28

    // Appends tokens to the open text; `ends`: the next ones begin another. The oldest tokens are overwritten.
    void append(const int32_t* tokens, long count, uint32_t owner, bool ends);
    void forget_before(long position);  // tokens before it are found no more
    SuffixDraft lookup(const SuffixQuery& query) const;

    long position() const { return next_; }  // tokens that were appended, separators included
    long bytes() const;

private:
    static constexpr int kLevels = 3;
    long slot(long position) const { return position % capacity_; }
    long first() const;
    void put(int32_t token, uint32_t owner);
    void link(uint32_t owner, long position);
    struct Match {
        long end, length;  // position of its last token
    };
    std::vector<Match> matches(const SuffixQuery& query) const;
    SuffixDraft vote(const std::vector<Match>& matches, long length, long most, double share) const;

    long capacity_, mask_, next_ = 0, forgotten_ = 0, run_ = 0;
    // calloc: pages that are never written take no memory
    struct Free {
        void operator()(void* memory) const;
    };
    template <typename T>
    using Array = std::unique_ptr<T[], Free>;
    Array<int32_t> tokens_;                       // -1: a text ended
    Array<uint32_t> owners_;
    Array<uint32_t> before_[kLevels];             // position + 1 of the same hash before it; 0: none
    Array<uint32_t> newest_[kLevels];             // by hash
};

}  // namespace quintet
