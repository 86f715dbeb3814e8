// Attention of bfloat16 in whole pairs of vectors with AMX's tiles, and otherwise as with AVX512.
#include "cpu/kernels/attention.h"
#include "cpu/kernels/attention_avx512_bf16_vectors.h"

#define QUINTET_TILES

#include "cpu/kernels/attention_body.h"

namespace quintet::cpu {

AttentionKernels with_tiles(const AttentionKernels& pairs) {
    AttentionKernels all = pairs;
    all.attend[kBfloat16][kKVSame] = attend<Bfloat16, Bfloat16>;
    all.stretch[kBfloat16][kKVSame] = stretch<Bfloat16, Bfloat16>;
    return all;
}

}  // namespace quintet::cpu
