// What the collectives ask of the ranks of a model, wherever these are.
#pragma once

#include <stdexcept>

namespace quintet::cpu {

constexpr int kMostRanks = 64;
constexpr long kPlaceBytes = 256L << 10;  // of one part; what is longer comes in pieces, which stay in a core's own cache
constexpr long kMostNote = 1000;          // bytes of what ranks exchange
constexpr double kStart = 600;            // seconds; one rank may read weights from a slow disk

// A rank is gone, or did not come in time: nothing is computed on these ranks any more.
struct RankLost : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// A rank has left the step that this one is in, so that this one cannot end it either: exchange() brings them together again.
struct StepLeft : std::runtime_error {
    using std::runtime_error::runtime_error;
};

class Ranks {
public:
    Ranks() = default;
    virtual ~Ranks() = default;
    Ranks(const Ranks&) = delete;
    Ranks& operator=(const Ranks&) = delete;

    virtual int rank() const = 0;
    virtual int size() const = 0;

    // One collective: own part written to place(), then arrive() with its bytes, as many on every rank, then the others'
    // parts read at part_of(). The next comes only then.
    virtual void* place() = 0;
    virtual void arrive(long bytes) = 0;
    virtual const void* part_of(int rank) const = 0;
};

}  // namespace quintet::cpu
