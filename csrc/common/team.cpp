#include "common/team.h"

#include <algorithm>
#include <barrier>
#include <chrono>
#include <limits>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

namespace quintet {

namespace {

using Clock = std::chrono::steady_clock;

constexpr int kMinRounds = 3;  // the first pays for cold caches and a sleeping clock

struct alignas(64) Span {  // a cache line each: members write theirs at the same moment
    Clock::time_point begin;
    Clock::time_point end;
};

// From the first member that began to the last that ended. Each reads the clock itself: one watch in a thread that is
// woken late would make the round look short.
double round_seconds(const std::vector<Span>& spans) {
    Clock::time_point begin = Clock::time_point::max();
    Clock::time_point end = Clock::time_point::min();
    for (const Span& span : spans) {
        begin = std::min(begin, span.begin);
        end = std::max(end, span.end);
    }
    return std::chrono::duration<double>(end - begin).count();
}

}  // namespace

double shortest_round(int threads, double seconds, const std::function<void(int)>& prepare,
                      const std::function<void(int)>& job) {
    const size_t size = static_cast<size_t>(threads);
    std::barrier gate(threads);
    std::vector<Span> spans(size);
    bool more = true;  // written by the caller's thread, only while the others wait at the gate

    auto play = [&](int index) {
        Span& span = spans[static_cast<size_t>(index)];
        span.begin = Clock::now();
        job(index);
        span.end = Clock::now();
    };
    auto member = [&](int index) {
        prepare(index);
        for (;;) {
            gate.arrive_and_wait();
            if (!more) return;
            play(index);
            gate.arrive_and_wait();
        }
    };

    std::vector<std::thread> others;  // the caller's thread is member 0
    others.reserve(size - 1);
    std::string failure;
    for (int i = 1; i < threads && failure.empty(); ++i) {
        try {
            others.emplace_back(member, i);
        } catch (const std::system_error& error) {
            failure = "only " + std::to_string(i) + " of " + std::to_string(threads) +
                      " threads could be started: " + error.what() + "; ask for fewer";
        }
    }
    for (size_t i = others.size() + 1; i < size; ++i) gate.arrive_and_drop();  // those that never were

    more = failure.empty();
    if (more) prepare(0);
    double best = std::numeric_limits<double>::infinity();
    double spent = 0.0;  // preparation is not counted
    for (int round = 0; more; ++round) {
        gate.arrive_and_wait();
        play(0);
        gate.arrive_and_wait();
        const double took = round_seconds(spans);
        best = std::min(best, took);
        spent += took;
        more = round + 1 < kMinRounds || spent < seconds;
    }
    gate.arrive_and_wait();
    for (std::thread& other : others) other.join();
    if (!failure.empty()) throw std::runtime_error(failure);
    return best;
}

}  // namespace quintet
