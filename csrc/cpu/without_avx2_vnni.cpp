// Stands in for the kernels of AVX-VNNI where they are not compiled: empty tables, which isa() knows them by.
#include "cpu/kernels/quantized.h"

namespace quintet::cpu {

const QuantizedKernels kQuantizedAvx2Vnni{};

}  // namespace quintet::cpu
