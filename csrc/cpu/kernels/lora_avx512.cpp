// Low-rank adapters with AVX512.
#include "cpu/kernels/vectors_avx512.h"
#include "cpu/kernels/lora_body.h"

namespace quintet::cpu {

const LoraKernels kLoraAvx512 = QUINTET_LORA_KERNELS;

}  // namespace quintet::cpu
