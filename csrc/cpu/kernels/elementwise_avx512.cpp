// Numbers one by one with AVX512.
#include "cpu/kernels/vectors_avx512.h"
#include "cpu/kernels/elementwise_body.h"

namespace quintet::cpu {

const ElementwiseKernels kElementwiseAvx512 = QUINTET_ELEMENTWISE_KERNELS;

}  // namespace quintet::cpu
