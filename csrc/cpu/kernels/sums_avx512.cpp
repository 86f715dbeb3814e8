// Sums over ranks with AVX512.
#include "cpu/kernels/vectors_avx512.h"
#include "cpu/kernels/sums_body.h"

namespace quintet::cpu {

const SumKernels kSumsAvx512 = QUINTET_SUM_KERNELS;

}  // namespace quintet::cpu
