#include "cpu/team.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <string>
#include <thread>

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <ctime>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace quintet::cpu {

namespace {

using Clock = std::chrono::steady_clock;
using Word = std::atomic<uint32_t>;
static_assert(Word::is_always_lock_free && sizeof(Word) == sizeof(uint32_t), "processes share these words");

constexpr unsigned kSpins = 4000;    // about 100 us: longer than the parts of a step differ on cores that are free
constexpr unsigned kPatience = 64;   // spins after which whoever else wants the core gets it: 2 us
constexpr double kNap = 0.1;         // seconds that a sleeper sleeps before it looks around

// Counters go round: which of two is later.
bool reached(uint32_t counter, uint32_t wanted) { return static_cast<int32_t>(counter - wanted) >= 0; }

void pause([[maybe_unused]] unsigned spin) {
    if (spin % kPatience == kPatience - 1) {
        std::this_thread::yield();
        return;
    }
#if defined(__x86_64__)
    _mm_pause();
#endif
}

// Until the word is not `seen` any more, or for a nap, or for less.
void sleep_on([[maybe_unused]] Word& word, [[maybe_unused]] uint32_t seen) {
#if defined(__linux__)
    const timespec nap{0, static_cast<long>(kNap * 1e9)};
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT, seen, &nap, nullptr, 0);
#else
    std::this_thread::sleep_for(std::chrono::microseconds(50));
#endif
}

void wake_all([[maybe_unused]] Word& word) {
#if defined(__linux__)
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
#endif
}

// Text in shared memory: written once, or between two words that say when it holds.
template <size_t most>
struct Text {
    uint32_t bytes;
    char text[most];

    void set(std::string_view value) {
        bytes = static_cast<uint32_t>(std::min(value.size(), most));
        std::memcpy(text, value.data(), bytes);
    }
    std::string get() const { return std::string(text, std::min<size_t>(bytes, most)); }
};

struct Note {
    uint32_t turn;  // collectives that the rank had come to
    Text<kMostNote> text;
};

}  // namespace

// Apart, so that who writes one word does not slow those that wait for another.
struct Team::Seat {
    alignas(128) Word arrived;    // the last collective that this rank has come to
    alignas(128) Word exchanged;  // the last exchange
    alignas(128) Word heard;      // the last piece of a letter
    alignas(128) Word put[2];     // the last step that something lies on a shelf for
    alignas(128) Note notes[2];
    uint64_t lengths[2][2 * kMostStages + 2];
};

struct TeamMemory {
    alignas(128) Word sleepers;  // who wakes: at their word, or at anybody's
    alignas(128) Word stopping;  // 1: a reason is being written, 2: it holds
    Text<kMostNote> reason;
    alignas(128) Word told;
    struct alignas(128) Piece {
        uint64_t length;  // of the whole letter
        Text<kLetterBytes> text;
    } pieces[kLetters];
};

namespace {

constexpr long kPage = 4096;
constexpr long whole_pages(long bytes) { return (bytes + kPage - 1) / kPage * kPage; }

}  // namespace

Team::Team(int descriptor, int rank, int size, double seconds, int group)
    : rank_(rank), size_(size), group_(group), seconds_(seconds) {
    if (size < 1 || size > kMostRanks || rank < 0 || rank >= size) {
        throw std::invalid_argument("rank " + std::to_string(rank) + " of " + std::to_string(size) + ": ranks count from 0 to " +
                                    std::to_string(kMostRanks - 1) + " at most");
    }
    if (group < 1 || size % group != 0 || size / group > kMostStages) {
        throw std::invalid_argument(std::to_string(size) + " ranks in stages of " + std::to_string(group) + ": at most " +
                                    std::to_string(kMostStages) + " stages have equally many");
    }
    bytes_ = places_end() + (stages() > 1 ? size * shelf_bytes() : 0);
    // of zeros, whichever rank comes first: then all counters stand at their beginning
    struct stat there {};
    const bool made = fstat(descriptor, &there) == 0 && (there.st_size == bytes_ || ftruncate(descriptor, bytes_) == 0);
    void* const at = made ? mmap(nullptr, static_cast<size_t>(bytes_), PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0)
                          : MAP_FAILED;
    if (at == MAP_FAILED) {
        throw std::runtime_error("the memory that ranks share cannot be mapped: " + std::string(std::strerror(errno)));
    }
    memory_ = static_cast<TeamMemory*>(at);
}

