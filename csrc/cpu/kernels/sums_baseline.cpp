// Sums over ranks with what every processor of the architecture has.
#include "cpu/kernels/vectors_baseline.h"
#include "cpu/kernels/sums_body.h"

namespace quintet::cpu {

const SumKernels kSumsBaseline = QUINTET_SUM_KERNELS;

}  // namespace quintet::cpu
