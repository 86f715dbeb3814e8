// Attention with AVX512.
#include "cpu/kernels/attention.h"
#include "cpu/kernels/attention_avx512_vectors.h"
#include "cpu/kernels/attention_body.h"

namespace quintet::cpu {

const AttentionKernels kAttentionAvx512 = QUINTET_ATTENTION_KERNELS;

}  // namespace quintet::cpu