Team::~Team() { munmap(memory_, static_cast<size_t>(bytes_)); }

Team::Seat& Team::seat(int rank) const {
    char* const base = reinterpret_cast<char*>(memory_) + whole_pages(sizeof(TeamMemory));
    return *reinterpret_cast<Seat*>(base + rank * whole_pages(sizeof(Seat)));
}

char* Team::place_of(int rank, uint32_t turn) const {
    char* const base = reinterpret_cast<char*>(memory_) + whole_pages(sizeof(TeamMemory)) + size_ * whole_pages(sizeof(Seat));
    return base + (2L * rank + (turn & 1U)) * kPlaceBytes;
}

// How many steps' things lie beside one another. With n stages n steps run at most, and each rank has seen all notes of the
// step n before its own: so no rank is n steps ahead of another, and what it reads is 2 n steps old at most. What is handed
// on was read by who has put down its note.
uint32_t Team::places_of(int rank, Shelf shelf) const {
    const bool handed_on = shelf == kGoods && rank / group_ != stages() - 1;
    return static_cast<uint32_t>(handed_on ? stages() + 1 : 2 * stages() + 2);
}

long Team::places_end() const {
    return whole_pages(sizeof(TeamMemory)) + size_ * whole_pages(sizeof(Seat)) + 2L * size_ * kPlaceBytes;
}

long Team::shelf_bytes() const { return (2L * stages() + 2) * (whole_pages(kMostNote) + static_cast<long>(kShelfBytes)); }

char* Team::shelf_of(int rank, Shelf shelf, uint32_t step) const {
    constexpr long note = whole_pages(kMostNote);
    char* const base = reinterpret_cast<char*>(memory_) + places_end() + rank * shelf_bytes();
    const long place = static_cast<long>(step % places_of(rank, shelf));
    return shelf == kNotes ? base + place * note : base + (2L * stages() + 2) * note + place * static_cast<long>(kShelfBytes);
}

void Team::put(Shelf shelf, uint32_t step, uint64_t bytes) {
    Seat& mine = seat(rank_);
    mine.lengths[shelf][step % places_of(rank_, shelf)] = bytes;
    publish(mine.put[shelf], step);
    if (shelf == kNotes && memory_->sleepers.load() != 0) wake_all(mine.arrived);
}

const void* Team::take(int whose, Shelf shelf, uint32_t step, uint64_t& bytes) {
    Seat& theirs = seat(whose);
    wait_until(theirs.put[shelf], whose, false,
               [&] { return reached(theirs.put[shelf].load(std::memory_order_acquire), step); });
    bytes = theirs.lengths[shelf][step % places_of(whose, shelf)];
    return shelf_of(whose, shelf, step);
}

void Team::check_stopped() const {
    if (const std::string why = stopped(); !why.empty()) throw RankLost(why);
}

// Until holds(), which looks at the word of rank `whose`. The time limit counts naps, so that a process that stood still
// itself does not take the others for lost.
template <typename Holds>
void Team::wait_until(Word& word, int whose, bool patient, const Holds& holds) {
    for (unsigned spin = 0; spin < kSpins; ++spin) {
        if (holds()) return;
        pause(spin);
    }
    const double limit = exchanged_ < 2 ? std::max(seconds_, kStart) : seconds_;
    double waited = 0;
    for (;;) {
        const std::string why = stopped();
        if (holds()) return;  // what has come counts, though its rank has ended since
        if (!why.empty()) throw RankLost(why);
        const Clock::time_point began = Clock::now();
        memory_->sleepers.fetch_add(1);  // before the look: who writes after it sees a sleeper
        const uint32_t seen = word.load();
        const bool there = holds();
        if (!there) sleep_on(word, seen);
        memory_->sleepers.fetch_sub(1);
        if (there) return;
        waited += std::min(kNap * 1.5, std::chrono::duration<double>(Clock::now() - began).count());
        if (!patient && waited > limit) {
            const std::string within = std::to_string(static_cast<long>(limit));
            stop("rank " + std::to_string(whose) + " of " + std::to_string(size_) + " did not come within " + within + " s");
        }
    }
}

