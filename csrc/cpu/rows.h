// Which kernels run, and on how many threads, for what is computed row by row or number by number.
#pragma once

#include <algorithm>

#include "common/pool.h"
#include "cpu/features.h"

namespace quintet::cpu {

constexpr long kThreadBytes = 32L << 10;  // read or written; what is worth another thread's waking

// Of three tables of kernels, that of the chosen instruction set.
template <typename Kernels>
const Kernels& kernels_of([[maybe_unused]] const Kernels& avx512, [[maybe_unused]] const Kernels& avx2,
                          const Kernels& baseline) {
    switch (chosen_isa()) {
        case Isa::amx:
        case Isa::avx512_bf16:
        case Isa::avx512: return avx512;
        case Isa::avx2_vnni:
        case Isa::avx2: return avx2;
        default: return baseline;
    }
}

// body(first, last) over `rows` rows that have `bytes` each.
template <typename Body>
void for_rows(long rows, long bytes, const Body& body) {
    parallel_for(rows, std::max(1L, kThreadBytes / std::max(1L, bytes)), body);
}

}  // namespace quintet::cpu

#if defined(__x86_64__)
#define QUINTET_KERNELS(name) ::quintet::cpu::kernels_of(name##Avx512, name##Avx2, name##Baseline)
#else
#define QUINTET_KERNELS(name) (name##Baseline)
#endif
