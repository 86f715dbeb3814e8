// The loops that find a processor's ceilings, one object for each instruction set.
//
// These files are compiled with flags that the processor at hand may not obey. They therefore include no header with
// inline functions other than intrinsics: the linker keeps one copy of an inline function, and might keep theirs.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace quintet::cpu {

// What products multiply. Each instruction set does it with the instruction that its products use.
enum Numbers { kFloat32, kBfloat16, kInt8, kNumbers };

struct MultiplyLoop {
    // Does `rounds` rounds of multiply-adds in registers; returns a digest of them all.
    float (*run)(size_t rounds);
    size_t adds;  // multiply-adds in a round
};

struct CeilingKernels {
    // Reads `lines` cache lines of 64 bytes from `data`, which is aligned to 64; returns a digest of them all.
    uint64_t (*read)(const void* data, size_t lines);
    MultiplyLoop multiply[kNumbers];
};

extern const CeilingKernels kCeilingBaseline;  // SSE2 on x86-64, NEON on aarch64, plain C++ elsewhere
#if defined(__x86_64__)
extern const CeilingKernels kCeilingAvx2;
extern const CeilingKernels kCeilingAvx2Vnni;
extern const CeilingKernels kCeilingAvx512;
extern const CeilingKernels kCeilingAvx512Bf16;
extern const CeilingKernels kCeilingAmx;
#endif

}  // namespace quintet::cpu
