// States with AVX2, FMA and F16C.
#include "cpu/kernels/vectors_avx2.h"
#include "cpu/kernels/states_body.h"

namespace quintet::cpu {

const StateKernels kStatesAvx2 = QUINTET_STATE_KERNELS;

}  // namespace quintet::cpu
