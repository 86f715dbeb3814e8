// The ranks of one model as processes of one host: what they have in common is a piece of shared memory, and nothing else.
//
// Each rank brings its part of a collective to a place of its own, counts it as arrived, and reads the others' when they
// have. There are two places, used in turn: who has come to a collective has read all of the one before it, so that by the
// one after next nobody reads what is written over. Whoever waits spins a moment, then sleeps until it is woken.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "cpu/ranks.h"

namespace quintet::cpu {

constexpr long kLetterBytes = 64L << 10;  // of a letter's pieces

struct TeamMemory;  // how the shared memory is laid out

class Team : public Ranks {
public:
    // Maps the file, an empty one that all ranks were given. Nobody waits here. `seconds`: how long a rank waits for another,
    // once all have started: until the second exchange it is kStart at least.
    Team(int descriptor, int rank, int size, double seconds);
    ~Team() override;

    int rank() const override { return rank_; }
    int size() const override { return size_; }
    void* place() override;
    void arrive(long bytes) override;
    const void* part_of(int rank) const override;

    // What every rank brings, at most kMostNote bytes each. Afterwards all have made the same number of collectives, whatever
    // happened before.
    std::vector<std::string> exchange(std::string_view note);

    // Rank 0 tells all others; they hear what it told, in order, and wait for it as long as it takes.
    void tell(std::string_view letter);
    std::string hear();

    // Nobody waits any more, on any rank: RankLost with this reason is what they get.
    void stop(std::string_view why);
    std::string stopped() const;  // the reason; empty: it was not

private:
    struct Seat;
    Seat& seat(int rank) const;
    char* place_of(int rank, uint32_t turn) const;
    template <typename Holds>
    void wait_until(std::atomic<uint32_t>& word, int whose, bool patient, const Holds& holds);
    void publish(std::atomic<uint32_t>& word, uint32_t value);
    void check_stopped() const;

    int rank_, size_;
    double seconds_;
    TeamMemory* memory_;
    long bytes_;
    uint32_t turn_ = 0;      // collectives that this rank has come to
    uint32_t exchanged_ = 0;
    uint32_t told_ = 0;      // pieces of letters, told or heard
};

}  // namespace quintet::cpu
