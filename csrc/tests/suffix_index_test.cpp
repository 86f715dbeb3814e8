// The index of past texts without Python: rings of the exact size, for the sanitizers; drafts that are known, for the sums.
#include <cstdint>
#include <cstdio>
#include <stdexcept>
#include <vector>

#include "common/suffix_index.h"

namespace {

int failures = 0;

void expect(bool holds, const char* what) {
    if (holds) return;
    std::printf("suffix index: %s\n", what);
    ++failures;
}

std::vector<int32_t> lookup(const quintet::SuffixIndex& index, const std::vector<int32_t>& text, uint32_t owner) {
    return index.lookup({text.data(), static_cast<long>(text.size()), owner, 8, 1.5, 0.2, 12}).tokens;
}

void append(quintet::SuffixIndex& index, const std::vector<int32_t>& text, uint32_t owner, bool ends) {
    index.append(text.data(), static_cast<long>(text.size()), owner, ends);
}

void finds_its_own() {
    quintet::SuffixIndex index(64);
    append(index, {1, 2, 3, 4, 5, 6, 7}, 1, true);
    append(index, {1, 2, 3, 4, 9}, 2, true);
    expect(lookup(index, {1, 2, 3, 4}, 1) == std::vector<int32_t>{5, 6, 7}, "the text of an owner goes on");
    expect(lookup(index, {1, 2, 3, 4}, 2) == std::vector<int32_t>{9}, "that of another goes on otherwise");
    expect(lookup(index, {1, 2, 3, 4}, 3).empty(), "who has no texts finds none");
    index.forget_before(8);
    expect(lookup(index, {1, 2, 3, 4}, 1).empty(), "what is forgotten is not found");
}

// Rings that are overwritten many times, by open texts and by ended ones.
void stays_in_its_ring(long capacity) {
    quintet::SuffixIndex index(capacity);
    uint32_t state = 1;
    std::vector<int32_t> text;
    for (int turn = 0; turn < 300; ++turn) {
        state = state * 1664525 + 1013904223;
        std::vector<int32_t> added;
        for (uint32_t i = 0; i < (state >> 28); ++i) added.push_back(static_cast<int32_t>((state >> (i + 3)) & 3));
        append(index, added, turn % 3 == 0, turn % 5 == 0);
        text.insert(text.end(), added.begin(), added.end());
        for (const int32_t token : lookup(index, text, turn % 2 == 0)) expect(token >= 0 && token < 4, "a token that never was");
    }
    expect(index.position() > capacity, "the ring went round");
}

template <typename Body>
bool refuses(const Body& body) {
    try {
        body();
    } catch (const std::invalid_argument&) {
        return true;
    }
    return false;
}

}  // namespace

int suffix_index_failures() {
    failures = 0;
    finds_its_own();
    for (const long capacity : {16L, 50L, 333L}) stays_in_its_ring(capacity);
    expect(refuses([] { quintet::SuffixIndex index(15); }), "15 tokens are too few");
    expect(refuses([] { quintet::SuffixIndex index(20); append(index, {1, -1}, 0, true); }), "no token is negative");
    return failures;
}
