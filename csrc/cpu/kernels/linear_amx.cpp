// Linear in bfloat16 with AMX's tiles. Other types go the way of AVX512.
//
// Every output adds up its inputs 32 at a time, in order, whatever rows stand beside it.
#include <immintrin.h>

#include "cpu/kernels/linear.h"
#include "cpu/kernels/tile_panels.h"

namespace quintet::cpu {
namespace {

struct Bfloat16Products {
    template <int Sum, int A, int B>
    static void multiply() {
        multiply_tiles<Sum, A, B>();
    }
};

float widened(uint16_t x) {
    const uint32_t bits = static_cast<uint32_t>(x) << 16;
    float out;
    __builtin_memcpy(&out, &bits, sizeof out);
    return out;
}

void finish(const LinearPanel& panel) {
    alignas(64) float bias[kLinearColumns] = {};
    if (panel.bias) {
        for (long c = 0; c < panel.columns; ++c) bias[c] = widened(static_cast<const uint16_t*>(panel.bias)[c]);
    }
    const float* sums = panel.sums;
    uint16_t* out = static_cast<uint16_t*>(panel.out);
    for (long r = 0; r < panel.rows; ++r, out += panel.out_stride, sums += kLinearColumns) {
        for (long c = 0; c < panel.columns; c += kTileColumns) {
            const __m256i halves = (__m256i)_mm512_cvtneps_pbh(_mm512_add_ps(_mm512_loadu_ps(sums + c), _mm512_load_ps(bias + c)));
            const long left = panel.columns - c;
            const __mmask16 wanted = static_cast<__mmask16>(left >= kTileColumns ? 0xFFFFU : (1U << left) - 1);
            _mm256_mask_storeu_epi16(out + c, wanted, halves);
        }
    }
}

void multiply(const LinearPanel& panel) {
    multiply_panel<Bfloat16Products>({static_cast<const uint8_t*>(panel.x), static_cast<const uint8_t*>(panel.weight), panel.sums,
                                      panel.x_stride * 2, panel.rows, panel.inputs * 2});
    finish(panel);
}

}  // namespace

void (*const kLinearAmxBfloat16)(const LinearPanel& panel) = multiply;

}  // namespace quintet::cpu
