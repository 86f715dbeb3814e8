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

#include "cpu/comm/ranks.h"

namespace quintet::cpu {

constexpr long kLetterBytes = 64L << 10;  // of a letter's pieces
constexpr int kLetters = 34;              // pieces that rank 0 may be ahead of who listens: stages are at different steps
constexpr int kMostStages = 16;
constexpr uint64_t kShelfBytes = 1UL << 30;  // of what lies in one place of a shelf; memory is taken as it is written to
constexpr uint64_t kNothing = ~0UL;       // lies on a shelf in the place of what could not be made

// What a rank puts down for others, by step: who takes it waits until it lies there.
enum Shelf { kNotes = 0, kGoods = 1 };  // notes are of every rank; goods: what a stage hands on, or the last one has drawn

struct TeamMemory;  // how the shared memory is laid out

class Team : public Ranks {
public:
    // Maps the file, an empty one that all ranks were given. Nobody waits here. `seconds`: how long a rank waits for another,
    // once all have started: until the second exchange it is kStart at least. `group`: ranks of a stage, which follow one
    // another and compute together; what is told and exchanged is all ranks'.
    Team(int descriptor, int rank, int size, double seconds, int group);
    ~Team() override;

    // Within the stage.
    int rank() const override { return rank_ % group_; }
    int size() const override { return group_; }
    void* place() override;
    void arrive(long bytes) override;
    const void* part_of(int rank) const override;
    int stage() const { return rank_ / group_; }
    int stages() const { return size_ / group_; }

    // What every rank brings, at most kMostNote bytes each. Afterwards all have made the same number of collectives, whatever
    // happened before.
    std::vector<std::string> exchange(std::string_view note);

    // Rank 0 tells all others; they hear what it told, in order, and wait for it as long as it takes.
    void tell(std::string_view letter);
    std::string hear();

    // Where there are several stages: each rank numbers its steps alike. A rank that has put down its note for a step has
    // left it, and who waits for it in a collective of that step gets StepLeft.
    void begin(uint32_t step) { step_ = step; }
    // A place of one's own for a step, to write to, and its putting down. A place comes again after as many steps as can be
    // under way: kShelfBytes at most, of notes kMostNote.
    void* shelf(Shelf shelf, uint32_t step) const { return shelf_of(rank_, shelf, step); }
    void put(Shelf shelf, uint32_t step, uint64_t bytes);
    // What rank `whose` of all has put down: where it lies, and its bytes, or kNothing.
    const void* take(int whose, Shelf shelf, uint32_t step, uint64_t& bytes);

    // Nobody waits any more, on any rank: RankLost with this reason is what they get.
    void stop(std::string_view why);
    std::string stopped() const;  // the reason; empty: it was not

private:
    struct Seat;
    Seat& seat(int rank) const;
    char* place_of(int rank, uint32_t turn) const;
    char* shelf_of(int rank, Shelf shelf, uint32_t step) const;
    uint32_t places_of(int rank, Shelf shelf) const;
    long places_end() const;   // bytes of all that comes before the shelves
    long shelf_bytes() const;  // of one rank's
    template <typename Holds>
    void wait_until(std::atomic<uint32_t>& word, int whose, bool patient, const Holds& holds);
    void publish(std::atomic<uint32_t>& word, uint32_t value);
    void check_stopped() const;

    int rank_, size_, group_;  // of all
    double seconds_;
    TeamMemory* memory_;
    long bytes_;
    uint32_t turn_ = 0;      // collectives that this rank has come to
    uint32_t exchanged_ = 0;
    uint32_t told_ = 0;      // pieces of letters, told or heard
    uint32_t step_ = 0;      // 0: there is one stage, and steps are not numbered
};

}  // namespace quintet::cpu
