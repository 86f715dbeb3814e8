#include "common/check.h"

#include <stdexcept>
#include <string>

namespace quintet {

namespace {

constexpr int64_t kMaxThreads = 1024;
constexpr double kMaxSeconds = 60.0;  // the call cannot be interrupted while it runs

}  // namespace

void check_bytes(int64_t bytes, int64_t low, int64_t high) {
    if (bytes < low || bytes > high) {
        throw std::invalid_argument("bytes must be between " + std::to_string(low) + " and " + std::to_string(high) +
                                    ", got " + std::to_string(bytes));
    }
}

void check_threads(int64_t threads) {
    if (threads < 1 || threads > kMaxThreads) {
        throw std::invalid_argument("threads must be between 1 and " + std::to_string(kMaxThreads) + ", got " +
                                    std::to_string(threads));
    }
}

void check_seconds(double seconds) {
    if (!(seconds > 0.0 && seconds <= kMaxSeconds)) {
        throw std::invalid_argument("seconds must be above 0 and at most 60, got " + std::to_string(seconds));
    }
}

}  // namespace quintet
