// The rotary embedding with AVX512.
#include "cpu/kernels/vectors_avx512.h"
#include "cpu/kernels/rotary_body.h"

namespace quintet::cpu {

const RotaryKernels kRotaryAvx512 = QUINTET_ROTARY_KERNELS;

}  // namespace quintet::cpu
