// Sums of weighted rows with AVX512.
#include "cpu/kernels/vectors_avx512.h"
#include "cpu/kernels/moe_body.h"

namespace quintet::cpu {

const MoeKernels kMoeAvx512 = QUINTET_MOE_KERNELS;

}  // namespace quintet::cpu
