#include "cpu/comm/mesh.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <stdexcept>

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

namespace quintet::cpu {

namespace {

using Clock = std::chrono::steady_clock;

constexpr uint32_t kPart = 0x50415254, kNote = 0x4e4f5445;  // kinds of frames
constexpr int kNap = 100;       // milliseconds that a waiter waits before it looks around
constexpr double kWord = 1.0;   // seconds for whoever knows why a connection has ended to say so first
constexpr int kLooks = 64;      // at the sockets before it sleeps: shorter than the way over the system's poll
constexpr size_t kMost = static_cast<size_t>(kMostNote + kSeal);

#if defined(MSG_NOSIGNAL)
constexpr int kQuietly = MSG_NOSIGNAL | MSG_DONTWAIT;
#else
constexpr int kQuietly = MSG_DONTWAIT;
#endif

std::string text_of(int error) { return std::strerror(error); }

}  // namespace

Mesh::Mesh(const std::vector<int>& sockets, int rank, double seconds)
    : rank_(rank), seconds_(seconds), peers_(sockets.size()), own_(kPlaceBytes) {
    if (sockets.empty() || sockets.size() > kMostRanks || rank < 0 || rank >= size()) {
        throw std::invalid_argument("rank " + std::to_string(rank) + " of " + std::to_string(sockets.size()) +
                                    ": ranks count from 0 to " + std::to_string(kMostRanks - 1) + " at most");
    }
    for (int other = 0; other < size(); ++other) {
        if ((sockets[static_cast<size_t>(other)] < 0) != (other == rank)) {
            throw std::invalid_argument("a socket for each other rank, and none for the own");
        }
    }
    if (pipe(wake_) != 0) throw std::runtime_error("no pipe can be had: " + text_of(errno));
    for (const int end : wake_) {
        fcntl(end, F_SETFL, fcntl(end, F_GETFL) | O_NONBLOCK);
        fcntl(end, F_SETFD, FD_CLOEXEC);
    }
    for (int other = 0; other < size(); ++other) {
        Peer& peer = peers_[static_cast<size_t>(other)];
        peer.socket = sockets[static_cast<size_t>(other)];
        if (other != rank) peer.part.resize(kPlaceBytes);
    }
}

Mesh::~Mesh() {
    for (const Peer& peer : peers_) {
        if (peer.socket >= 0) close(peer.socket);
    }
    for (const int end : wake_) close(end);
}

std::string Mesh::name(int rank) const { return "rank " + std::to_string(rank) + " of " + std::to_string(size()); }

void* Mesh::place() { return own_.data(); }

const void* Mesh::part_of(int rank) const {
    return rank == rank_ ? own_.data() : peers_[static_cast<size_t>(rank)].part.data();
}

void Mesh::send_to(int rank, uint32_t kind, const char* body, size_t bytes) {
    peers_[static_cast<size_t>(rank)].out.push_back({{kind, turn_, bytes}, body});
}

void Mesh::arrive(long bytes) {
    check_stopped();
    for (int other = 0; other < size(); ++other) {
        if (peers_[static_cast<size_t>(other)].left) throw StepLeft("rank " + std::to_string(other) + " has left the step");
    }
    ++turn_;
    bytes_ = static_cast<size_t>(bytes);
    for (int other = 0; other < size(); ++other) {
        if (other != rank_) send_to(other, kPart, own_.data(), bytes_);
    }
    run_until([this](int other) {
        const bool come = pull(other, kPart);
        if (peers_[static_cast<size_t>(other)].left) throw StepLeft("rank " + std::to_string(other) + " has left the step");
        return come;
    });
    for (Peer& peer : peers_) peer.whole = false;
}

std::vector<std::string> Mesh::exchange(std::string_view note) {
    if (note.size() > kMost) throw std::invalid_argument("a note of more than " + std::to_string(kMost) + " bytes");
    check_stopped();
    for (int other = 0; other < size(); ++other) {
        peers_[static_cast<size_t>(other)].whole = false;  // of a step that was left
        if (other != rank_) send_to(other, kNote, note.data(), note.size());
    }
    run_until([this](int other) { return pull(other, kNote); });
    std::vector<std::string> notes;
    for (int other = 0; other < size(); ++other) {
        Peer& peer = peers_[static_cast<size_t>(other)];
        notes.push_back(other == rank_ ? std::string(note) : peer.note);
        if (other != rank_) turn_ = std::max(turn_, peer.head.turn);
        peer.whole = peer.left = false;
    }
    ++exchanged_;
    return notes;
}

// Until all is sent, and come(rank), which reads what there is, holds for each of the others. The time limit counts naps, so
// that a process that stood still itself does not take the others for lost.
template <typename Come>
void Mesh::run_until(const Come& come) {
    const double limit = exchanged_ < 2 ? std::max(seconds_, kStart) : seconds_;
    double waited = 0;
    std::vector<char> reading(peers_.size());
    for (int look = 0;; ++look) {
        int missing = -1;
        bool moved = false;
        for (int other = 0; other < size(); ++other) {
            if (other == rank_) continue;
            Peer& peer = peers_[static_cast<size_t>(other)];
            const size_t before = peer.got;
            const bool sent = push(other), there = peer.whole || come(other);
            reading[static_cast<size_t>(other)] = !there;
            moved = moved || peer.got != before;
            if (!(sent && there) && missing < 0) missing = other;
        }
        if (missing < 0) return;
        if (moved) waited = 0;
        if (moved || look < kLooks) continue;
        check_stopped();
        const Clock::time_point began = Clock::now();
        wait(reading);
        waited += std::min(kNap * 1.5e-3, std::chrono::duration<double>(Clock::now() - began).count());
        if (waited > limit) {
            stop(name(missing) + " did not come within " + std::to_string(static_cast<long>(limit)) + " s");
            check_stopped();
        }
    }
}

// Whether all that there is for this rank is sent.
bool Mesh::push(int rank) {
    Peer& peer = peers_[static_cast<size_t>(rank)];
    while (!peer.out.empty()) {
        Outgoing& frame = peer.out.front();
        const size_t whole = sizeof(Head) + frame.head.bytes;
        iovec pieces[2];
        int count = 0;
        if (frame.sent < sizeof(Head)) {
            pieces[count++] = {reinterpret_cast<char*>(&frame.head) + frame.sent, sizeof(Head) - frame.sent};
        }
        const size_t of_body = frame.sent < sizeof(Head) ? 0 : frame.sent - sizeof(Head);
        if (frame.head.bytes > of_body) pieces[count++] = {const_cast<char*>(frame.body) + of_body, frame.head.bytes - of_body};
        msghdr message{};
        message.msg_iov = pieces;
        message.msg_iovlen = static_cast<decltype(message.msg_iovlen)>(count);
        const ssize_t sent = sendmsg(peer.socket, &message, kQuietly);
        if (sent < 0) {
            if (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR) return false;
            lost(rank, text_of(errno));
        }
        frame.sent += static_cast<size_t>(sent);
        if (frame.sent < whole) continue;
        peer.out.erase(peer.out.begin());
    }
    return true;
}

// Reads what is there. Whether a frame of the kind has come whole. A note that comes in a part's place is `left`, and kept;
// parts that come in a note's place are of a step that was left, and dropped.
bool Mesh::pull(int rank, uint32_t kind) {
    Peer& peer = peers_[static_cast<size_t>(rank)];
    for (;;) {
        if (peer.got < sizeof(Head)) {
            const size_t some = receive(rank, reinterpret_cast<char*>(&peer.head) + peer.got, sizeof(Head) - peer.got);
            if (some == 0) return false;
            peer.got += some;
            if (peer.got < sizeof(Head)) continue;
            check(rank, kind);
        }
        const bool note = peer.head.kind == kNote;
        if (note && kind == kPart) {
            peer.left = true;
            return false;
        }
        char* const body = note ? peer.note.data() : peer.part.data();
        const size_t there = peer.got - sizeof(Head);
        if (there < peer.head.bytes) {
            const size_t some = receive(rank, body + there, peer.head.bytes - there);
            if (some == 0) return false;
            peer.got += some;
            if (peer.got - sizeof(Head) < peer.head.bytes) continue;
        }
        peer.got = 0;
        if (peer.head.kind != kind) continue;
        peer.whole = true;
        return true;
    }
}

// A head that has come: nothing is read into less room than there is.
void Mesh::check(int rank, uint32_t kind) {
    Peer& peer = peers_[static_cast<size_t>(rank)];
    const bool part = peer.head.kind == kPart;
    if ((!part && peer.head.kind != kNote) || peer.head.bytes > (part ? static_cast<size_t>(kPlaceBytes) : kMost)) {
        lost(rank, "it sent what is no part of a sum and no note");
    }
    if (!part) peer.note.resize(peer.head.bytes);
    if (part && kind == kPart && (peer.head.turn != turn_ || peer.head.bytes != bytes_)) {
        lost(rank, "it computes something else: collective " + std::to_string(peer.head.turn) + " of " +
                       std::to_string(peer.head.bytes) + " bytes, where this rank is at " + std::to_string(turn_) + " of " +
                       std::to_string(bytes_));
    }
}

// Bytes; 0 if there are none yet.
size_t Mesh::receive(int rank, char* to, size_t bytes) {
    const ssize_t some = recv(peers_[static_cast<size_t>(rank)].socket, to, bytes, MSG_DONTWAIT);
    if (some > 0) return static_cast<size_t>(some);
    if (some == 0) lost(rank, "its connection was closed");
    if (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR) lost(rank, text_of(errno));
    return 0;
}

void Mesh::wait(const std::vector<char>& reading) {
    std::vector<pollfd> watched{{wake_[0], POLLIN, 0}};
    for (size_t other = 0; other < peers_.size(); ++other) {
        const Peer& peer = peers_[other];
        const int events = (reading[other] ? POLLIN : 0) | (peer.out.empty() ? 0 : POLLOUT);
        if (events != 0) watched.push_back({peer.socket, static_cast<short>(events), 0});
    }
    poll(watched.data(), static_cast<nfds_t>(watched.size()), kNap);
}

// The others may know better why: a process that ended is named by who started it.
void Mesh::lost(int rank, const std::string& why) {
    pollfd word{wake_[0], POLLIN, 0};
    if (!stopping_.load()) poll(&word, 1, static_cast<int>(kWord * 1e3));
    stop(name(rank) + " is lost: " + why);
    throw RankLost(stopped());
}

void Mesh::check_stopped() const {
    if (stopping_.load()) throw RankLost(stopped());
}

void Mesh::stop(std::string_view why) {
    const std::lock_guard<std::mutex> held(mutex_);
    if (stopping_.load()) return;  // the first reason is the cause
    reason_ = why.empty() ? "the ranks were told to end" : std::string(why.substr(0, static_cast<size_t>(kMostNote)));
    stopping_.store(true);
    const char byte = 1;
    if (write(wake_[1], &byte, 1) < 0) return;  // who waits looks every kNap all the same
}

std::string Mesh::stopped() const {
    const std::lock_guard<std::mutex> held(mutex_);
    return reason_;
}

}  // namespace quintet::cpu
