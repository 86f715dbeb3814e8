// Quantizing weights with AVX2, FMA and F16C.
#include "cpu/kernels/quantized.h"
#include "cpu/kernels/quantized_avx2_vectors.h"
#include "cpu/kernels/quantized_pack_body.h"

namespace quintet::cpu {

constexpr QuantizedPacking kQuantizedPackingAvx2 = kPacking;

}  // namespace quintet::cpu
