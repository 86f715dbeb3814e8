// Low-rank adapters with AVX2, FMA and F16C.
#include "cpu/kernels/vectors_avx2.h"
#include "cpu/kernels/lora_body.h"

namespace quintet::cpu {

const LoraKernels kLoraAvx2 = QUINTET_LORA_KERNELS;

}  // namespace quintet::cpu
