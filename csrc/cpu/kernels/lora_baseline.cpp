// Low-rank adapters with what every processor of the architecture has.
#include "cpu/kernels/vectors_baseline.h"
#include "cpu/kernels/lora_body.h"

namespace quintet::cpu {

const LoraKernels kLoraBaseline = QUINTET_LORA_KERNELS;

}  // namespace quintet::cpu
