// Quantized products with NEON's products of four bytes with a sign (ARMv8.2 with dotprod).
#include "cpu/kernels/quantized_neon_dots.h"

namespace quintet::cpu {

constexpr QuantizedKernels kQuantizedNeonDotprod = quantized_kernels<TwoBytes, OneByte, SmallByOneByte>();

}  // namespace quintet::cpu
