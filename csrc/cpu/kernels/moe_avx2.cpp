// Sums of weighted rows with AVX2.
#include "cpu/kernels/vectors_avx2.h"
#include "cpu/kernels/moe_body.h"

namespace quintet::cpu {

const MoeKernels kMoeAvx2 = QUINTET_MOE_KERNELS;

}  // namespace quintet::cpu
