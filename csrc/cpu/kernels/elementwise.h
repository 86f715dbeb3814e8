// What is computed number by number, one object for each instruction set: see norm.h for what holds of these files.
#pragma once

#include "cpu/kernels/floats.h"

namespace quintet::cpu {

enum class Elementwise { gelu, gelu_tanh, relu, relu2, silu, add, scale, softcap };
constexpr int kElementwise = 8, kActivations = 5;  // the activations come first

// out[i] of x[i], i < count; out may be x. `gated`: times y[i]. `factor` is scale's, softcap's cap, and
// gated's limit: x[i] is that at most, and y[i] within it; 0: there is none.
using ElementwiseKernel = void (*)(void* out, const void* x, const void* y, float factor, long count);

struct ElementwiseKernels {
    OfTypes<ElementwiseKernel> of[kElementwise];
    OfTypes<ElementwiseKernel> gated[kActivations];
};

extern const ElementwiseKernels kElementwiseBaseline;
#if defined(__x86_64__)
extern const ElementwiseKernels kElementwiseAvx2;
extern const ElementwiseKernels kElementwiseAvx512;
#endif

}  // namespace quintet::cpu
