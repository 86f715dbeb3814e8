// Quantizing weights with what every processor of the architecture has.
#include "cpu/kernels/quantized.h"
#include "cpu/kernels/quantized_baseline_vectors.h"
#include "cpu/kernels/quantized_pack_body.h"

namespace quintet::cpu {

constexpr QuantizedPacking kQuantizedPackingBaseline = kPacking;

}  // namespace quintet::cpu
