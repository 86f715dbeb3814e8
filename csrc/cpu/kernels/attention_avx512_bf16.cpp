// Attention with AVX512 and its products of bfloat16 in pairs.
#include "cpu/kernels/attention.h"
#include "cpu/kernels/attention_avx512_bf16_vectors.h"
#include "cpu/kernels/attention_body.h"

namespace quintet::cpu {

const AttentionKernels kAttentionAvx512Bf16 = QUINTET_ATTENTION_KERNELS;

}  // namespace quintet::cpu
