// Normalisations with AVX512.
#include "cpu/kernels/vectors_avx512.h"
#include "cpu/kernels/norm_body.h"

namespace quintet::cpu {

const NormKernels kNormAvx512 = QUINTET_NORM_KERNELS;

}  // namespace quintet::cpu
