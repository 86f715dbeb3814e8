// Attention with AVX512 and its products of bfloat16 in pairs.
#include "cpu/kernels/attention.h"
#include "cpu/kernels/attention_avx512_vectors.h"

#define QUINTET_DOT

namespace quintet::cpu {
namespace {

using Pairs = __m512bh;

inline Pairs load_pairs(const Bfloat16* at) { return (Pairs)_mm512_loadu_si512(at); }
inline Floats dot(Floats sum, Pairs a, Pairs b) { return _mm512_dpbf16_ps(sum, a, b); }

}  // namespace
}  // namespace quintet::cpu

#include "cpu/kernels/attention_body.h"

namespace quintet::cpu {

const AttentionKernels kAttentionAvx512Bf16 = QUINTET_ATTENTION_KERNELS;

}  // namespace quintet::cpu
