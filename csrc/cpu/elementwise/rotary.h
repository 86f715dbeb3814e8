// The rotary embedding of q and k. Tensors are addresses; sizes and strides are in elements.
#pragma once

#include "cpu/kernels/rotary.h"

namespace quintet::cpu {

// Throws std::invalid_argument for a position that the table does not hold, before anything is written.
void rotary(const RotaryCall& call);

}  // namespace quintet::cpu
