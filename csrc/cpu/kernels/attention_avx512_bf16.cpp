// Attention of bfloat16 with AVX512's products in pairs, and whole attention of all types, whose copies turn() makes faster.
// The rest is kAttentionAvx512's.
#include "cpu/kernels/attention.h"
#include "cpu/kernels/attention_avx512_bf16_vectors.h"
#include "cpu/kernels/attention_body.h"

namespace quintet::cpu {

AttentionKernels with_pairs(const AttentionKernels& vectors) {
    AttentionKernels all = vectors;
    all.attend[kBfloat16][kKVSame] = attend<Bfloat16, Bfloat16>;
    all.stretch[kBfloat16][kKVSame] = stretch<Bfloat16, Bfloat16>;
    all.whole[kFloat32] = whole<float>;
    all.whole[kBfloat16] = whole<Bfloat16>;
    all.whole[kFloat16] = whole<Float16>;
    return all;
}

}  // namespace quintet::cpu
