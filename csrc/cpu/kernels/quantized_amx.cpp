// Quantized products of many rows with AMX's tiles, and otherwise as with AVX512. Sums of bytes are exact: the bits are the
// same.
#include "cpu/kernels/intrinsics.h"

#include "cpu/kernels/quantized_amx_groups.h"

namespace quintet::cpu {
namespace {

constexpr long kFewest = 7;  // rows that tiles are quicker for, where all inputs are one group

struct ByteProducts {
    template <int Sum, int A, int B>
    static void multiply() {
        multiply_byte_tiles<Sum, A, B>();
    }
};

Floats splat_at(const uint8_t* at) {
    float x;
    __builtin_memcpy(&x, at, sizeof x);
    return splat(x);
}

// Whole numbers become what the rows' scales and the columns' say.
void scale(const QuantizedPanel& panel) {
    constexpr long kVectors = kLinearColumns / kLanes;
    const float* const scales = static_cast<const float*>(panel.scales);
    const Floats columns[kVectors] = {load(scales), load(scales + kLanes), load(scales + 2 * kLanes), load(scales + 3 * kLanes)};
    const uint8_t* own = panel.x + panel.scales_at;
    float* sums = panel.sums;
    for (long r = 0; r < panel.rows; ++r, own += panel.x_stride, sums += kLinearColumns) {
        const Floats own_scale = splat_at(own);
        const Ints start = as_ints(splat_at(own + sizeof(float)));
#pragma GCC unroll 4
        for (long v = 0; v < kVectors; ++v) {
            const Floats total = to_floats(add_ints(as_ints(load(sums + v * kLanes)), start));
            store(sums + v * kLanes, mul(total, mul(columns[v], own_scale)));
        }
    }
}

// kW8a8: all inputs are one group.
void multiply_channels(const QuantizedPanel& panel) {
    if (panel.rows < kFewest) return kQuantizedAvx512Vnni.multiply[kW8a8](panel);
    multiply_panel<ByteProducts>({panel.x, panel.weight, panel.sums, panel.x_stride, panel.rows, panel.quads * kQuad});
    scale(panel);
}

}  // namespace

QuantizedKernels with_tiles(const QuantizedKernels& vectors) {
    QuantizedKernels all = vectors;
    all.multiply[kW8a8] = multiply_channels;
    groups_with_tiles(all);
    return all;
}

}  // namespace quintet::cpu
