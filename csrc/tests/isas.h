// The instruction sets that kernels are tried with, as far as the processor has them.
#pragma once

namespace {

#ifdef __SANITIZE_THREAD__  // threads share out work alike whatever the set, and it is slow to watch them
constexpr const char* kIsas[] = {"baseline", "avx2"};
#else
constexpr const char* kIsas[] = {"baseline", "avx2", "avx512", "avx512_bf16"};
#endif

}  // namespace
