// Numbers one by one with what every processor of the architecture has.
#include "cpu/kernels/vectors_baseline.h"
#include "cpu/kernels/elementwise_body.h"

namespace quintet::cpu {

const ElementwiseKernels kElementwiseBaseline = QUINTET_ELEMENTWISE_KERNELS;

}  // namespace quintet::cpu
