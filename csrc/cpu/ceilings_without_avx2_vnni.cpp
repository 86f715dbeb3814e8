// Part of without_avx2_vnni.cpp: enumerators of ceiling.h have names that other headers use, too.
#include "cpu/kernels/ceiling.h"

namespace quintet::cpu {

const CeilingKernels kCeilingAvx2Vnni{};

}  // namespace quintet::cpu
