// Stands in for the kernels of AVX-512 and what builds on it where they are not compiled (QUINTET_ISAS=NATIVE on a
// processor without them): empty tables, which isa() knows them by. No kernel of these sets is then ever chosen.
#include "cpu/kernels/attention.h"
#include "cpu/kernels/elementwise.h"
#include "cpu/kernels/float8.h"
#include "cpu/kernels/linear.h"
#include "cpu/kernels/lora.h"
#include "cpu/kernels/moe.h"
#include "cpu/kernels/norm.h"
#include "cpu/kernels/quantized.h"
#include "cpu/kernels/rotary.h"
#include "cpu/kernels/sampling.h"
#include "cpu/kernels/states.h"
#include "cpu/kernels/sums.h"

namespace quintet::cpu {

const AttentionKernels kAttentionAvx512{};
const AttentionKernels kAttentionAvx512Bf16{};
const ElementwiseKernels kElementwiseAvx512{};
const Float8Kernels kFloat8Avx512{};
const Float8Kernels kFloat8Avx512Bf16{};
const LinearKernels kLinearAvx512{};
const LinearKernels kLinearAvx512Bf16{};
void (*const kLinearAmxBfloat16)(const LinearPanel& panel) = nullptr;
const LoraKernels kLoraAvx512{};
const MoeKernels kMoeAvx512{};
const NormKernels kNormAvx512{};
const QuantizedKernels kQuantizedAvx512{};
const QuantizedKernels kQuantizedAvx512Vnni{};
const RotaryKernels kRotaryAvx512{};
const SamplingKernels kSamplingAvx512{};
const StateKernels kStatesAvx512{};
const SumKernels kSumsAvx512{};

AttentionKernels with_tiles(const AttentionKernels& kernels) { return kernels; }
QuantizedKernels with_tiles(const QuantizedKernels& kernels) { return kernels; }

}  // namespace quintet::cpu
