// The instruction sets that kernels are tried with, as far as the processor has them.
#pragma once

#include <stdexcept>

#include "common/pool.h"
#include "cpu/features.h"

namespace {

#ifdef __SANITIZE_THREAD__  // threads share out work alike whatever the set, and it is slow to watch them
constexpr const char* kIsas[] = {"baseline", "avx2"};
#else
constexpr const char* kIsas[] = {"baseline", "neon", "neon_dotprod", "neon_i8mm", "neon_bf16", "avx2", "avx2_vnni",
                                   "avx512", "avx512_bf16", "amx"};
#endif

// what() with each of them, in three threads; all is left as it was.
template <typename What>
void with_each_isa(What what) {
    const int threads = quintet::pool_threads();
    quintet::set_pool_threads(3);
    for (const char* isa : kIsas) {
        try {
            quintet::cpu::choose_isa(isa);
        } catch (const std::invalid_argument&) {
            continue;
        }
        what();
    }
    quintet::cpu::choose_isa(quintet::cpu::isa_name(quintet::cpu::isa()));
    quintet::set_pool_threads(threads);
}

}  // namespace
