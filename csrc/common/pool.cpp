#include "common/pool.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
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
constexpr int kSpins = 2000;  // about 50 us: longer than the gap between two kernels of a step

void relax() {
#if defined(__x86_64__)
    _mm_pause();
#endif
}

class Pool {
public:
    explicit Pool(int threads) {
        try {
            for (int i = 1; i < threads; ++i) workers_.emplace_back([this, i] { work(i); });
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

    void run(Job job, const void* context, int parts) {
        job_ = job;
        context_ = context;
        parts_ = parts;
        left_.store(size() - 1, std::memory_order_relaxed);  // who has no part answers too: nobody is a turn behind
        {
            const std::lock_guard<std::mutex> lock(mutex_);  // or a worker that is about to sleep would miss it
            turn_.fetch_add(1, std::memory_order_release);
        }
        if (sleeping_.load(std::memory_order_acquire) > 0) wake_.notify_all();
        job(context, 0, parts);
        for (int spins = 0; left_.load(std::memory_order_acquire) != 0; ++spins) {
            if (spins < kSpins) {
                relax();
            } else {
                std::this_thread::yield();  // its cores may be busy with somebody else
            }
        }
    }

private:
    void work(int part) {
        uint64_t seen = 0;
        for (;;) {
            seen = next(seen);
            if (stopping_) return;
            if (part < parts_) job_(context_, part, parts_);
            left_.fetch_sub(1, std::memory_order_release);
        }
    }

    // Waits for a turn after `seen`.
    uint64_t next(uint64_t seen) {
        for (int spins = 0; spins < kSpins; ++spins) {
            const uint64_t now = turn_.load(std::memory_order_acquire);
            if (now != seen) return now;
            relax();
        }
        std::unique_lock<std::mutex> lock(mutex_);
        sleeping_.fetch_add(1, std::memory_order_release);
        wake_.wait(lock, [&] { return turn_.load(std::memory_order_acquire) != seen; });
        sleeping_.fetch_sub(1, std::memory_order_release);
        return turn_.load(std::memory_order_acquire);
    }

    void stop() {
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            stopping_ = true;
            turn_.fetch_add(1, std::memory_order_release);
        }
        wake_.notify_all();
        for (std::thread& worker : workers_) worker.join();
        workers_.clear();
    }

    std::vector<std::thread> workers_;
    std::mutex mutex_;
    std::condition_variable wake_;
    std::atomic<uint64_t> turn_{0};
    std::atomic<int> sleeping_{0};
    std::atomic<int> left_{0};
    bool stopping_ = false;  // written before turn_ moves
    Job job_ = nullptr;
    const void* context_ = nullptr;
    int parts_ = 0;
};

// Made at the first use, never destroyed: threads that end with the process need no farewell, and a static destructor
// would run while Python's own threads may still call in.
struct Global {
    std::mutex mutex;  // held while a job runs
    std::unique_ptr<Pool> pool = std::make_unique<Pool>(1);
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

void run_parts(Job job, const void* context, int parts) {
    Global& g = global();
    const std::lock_guard<std::mutex> lock(g.mutex);
    if (parts > g.pool->size()) throw std::logic_error("more parts than threads");
    if (parts == 1) {
        job(context, 0, 1);
        return;
    }
    g.pool->run(job, context, parts);
}

int pool_threads() { return global().threads.load(std::memory_order_relaxed); }

void set_pool_threads(int threads) {
    if (threads < 1 || threads > kMostThreads) {
        throw std::invalid_argument("threads must be 1 to " + std::to_string(kMostThreads) + ", not " +
                                    std::to_string(threads));
    }
    watch_forks();
    Global& g = global();
    const std::lock_guard<std::mutex> lock(g.mutex);
    if (threads == g.pool->size()) return;
    auto next = std::make_unique<Pool>(threads);
    g.pool = std::move(next);
    g.threads.store(threads, std::memory_order_relaxed);
}

}  // namespace quintet
