// Normalisations of rows. Tensors are addresses; sizes and strides are in elements.
#pragma once

#include "cpu/kernels/norm.h"

namespace quintet::cpu {

// A row is computed in one order, whatever rows stand beside it and whatever number of threads there is.
void rms_norm(const NormCall& call);  // with a residual, of their sum
void layer_norm(const NormCall& call);

}  // namespace quintet::cpu
