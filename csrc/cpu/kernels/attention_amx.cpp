// Attention with AMX's tiles for bfloat16 in whole pairs of vectors, and otherwise as with AVX512.
#include "cpu/kernels/attention.h"
#include "cpu/kernels/attention_avx512_bf16_vectors.h"

#define QUINTET_TILES

#include "cpu/kernels/attention_body.h"

namespace quintet::cpu {

const AttentionKernels kAttentionAmx = QUINTET_ATTENTION_KERNELS;

}  // namespace quintet::cpu
