// Numbers one by one with AVX2, FMA and F16C.
#include "cpu/kernels/vectors_avx2.h"
#include "cpu/kernels/elementwise_body.h"

namespace quintet::cpu {

const ElementwiseKernels kElementwiseAvx2 = QUINTET_ELEMENTWISE_KERNELS;

}  // namespace quintet::cpu
