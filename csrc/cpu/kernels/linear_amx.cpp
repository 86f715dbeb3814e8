// Linear in bfloat16 with AMX's tiles. Other types go the way of AVX512.
//
// Tiles 0 to 3 are sums of 32 rows by 32 columns, 4 and 5 rows of x, 6 and 7 of the block. Every output adds up its inputs
// 32 at a time, in order, whatever rows stand beside it.
#include <immintrin.h>

#include "cpu/kernels/linear.h"
#include "cpu/kernels/tiles.h"

namespace quintet::cpu {
namespace {

constexpr long kTileRows = 16, kTileColumns = 16, kTileInputs = 32, kTilePairs = kTileInputs / 2;
constexpr long kColumns = 2 * kTileColumns;           // that are computed at once
constexpr long kPairBytes = kLinearColumns * 4;       // of the block: a pair of inputs for all columns

// What is left of the inputs, padded with zeros to a whole tile.
struct Rest {
    alignas(64) uint16_t x[2 * kTileRows][kTileInputs];
    alignas(64) uint16_t weight[kTilePairs][2 * kLinearColumns];
};

void fill(Rest& rest, const LinearPanel& panel, long row, long rows, long done) {
    const long left = panel.inputs - done;
    __builtin_memset(&rest, 0, sizeof rest);
    for (long r = 0; r < rows; ++r) {
        const uint16_t* const x = static_cast<const uint16_t*>(panel.x) + (row + r) * panel.x_stride + done;
        __builtin_memcpy(rest.x[r], x, static_cast<size_t>(left) * 2);
    }
    const char* const weight = static_cast<const char*>(panel.weight) + done / 2 * kPairBytes;
    __builtin_memcpy(rest.weight, weight, static_cast<size_t>((left + 1) / 2 * kPairBytes));
}

template <bool Both>
void add_tiles(const char* x, long x_bytes, const char* weight) {
    load_tile<6>(weight, kPairBytes);
    load_tile<7>(weight + 64, kPairBytes);
    load_tile<4>(x, x_bytes);
    multiply_tiles<0, 4, 6>();
    multiply_tiles<1, 4, 7>();
    if constexpr (Both) {
        load_tile<5>(x + kTileRows * x_bytes, x_bytes);
        multiply_tiles<2, 5, 6>();
        multiply_tiles<3, 5, 7>();
    }
}

// Up to 32 rows by 32 columns, into sums [32, kColumns].
template <bool Both>
void multiply_rows(const LinearPanel& panel, const Rest& rest, long row, long column, float* sums) {
    const long x_bytes = panel.x_stride * 2, whole = panel.inputs / kTileInputs;
    const char* x = static_cast<const char*>(panel.x) + row * x_bytes;
    const char* weight = static_cast<const char*>(panel.weight) + column * 4;
    zero_tile<0>();
    zero_tile<1>();
    zero_tile<2>();
    zero_tile<3>();
    for (long i = 0; i < whole; ++i) {
        add_tiles<Both>(x, x_bytes, weight);
        x += kTileInputs * 2;
        weight += kTilePairs * kPairBytes;
    }
    if (whole * kTileInputs < panel.inputs) {
        add_tiles<Both>(reinterpret_cast<const char*>(rest.x), sizeof rest.x[0],
                        reinterpret_cast<const char*>(rest.weight) + column * 4);
    }
    store_tile<0>(sums, kColumns * 4);
    store_tile<1>(sums + kTileColumns, kColumns * 4);
    if constexpr (Both) {
        store_tile<2>(sums + kTileRows * kColumns, kColumns * 4);
        store_tile<3>(sums + kTileRows * kColumns + kTileColumns, kColumns * 4);
    }
}

float widened(uint16_t x) {
    const uint32_t bits = static_cast<uint32_t>(x) << 16;
    float out;
    __builtin_memcpy(&out, &bits, sizeof out);
    return out;
}

void finish(const LinearPanel& panel, const float* bias, long row, long rows, long column, const float* sums) {
    const long columns = panel.columns - column < kColumns ? panel.columns - column : kColumns;
    uint16_t* out = static_cast<uint16_t*>(panel.out) + row * panel.out_stride + column;
    for (long r = 0; r < rows; ++r, out += panel.out_stride, sums += kColumns) {
        for (long c = 0; c < columns; c += kTileColumns) {
            const __m512 sum = _mm512_add_ps(_mm512_loadu_ps(sums + c), _mm512_loadu_ps(bias + column + c));
            const __m256i halves = (__m256i)_mm512_cvtneps_pbh(sum);
            const long left = columns - c;
            const __mmask16 wanted = static_cast<__mmask16>(left >= kTileColumns ? 0xFFFFU : (1U << left) - 1);
            _mm256_mask_storeu_epi16(out + c, wanted, halves);
        }
    }
}

void multiply(const LinearPanel& panel) {
    alignas(64) float bias[kLinearColumns] = {};
    alignas(64) float sums[2 * kTileRows * kColumns];
    if (panel.bias) {
        for (long c = 0; c < panel.columns; ++c) bias[c] = widened(static_cast<const uint16_t*>(panel.bias)[c]);
    }
    Rest rest;
    const long done = panel.inputs / kTileInputs * kTileInputs;
    long configured = 0;
    for (long row = 0; row < panel.rows; row += 2 * kTileRows) {
        const long rows = panel.rows - row < 2 * kTileRows ? panel.rows - row : 2 * kTileRows;
        if (rows != configured) configure_rows(configured = rows);
        if (done < panel.inputs) fill(rest, panel, row, rows, done);
        for (long column = 0; column < panel.columns; column += kColumns) {
            if (rows > kTileRows) {
                multiply_rows<true>(panel, rest, row, column, sums);
            } else {
                multiply_rows<false>(panel, rest, row, column, sums);
            }
            finish(panel, bias, row, rows, column, sums);
        }
    }
    release_tiles();  // or the operating system would save them at every switch of threads
}

}  // namespace

void (*const kLinearAmxBfloat16)(const LinearPanel& panel) = multiply;

}  // namespace quintet::cpu
