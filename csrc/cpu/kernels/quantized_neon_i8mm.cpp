// Quantized products with NEON's products of four bytes without a sign by four with one (ARMv8.6, or i8mm before it).
#include "cpu/kernels/quantized_neon_dots.h"

namespace quintet::cpu {

constexpr QuantizedKernels kQuantizedNeonI8mm = quantized_kernels<TwoBytes, OneByte, SmallByOneByte>();

}  // namespace quintet::cpu
