// What this machine can do at best: the figures that a benchmark is a share of.
#pragma once

#include <cstdint>

#include "cpu/kernels/ceiling.h"

namespace quintet::cpu {

// The best rate, in GB/s (1e9 bytes), at which `threads` threads together read a buffer of `bytes` bytes from memory.
// Each thread reads its own part, which it has touched first. Choose `bytes` well above the last-level caches.
// Throws std::invalid_argument, or std::runtime_error when memory or threads cannot be had.
double read_bandwidth(int64_t bytes, int64_t threads, double seconds);

// The best rate, in 1e9 operations a second, of multiply-adds in registers on `threads` threads together; a multiply-add is
// two operations. In the instruction that products of these numbers use with chosen_isa().
double fma_peak(int64_t threads, double seconds, Numbers numbers = kFloat32);

}  // namespace quintet::cpu
