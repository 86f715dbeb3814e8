// The ranks of one model as processes of one host: what they have in common is a piece of shared memory, and nothing else.
//
// Each rank brings its part of a collective to a place of its own, counts it as arrived, and reads the others' when they
// have. There are two places, used in turn: who has come to a collective has read all of the one before it, so that by the
// one after next nobody reads what is written over. Whoever waits spins a moment, then sleeps until it is woken.
#pragma once

#include <atomic>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace quintet::cpu {

constexpr int kMostRanks = 64;
constexpr long kPlaceBytes = 256L << 10;  // of one part; what is longer comes in pieces, which stay in a core's own cache
constexpr long kMostNote = 1000;          // bytes of what ranks exchange
constexpr double kStart = 600;            // seconds; one rank may read weights from a slow disk
constexpr long kLetterBytes = 64L << 10;  // of a letter's pieces

// A rank is gone, or did not come in time: the team is broken for good.
struct RankLost : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// A rank has left the step that this one is in, so that this one cannot end it either: exchange() brings them together again.
struct StepLeft : std::runtime_error {
    using std::runtime_error::runtime_error;
};

struct TeamMemory;  // how the shared memory is laid out

class Team {
public:
    // Maps the file, an empty one that all ranks were given. Nobody waits here. `seconds`: how long a rank waits for another,
    // once all have started: until the second exchange it is kStart at least.
    Team(int descriptor, int rank, int size, double seconds);
    ~Team();
    Team(const Team&) = delete;
    Team& operator=(const Team&) = delete;

    int rank() const { return rank_; }
    int size() const { return size_; }

    // One collective: own part written to place(), then arrive(), then the others' parts read at part_of(). The next comes
    // only then.
    void* place();
    void arrive();
    const void* part_of(int rank) const;

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
