// Normalisations with AVX2, FMA and F16C.
#include "cpu/kernels/vectors_avx2.h"
#include "cpu/kernels/norm_body.h"

namespace quintet::cpu {

const NormKernels kNormAvx2 = QUINTET_NORM_KERNELS;

}  // namespace quintet::cpu
