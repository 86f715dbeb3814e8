// The rotary embedding with AVX2, FMA and F16C.
#include "cpu/kernels/vectors_avx2.h"
#include "cpu/kernels/rotary_body.h"

namespace quintet::cpu {

const RotaryKernels kRotaryAvx2 = QUINTET_ROTARY_KERNELS;

}  // namespace quintet::cpu
