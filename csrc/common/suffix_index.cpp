#include "common/suffix_index.h"

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <new>
#include <stdexcept>
#include <string>

namespace quintet {

namespace {

constexpr long kGrams[] = {5, 2, 1};     // last tokens that a hash is of; the longer first
constexpr size_t kMaxMatches = 32;     // newest ones that vote
constexpr int kMaxVisited = 96;        // places that are looked at, for each hash
constexpr long kMaxPosition = 1L << 31;
constexpr int32_t kSeparator = -1;

template <typename T>
T* zeros(long count) {
    void* const memory = std::calloc(static_cast<size_t>(count), sizeof(T));
    if (memory == nullptr) throw std::bad_alloc();
    return static_cast<T*>(memory);
}

uint64_t hash_step(uint64_t hash, uint32_t value) {
    hash = (hash ^ value) * 0xFF51AFD7ED558CCDULL;
    return hash ^ (hash >> 32);
}

}  // namespace

void SuffixIndex::Free::operator()(void* memory) const { std::free(memory); }

SuffixIndex::SuffixIndex(long capacity) : capacity_(capacity), mask_(7) {
    if (capacity < 16 || capacity > 1L << 28) {
        throw std::invalid_argument("capacity must be 16 to 2^28 tokens, not " + std::to_string(capacity));
    }
    while (2 * (mask_ + 1) < capacity) mask_ = 2 * mask_ + 1;
    tokens_.reset(zeros<int32_t>(capacity));
    owners_.reset(zeros<uint32_t>(capacity));
    for (int level = 0; level < kLevels; ++level) {
        before_[level].reset(zeros<uint32_t>(capacity));
        newest_[level].reset(zeros<uint32_t>(mask_ + 1));
    }
}

long SuffixIndex::bytes() const { return 4 * ((2 + kLevels) * capacity_ + kLevels * (mask_ + 1)); }

long SuffixIndex::first() const { return std::max(forgotten_, next_ - capacity_); }

void SuffixIndex::forget_before(long position) { forgotten_ = std::max(forgotten_, std::min(position, next_)); }

void SuffixIndex::append(const int32_t* tokens, long count, uint32_t owner, bool ends) {
    if (count < 0) throw std::invalid_argument("count must be 0 or more");
    if (next_ + count + 1 >= kMaxPosition) throw std::length_error("the index has no positions left; make another");
    if (std::any_of(tokens, tokens + count, [](int32_t token) { return token < 0; })) {
        throw std::invalid_argument("token ids must be 0 or more");
    }
    for (long i = 0; i < count; ++i) {
        put(tokens[i], owner);
        ++run_;
        link(owner, next_ - 1);
    }
    if (!ends) return;
    put(kSeparator, owner);
    run_ = 0;
    link(owner, next_ - 1);
}

void SuffixIndex::put(int32_t token, uint32_t owner) {
    tokens_[static_cast<size_t>(slot(next_))] = token;
    owners_[static_cast<size_t>(slot(next_))] = owner;
    ++next_;
}

// Enters the tokens that end at the position, as far back as its text goes.
void SuffixIndex::link(uint32_t owner, long position) {
    for (int level = 0; level < kLevels; ++level) {
        uint32_t& before = before_[level][static_cast<size_t>(slot(position))];
        before = 0;
        if (run_ < kGrams[level]) continue;
        uint64_t hash = hash_step(0, owner);
        for (long at = position - kGrams[level] + 1; at <= position; ++at) {
            hash = hash_step(hash, static_cast<uint32_t>(tokens_[static_cast<size_t>(slot(at))]));
        }
        uint32_t& newest = newest_[level][hash & static_cast<uint64_t>(mask_)];
        before = newest;
        newest = static_cast<uint32_t>(position + 1);
    }
}

std::vector<SuffixIndex::Match> SuffixIndex::matches(const SuffixQuery& query) const {
    std::vector<Match> found;
    const long oldest = first();
    for (int level = 0; level < kLevels && found.size() < kMaxMatches; ++level) {
        const long gram = kGrams[level];
        if (query.count < gram) continue;
        uint64_t hash = hash_step(0, query.owner);
        for (long i = query.count - gram; i < query.count; ++i) {
            hash = hash_step(hash, static_cast<uint32_t>(query.tokens[i]));
        }
        uint32_t at = newest_[level][hash & static_cast<uint64_t>(mask_)];
        for (int visited = 0; at != 0 && visited < kMaxVisited && found.size() < kMaxMatches; ++visited) {
            const long end = static_cast<long>(at) - 1;
            if (end < oldest) break;
            at = before_[level][static_cast<size_t>(slot(end))];
            if (end + 1 >= next_ || owners_[static_cast<size_t>(slot(end))] != query.owner) continue;
            long length = 0;
            while (length < query.count && end - length >= oldest &&
                   tokens_[static_cast<size_t>(slot(end - length))] == query.tokens[query.count - 1 - length]) {
                ++length;
            }
            if (length >= gram && (level == 0 || length < kGrams[level - 1])) found.push_back({end, length});
        }
    }
    return found;
}

SuffixDraft SuffixIndex::vote(const std::vector<Match>& matches, long length, long most, double share) const {
    struct Count {
        int32_t token;
        int count;
    };
    long places[kMaxMatches];
    Count counts[kMaxMatches];
    int size = 0;
    for (const Match& match : matches) {
        if (match.length >= length) places[size++] = match.end + 1;
    }
    SuffixDraft draft;
    double probability = 1;
    draft.match = length;
    while (static_cast<long>(draft.tokens.size()) < most) {
        int distinct = 0, best = -1;
        for (int i = 0; i < size; ++i) {
            const int32_t token = places[i] < next_ ? tokens_[static_cast<size_t>(slot(places[i]))] : kSeparator;
            if (token == kSeparator) continue;
            int at = 0;
            while (at < distinct && counts[at].token != token) ++at;
            if (at == distinct) counts[distinct++] = {token, 0};
            ++counts[at].count;
        }
        for (int at = 0; at < distinct; ++at) {
            if (best < 0 || counts[at].count > counts[best].count) best = at;
        }
        if (best < 0) break;
        probability *= static_cast<double>(counts[best].count) / size;
        if (probability < share) break;
        draft.tokens.push_back(counts[best].token);
        draft.score += probability;
        int left = 0;
        for (int i = 0; i < size; ++i) {
            if (places[i] < next_ && tokens_[static_cast<size_t>(slot(places[i]))] == counts[best].token) {
                places[left++] = places[i] + 1;
            }
        }
        size = left;
    }
    return draft;
}

SuffixDraft SuffixIndex::lookup(const SuffixQuery& asked) const {
    SuffixQuery query = asked;
    if (query.count > query.depth - 1) {
        query.tokens += query.count - (query.depth - 1);
        query.count = query.depth - 1;
    }
    const std::vector<Match> found = matches(query);
    std::vector<long> lengths;
    for (const Match& match : found) lengths.push_back(match.length);
    std::sort(lengths.begin(), lengths.end(), std::greater<long>());
    lengths.erase(std::unique(lengths.begin(), lengths.end()), lengths.end());
    SuffixDraft best;
    lengths.push_back(0);
    for (size_t i = 0; i + 1 < lengths.size(); ++i) {  // the longest first: it wins a tie
        long most = 0;
        for (long length = lengths[i]; length > lengths[i + 1]; --length) {  // the same places match
            const double wanted = std::min(static_cast<double>(length) * query.factor + 1e-6, static_cast<double>(query.depth));
            most = std::max(most, std::min(static_cast<long>(wanted), query.depth - length));
        }
        SuffixDraft draft = vote(found, lengths[i], std::min(most, query.most), query.share);
        if (draft.score > best.score) best = std::move(draft);
    }
    return best;
}

}  // namespace quintet
