// What attention over pages and attention within a step share: kernels, memory by lines, and the checks of a batch.
#pragma once

#include <cstdlib>
#include <memory>

#include "cpu/kernels/attention.h"

namespace quintet::cpu {

// Of the instruction set that was chosen.
const AttentionKernels& attention_kernels();

struct Free {
    void operator()(void* memory) const { std::free(memory); }
};
using Memory = std::unique_ptr<char, Free>;

// Rounded up to whole lines of the caches.
size_t whole_lines(size_t bytes);
Memory aligned(size_t bytes);

// std::invalid_argument where a row's value is not from `least` to `limit`.
void check(const char* what, long row, long value, long limit, long least = 0);

}  // namespace quintet::cpu
