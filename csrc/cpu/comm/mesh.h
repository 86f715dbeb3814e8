// The ranks of one model on several machines: a connected socket between each two of them, and nothing in common.
//
// Each rank sends its part of a collective to all others and receives theirs: what one sends and receives is
// (ranks - 1) parts. A frame says what it is for, so that a rank which waits for a part sees that the other has left the
// step. exchange() reads on until every rank's note has come, whatever frames of the step before are still under way.
//
// The sockets come from whoever has proven to each other who they are; what goes over them is neither signed nor encrypted.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "cpu/comm/ranks.h"

namespace quintet::cpu {

constexpr long kSeal = 64;  // bytes that whoever signs notes may add to each

class Mesh : public Ranks {
public:
    // `sockets`: by rank, -1 in this rank's own place; they are the mesh's from here on, which closes them. `seconds`: how
    // long a rank waits for another, once all have started: until the second exchange it is kStart at least.
    Mesh(const std::vector<int>& sockets, int rank, double seconds);
    ~Mesh() override;

    int rank() const override { return rank_; }
    int size() const override { return static_cast<int>(peers_.size()); }
    void* place() override;
    void arrive(long bytes) override;
    const void* part_of(int rank) const override;

    // What every rank brings, at most kMostNote + kSeal bytes each. Afterwards all have made the same number of collectives.
    std::vector<std::string> exchange(std::string_view note);

    // Nobody waits any more, on this rank: RankLost with this reason. From any thread.
    void stop(std::string_view why);
    std::string stopped() const;  // the reason; empty: it was not

private:
    struct Head {
        uint32_t kind, turn;
        uint64_t bytes;
    };
    struct Outgoing {
        Head head;
        const char* body;
        size_t sent = 0;  // of both
    };
    struct Peer {
        int socket = -1;
        std::vector<Outgoing> out;  // in order
        Head head{};
        size_t got = 0;  // bytes of the frame that comes in, with its head
        bool whole = false, left = false;
        std::vector<char> part;
        std::string note;
    };

    void send_to(int rank, uint32_t kind, const char* body, size_t bytes);
    template <typename Come>
    void run_until(const Come& come);
    bool push(int rank);
    bool pull(int rank, uint32_t kind);
    size_t receive(int rank, char* to, size_t bytes);
    void check(int rank, uint32_t kind);
    void wait(const std::vector<char>& reading);
    void check_stopped() const;
    [[noreturn]] void lost(int rank, const std::string& why);
    std::string name(int rank) const;

    int rank_;
    double seconds_;
    std::vector<Peer> peers_;
    std::vector<char> own_;
    int wake_[2] = {-1, -1};  // a pipe: stop() writes, who waits looks
    uint32_t turn_ = 0, exchanged_ = 0;
    size_t bytes_ = 0;  // of each part of the collective that runs
    mutable std::mutex mutex_;
    std::string reason_;
    std::atomic<bool> stopping_{false};
};

}  // namespace quintet::cpu