void Team::publish(Word& word, uint32_t value) {
    word.store(value);
    if (memory_->sleepers.load() != 0) wake_all(word);
}

void* Team::place() { return place_of(rank_, turn_ + 1); }

void Team::arrive(long) {
    publish(seat(rank_).arrived, ++turn_);
    const int first = rank_ - rank();
    for (int other = first; other < first + group_; ++other) {
        Seat& theirs = seat(other);
        wait_until(theirs.arrived, other, false, [&] {
            if (reached(theirs.arrived.load(std::memory_order_acquire), turn_)) return true;
            const bool left = reached(theirs.exchanged.load(std::memory_order_acquire), exchanged_ + 1) ||
                              (step_ != 0 && reached(theirs.put[kNotes].load(std::memory_order_acquire), step_));
            if (!left) return false;
            if (reached(theirs.arrived.load(std::memory_order_acquire), turn_)) return true;
            throw StepLeft("rank " + std::to_string(other) + " has left the step");
        });
    }
}

const void* Team::part_of(int rank) const { return place_of(rank_ - this->rank() + rank, turn_); }

std::vector<std::string> Team::exchange(std::string_view note) {
    if (note.size() > kMostNote) throw std::invalid_argument("a note of more than " + std::to_string(kMostNote) + " bytes");
    const uint32_t now = exchanged_ + 1;
    Note& mine = seat(rank_).notes[now & 1U];
    mine.turn = turn_;
    mine.text.set(note);
    publish(seat(rank_).exchanged, now);
    if (memory_->sleepers.load() != 0) wake_all(seat(rank_).arrived);  // who waits for this rank in a collective
    std::vector<std::string> notes;
    for (int other = 0; other < size_; ++other) {
        Seat& theirs = seat(other);
        wait_until(theirs.exchanged, other, false,
                   [&] { return reached(theirs.exchanged.load(std::memory_order_acquire), now); });
        const Note& said = theirs.notes[now & 1U];
        if (reached(said.turn, turn_)) turn_ = said.turn;
        notes.push_back(said.text.get());
    }
    exchanged_ = now;
    seat(rank_).arrived.store(turn_);
    return notes;
}

void Team::tell(std::string_view letter) {
    size_t at = 0;
    do {
        for (int other = 1; other < size_; ++other) {
            Word& heard = seat(other).heard;
            wait_until(heard, other, false,
                       [&] { return reached(heard.load(std::memory_order_acquire) + kLetters - 1, told_); });
        }
        check_stopped();
        const std::string_view text = letter.substr(at, kLetterBytes);
        TeamMemory::Piece& piece = memory_->pieces[told_ % kLetters];
        piece.length = letter.size();
        piece.text.set(text);
        publish(memory_->told, ++told_);
        at += text.size();
    } while (at < letter.size());
}

std::string Team::hear() {
    std::string letter;
    do {
        Word& told = memory_->told;
        wait_until(told, 0, true, [&] { return reached(told.load(std::memory_order_acquire), told_ + 1); });
        const TeamMemory::Piece& piece = memory_->pieces[told_ % kLetters];
        letter += piece.text.get();
        const bool whole = letter.size() >= piece.length;
        publish(seat(rank_).heard, ++told_);
        if (whole) return letter;
    } while (true);
}

void Team::stop(std::string_view why) {
    uint32_t never = 0;
    if (!memory_->stopping.compare_exchange_strong(never, 1)) return;  // the first reason is the cause
    memory_->reason.set(why);
    memory_->stopping.store(2);
    wake_all(memory_->told);
    for (int rank = 0; rank < size_; ++rank) {
        Seat& each = seat(rank);
        for (Word* const word : {&each.arrived, &each.exchanged, &each.heard, &each.put[0], &each.put[1]}) wake_all(*word);
    }
}

std::string Team::stopped() const {
    if (memory_->stopping.load(std::memory_order_acquire) != 2) return {};
    const std::string why = memory_->reason.get();
    return why.empty() ? "the ranks were told to end" : why;
}

}  // namespace quintet::cpu
