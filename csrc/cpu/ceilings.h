// What this machine can do at best: the figures that a benchmark is a share of.
#pragma once

#include <cstdint>

namespace quintet::cpu {

// The best rate, in GB/s (1e9 bytes), at which `threads` threads together read a buffer of `bytes` bytes from memory.
// Each thread reads its own part, which it has touched first. Choose `bytes` well above the last-level caches.
// Throws std::invalid_argument, or std::runtime_error when memory or threads cannot be had.
double read_bandwidth(int64_t bytes, int64_t threads, double seconds);

// The best rate, in GFLOP/s of float32, of multiply-adds in registers, on `threads` threads together; a multiply-add is
// two operations. Uses the widest vectors that isa() allows.
double fma_peak(int64_t threads, double seconds);

}  // namespace quintet::cpu
