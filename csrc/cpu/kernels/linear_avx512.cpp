// Linear with AVX512.
#include "cpu/kernels/linear.h"
#include "cpu/kernels/linear_avx512_vectors.h"
#include "cpu/kernels/linear_body.h"

namespace quintet::cpu {

const LinearKernels kLinearAvx512 = {{multiply<OfFloat32>, multiply<OfBfloat16>, multiply<OfFloat16>}, {}};

}  // namespace quintet::cpu
