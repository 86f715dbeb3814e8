// Ceilings with AVX512 and its dot products; compiled with -mavx512bf16 -mavx512vnni, run only where features() has them.
#include "cpu/kernels/ceiling_avx512_dots.h"

namespace quintet::cpu {

const CeilingKernels kCeilingAvx512Bf16 = {read_loop, {kLoop<InFloats>, kLoop<InPairs>, kLoop<InBytes>}};

}  // namespace quintet::cpu
