// Products with 8-bit floats by AVX512.
#include "cpu/kernels/float8_avx512_vectors.h"
#include "cpu/kernels/float8_body.h"

namespace quintet::cpu {

constexpr Float8Kernels kFloat8Avx512 =
    float8_kernels<Singly<float, 4, 4, 2>, Singly<Bfloat16, 4, 4, 2>, Singly<Float16, 4, 4, 2>>();

}  // namespace quintet::cpu
