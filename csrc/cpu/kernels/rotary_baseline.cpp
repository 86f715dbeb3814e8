// The rotary embedding with what every processor of the architecture has.
#include "cpu/kernels/vectors_baseline.h"
#include "cpu/kernels/rotary_body.h"

namespace quintet::cpu {

const RotaryKernels kRotaryBaseline = QUINTET_ROTARY_KERNELS;

}  // namespace quintet::cpu
