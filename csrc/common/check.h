// Refuses an argument that is out of range with a message that says the range.
#pragma once

#include <cstdint>

namespace quintet {

// All three throw std::invalid_argument, which Python sees as ValueError.
void check_bytes(int64_t bytes, int64_t low, int64_t high);
void check_threads(int64_t threads);    // 1..1024
void check_seconds(double seconds);     // (0, 60]; NaN is refused

}  // namespace quintet
