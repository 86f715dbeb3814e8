// Normalisations with what every processor of the architecture has.
#include "cpu/kernels/vectors_baseline.h"
#include "cpu/kernels/norm_body.h"

namespace quintet::cpu {

const NormKernels kNormBaseline = QUINTET_NORM_KERNELS;

}  // namespace quintet::cpu
