// The two loops that find a processor's ceilings, one object for each instruction set.
//
// These files are compiled with flags that the processor at hand may not obey. They therefore include no header with
// inline functions other than intrinsics: the linker keeps one copy of an inline function, and might keep theirs.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace quintet::cpu {

struct CeilingKernels {
    // Reads `lines` cache lines of 64 bytes from `data`, which is aligned to 64; returns a digest of them all.
    uint64_t (*read)(const void* data, size_t lines);
    // Does `rounds` rounds of multiply-adds in registers; returns a digest of them all.
    float (*fma)(size_t rounds);
    size_t flops_per_round;  // a multiply-add is two
};

extern const CeilingKernels kCeilingBaseline;  // SSE2 on x86-64, NEON on aarch64, plain C++ elsewhere
#if defined(__x86_64__)
extern const CeilingKernels kCeilingAvx2;
extern const CeilingKernels kCeilingAvx512;
#endif

}  // namespace quintet::cpu
