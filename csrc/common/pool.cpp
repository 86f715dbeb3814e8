#include "common/pool.h"

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace quintet {

namespace {

constexpr int kMostThreads = 256;
constexpr unsigned kSpins = 2000;  // about 50 us: longer than the gap between two kernels of a step
constexpr unsigned kPatience = 64;  // spins after which whoever else wants the core gets it: 2 us

// Stretches of memory that are to be read soon. Whoever takes a piece while they are exchanged may take one of neither:
// asking for memory that is not there does nothing.
class Ahead {
public:
    void exchange(const Stretch* stretches, int count) {
        count_.store(0, std::memory_order_relaxed);
        for (int i = 0; i < count; ++i) {
            const auto at = reinterpret_cast<uintptr_t>(stretches[i].at);
            next_[i].store(at, std::memory_order_relaxed);
            ends_[i].store(at + static_cast<uintptr_t>(stretches[i].bytes), std::memory_order_relaxed);
        }
        if (count > 0) count_.store(count, std::memory_order_release);
    }

    // Asks for the next piece; false where there is none.
    bool ask() {
        const int count = count_.load(std::memory_order_acquire);
        for (int i = 0; i < count; ++i) {
            const uintptr_t end = ends_[i].load(std::memory_order_relaxed);
            if (next_[i].load(std::memory_order_relaxed) >= end) continue;
            const uintptr_t at = next_[i].fetch_add(kPiece, std::memory_order_relaxed);
            for (uintptr_t line = at; line < at + kPiece && line < end; line += kLine) {
                __builtin_prefetch(reinterpret_cast<const void*>(line), 0, 2);
            }
            return true;
        }
        return false;
    }

private:
    static constexpr uintptr_t kLine = 64, kPiece = 16 * kLine;  // a job that comes meanwhile waits for so little

    alignas(64) std::atomic<int> count_{0};
    std::atomic<uintptr_t> ends_[kMostAhead] = {};
    alignas(64) std::atomic<uintptr_t> next_[kMostAhead] = {};
};

// A job's parts are claimed one by one, and the caller waits for those that were claimed, not for threads: one that comes
// late, because another process has its core, finds nothing left, and the others did its share.
class Pool {
public:
    Pool(int threads, Settle settle, Ahead& ahead) : ahead_(ahead) {
        try {
            for (int i = 1; i < threads; ++i) {
                workers_.emplace_back([this, settle, i, threads] {
                    if (settle != nullptr) settle(i, threads);
                    work();
                });
            }
        } catch (const std::system_error& error) {
            stop();
            throw std::runtime_error("only " + std::to_string(workers_.size() + 1) + " of " + std::to_string(threads) +
                                     " threads could be started: " + error.what() + "; ask for fewer");
        }
    }
    ~Pool() { stop(); }
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int size() const { return static_cast<int>(workers_.size()) + 1; }
    long jobs() const { return static_cast<long>(turn_.load(std::memory_order_relaxed)); }

    void run(Job job, const void* context, int parts) {
        job_.store(job, std::memory_order_relaxed);
        context_.store(context, std::memory_order_relaxed);
        left_.store(parts, std::memory_order_relaxed);
        open(parts);
        take_part();
        for (unsigned spin = 0; left_.load(std::memory_order_acquire) != 0; ++spin) wait_a_moment(spin);
    }

private:
    // Which job is open, of how many parts, and how many of them are taken: in one word, so that whoever takes a part
    // knows that its job is still open.
    struct Claims {
        uint32_t turn;
        int parts;
        int taken;

        static Claims of(uint64_t word) {
            return {static_cast<uint32_t>(word >> 32), static_cast<int>(word >> 16 & 0xffff),
                    static_cast<int>(word & 0xffff)};
        }
        uint64_t packed() const {
            return static_cast<uint64_t>(turn) << 32 | static_cast<uint64_t>(parts) << 16 | static_cast<uint64_t>(taken);
        }
    };

    void open(int parts) {
        const uint32_t turn = turn_.load(std::memory_order_relaxed) + 1;
        claims_.store(Claims{turn, parts, 0}.packed(), std::memory_order_release);  // threads that spin wait for this
        turn_.store(turn, std::memory_order_release);                               // those that sleep for this
        turn_.notify_all();  // asks nothing of the system where no thread sleeps
    }

    // Does parts of the open job until all are taken.
    void take_part() {
        uint64_t word = claims_.load(std::memory_order_acquire);
        for (;;) {
            const Claims open = Claims::of(word);
            if (open.taken == open.parts) return;
            if (!claims_.compare_exchange_weak(word, word + 1, std::memory_order_acq_rel, std::memory_order_acquire)) {
                continue;
            }
            // until left_ counts this part as done, the caller is in run() and these stay as they are
            const Job job = job_.load(std::memory_order_relaxed);
            job(context_.load(std::memory_order_relaxed), open.taken, open.parts);
            left_.fetch_sub(1, std::memory_order_release);
            word = claims_.load(std::memory_order_acquire);
        }
    }

    void work() {
        uint32_t seen = 0;
        for (;;) {
            seen = next(seen);
            if (stopping_.load(std::memory_order_acquire)) return;
            take_part();
        }
    }

    // Waits for a turn after `seen`: spins, then sleeps.
    uint32_t next(uint32_t seen) {
        for (unsigned spin = 0; spin < kSpins;) {
            const uint32_t now = Claims::of(claims_.load(std::memory_order_acquire)).turn;
            if (now != seen) return now;
            if (!ahead_.ask()) wait_a_moment(spin++);
        }
        turn_.wait(seen, std::memory_order_acquire);
        return turn_.load(std::memory_order_acquire);
    }

    void stop() {
        stopping_.store(true, std::memory_order_release);
        open(0);
        for (std::thread& worker : workers_) worker.join();
        workers_.clear();
    }

    std::vector<std::thread> workers_;
    // A thread that waits for a job gets all of it in one cache line.
    alignas(64) std::atomic<uint64_t> claims_{0};
    std::atomic<Job> job_{nullptr};
    std::atomic<const void*> context_{nullptr};
    // Apart, so that a thread that waits for one does not slow those that write to another.
    alignas(64) std::atomic<int> left_{0};
    alignas(64) std::atomic<uint32_t> turn_{0};
    std::atomic<bool> stopping_{false};
    Ahead& ahead_;
};

// Made at the first use, never destroyed: threads that end with the process need no farewell, and a static destructor
// would run while Python's own threads may still call in.
struct Global {
    std::mutex mutex;  // held while a job runs
    Ahead ahead;       // before the threads that read it
    std::unique_ptr<Pool> pool = std::make_unique<Pool>(1, nullptr, ahead);
    Settle settle = nullptr;
    std::atomic<int> threads{1};
};

std::atomic<Global*>& current() {
    static std::atomic<Global*> made{new Global};
    return made;
}

Global& global() { return *current().load(std::memory_order_acquire); }

#if defined(__unix__) || defined(__APPLE__)
// A forked child has none of the threads, and perhaps a mutex that somebody held: it begins anew, with one thread.
void begin_anew() { current().store(new Global, std::memory_order_release); }
#endif

void watch_forks() {
#if defined(__unix__) || defined(__APPLE__)
    static const int watched = pthread_atfork(nullptr, nullptr, begin_anew);
    static_cast<void>(watched);
#endif
}

}  // namespace

void wait_a_moment(unsigned spin) {
    if (spin % kPatience == kPatience - 1) {
        std::this_thread::yield();
        return;
    }
#if defined(__x86_64__)
    _mm_pause();
#endif
}

void run_parts(Job job, const void* context, int parts) {
    Global& g = global();
    const std::lock_guard<std::mutex> lock(g.mutex);
    if (parts == 1) {
        job(context, 0, 1);
        return;
    }
    g.pool->run(job, context, parts);
}

void read_ahead(const Stretch* stretches, int count) {
    global().ahead.exchange(stretches, count);
}

long shared_jobs() {
    Global& g = global();
    const std::lock_guard<std::mutex> lock(g.mutex);
    return g.pool->jobs();
}

namespace {
thread_local int limit = 0;
}

int pool_threads() {
    const int threads = global().threads.load(std::memory_order_relaxed);
    return limit > 0 && limit < threads ? limit : threads;
}

void limit_pool_threads(int threads) {
    if (threads < 0) throw std::invalid_argument("a limit of threads is 0 or more, not " + std::to_string(threads));
    limit = threads;
}

void set_pool_threads(int threads, Settle settle) {
    if (threads < 1 || threads > kMostThreads) {
        throw std::invalid_argument("threads must be 1 to " + std::to_string(kMostThreads) + ", not " +
                                    std::to_string(threads));
    }
    watch_forks();
    Global& g = global();
    const std::lock_guard<std::mutex> lock(g.mutex);
    if (threads == g.pool->size() && settle == g.settle) return;
    auto next = std::make_unique<Pool>(threads, settle, g.ahead);
    g.pool = std::move(next);
    g.settle = settle;
    g.threads.store(threads, std::memory_order_relaxed);
}

}  // namespace quintet
