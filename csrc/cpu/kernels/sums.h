// Sums of what several ranks bring, one object for each instruction set: see norm.h for what holds of these files.
#pragma once

#include "cpu/kernels/floats.h"

namespace quintet::cpu {

// out[i] = parts[0][i] + parts[1][i] + ..., i < count: from the first to the last, in float32, rounded once. out may be none
// of the parts.
using SumKernel = void (*)(void* out, const void* const* parts, int ranks, long count);
using SumKernels = OfTypes<SumKernel>;

extern const SumKernels kSumsBaseline;
#if defined(__x86_64__)
extern const SumKernels kSumsAvx2;
extern const SumKernels kSumsAvx512;
#endif

}  // namespace quintet::cpu
