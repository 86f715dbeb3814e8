// Part of without_avx512.cpp: enumerators of ceiling.h have names that other headers use, too.
#include "cpu/kernels/ceiling.h"

namespace quintet::cpu {

const CeilingKernels kCeilingAvx512{};
const CeilingKernels kCeilingAvx512Bf16{};
const CeilingKernels kCeilingAmx{};

}  // namespace quintet::cpu
