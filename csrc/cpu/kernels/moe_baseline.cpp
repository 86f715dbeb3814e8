// Sums of weighted rows with what every processor of the architecture has.
#include "cpu/kernels/vectors_baseline.h"
#include "cpu/kernels/moe_body.h"

namespace quintet::cpu {

const MoeKernels kMoeBaseline = QUINTET_MOE_KERNELS;

}  // namespace quintet::cpu
