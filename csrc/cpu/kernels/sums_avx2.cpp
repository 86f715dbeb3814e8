// Sums over ranks with AVX2, FMA and F16C.
#include "cpu/kernels/vectors_avx2.h"
#include "cpu/kernels/sums_body.h"

namespace quintet::cpu {

const SumKernels kSumsAvx2 = QUINTET_SUM_KERNELS;

}  // namespace quintet::cpu
