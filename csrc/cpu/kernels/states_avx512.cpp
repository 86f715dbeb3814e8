// States with AVX512.
#include "cpu/kernels/vectors_avx512.h"
#include "cpu/kernels/states_body.h"

namespace quintet::cpu {

const StateKernels kStatesAvx512 = QUINTET_STATE_KERNELS;

}  // namespace quintet::cpu
