// States with what every processor of the architecture has.
#include "cpu/kernels/vectors_baseline.h"
#include "cpu/kernels/states_body.h"

namespace quintet::cpu {

const StateKernels kStatesBaseline = QUINTET_STATE_KERNELS;

}  // namespace quintet::cpu
