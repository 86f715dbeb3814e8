// Quantized products of many rows with AMX's tiles, and otherwise as with AVX512. Sums of bytes are exact: the bits are the
// same.
//
// Tiles 0 to 3 are sums of 32 rows by 32 columns, 4 and 5 rows of x, 6 and 7 of the block. Rows of 16 bits are multiplied
// twice, low bytes and high.
#include "cpu/kernels/intrinsics.h"

#include "cpu/kernels/quantized.h"
#include "cpu/kernels/tiles.h"

namespace quintet::cpu {
namespace {

constexpr long kTileRows = 16, kTileColumns = 16, kTileQuads = 16, kTileBytes = 64;
constexpr long kRows = 2 * kTileRows, kColumns = 2 * kTileColumns;  // that are computed at once
constexpr long kFewest = 7;  // rows that tiles are quicker for, where all inputs are one group
constexpr long kFewestOfGroups = 12;
constexpr long kQuadBytes = kLinearColumns * kQuad;  // of the block

// Rows of x and of the block behind the last whole tile of quads, padded with zeros.
struct Rest {
    alignas(64) uint8_t x[kRows][kTileBytes];
    alignas(64) uint8_t weight[kTileQuads][kQuadBytes];
};

void fill(Rest& rest, const QuantizedPanel& panel, long row, long rows, long done) {
    const size_t left = static_cast<size_t>(panel.quads - done);
    __builtin_memset(&rest, 0, sizeof rest);
    for (long r = 0; r < rows; ++r) {
        __builtin_memcpy(rest.x[r], panel.x + (row + r) * panel.x_stride + done * kQuad, left * kQuad);
    }
    __builtin_memcpy(rest.weight, panel.weight + done * kQuadBytes, left * kQuadBytes);
}

template <bool Both>
void add_tiles(const uint8_t* x, long x_stride, const uint8_t* weight) {
    load_tile<6>(weight, kQuadBytes);
    load_tile<7>(weight + kTileBytes, kQuadBytes);
    load_tile<4>(x, x_stride);
    multiply_byte_tiles<0, 4, 6>();
    multiply_byte_tiles<1, 4, 7>();
    if constexpr (Both) {
        load_tile<5>(x + kTileRows * x_stride, x_stride);
        multiply_byte_tiles<2, 5, 6>();
        multiply_byte_tiles<3, 5, 7>();
    }
}

// Up to 32 rows by 32 columns, into sums [32, kColumns].
template <bool Both>
void multiply_rows(const QuantizedPanel& panel, const Rest& rest, long row, long column, int32_t* sums) {
    const long whole = panel.quads / kTileQuads;
    const uint8_t *x = panel.x + row * panel.x_stride, *weight = panel.weight + column * kQuad;
    zero_tile<0>();
    zero_tile<1>();
    zero_tile<2>();
    zero_tile<3>();
    for (long i = 0; i < whole; ++i, x += kTileBytes, weight += kTileQuads * kQuadBytes) {
        add_tiles<Both>(x, panel.x_stride, weight);
    }
    if (whole * kTileQuads < panel.quads) add_tiles<Both>(rest.x[0], kTileBytes, rest.weight[0] + column * kQuad);
    store_tile<0>(sums, kColumns * 4);
    store_tile<1>(sums + kTileColumns, kColumns * 4);
    if constexpr (Both) {
        store_tile<2>(sums + kTileRows * kColumns, kColumns * 4);
        store_tile<3>(sums + kTileRows * kColumns + kTileColumns, kColumns * 4);
    }
}

// Whole numbers become what the row's scale and the columns' say.
void scale(const QuantizedPanel& panel, long row, long rows, long column, const int32_t* sums) {
    const float* const scales = static_cast<const float*>(panel.scales) + column;
    for (long r = 0; r < rows; ++r, sums += kColumns) {
        const uint8_t* const own = panel.x + (row + r) * panel.x_stride + panel.scales_at;
        float own_scale;
        int32_t start;
        __builtin_memcpy(&own_scale, own, sizeof own_scale);
        __builtin_memcpy(&start, own + sizeof own_scale, sizeof start);
        for (long c = 0; c < kColumns; c += kTileColumns) {
            const __m512i total = _mm512_add_epi32(_mm512_loadu_si512(sums + c), _mm512_set1_epi32(start));
            const __m512 factor = _mm512_mul_ps(_mm512_loadu_ps(scales + c), _mm512_set1_ps(own_scale));
            float* const to = panel.sums + (row + r) * kLinearColumns + column + c;
            _mm512_storeu_ps(to, _mm512_mul_ps(_mm512_cvtepi32_ps(total), factor));
        }
    }
}

// kW8a8: all inputs are one group.
void multiply_channels(const QuantizedPanel& panel) {
    if (panel.rows < kFewest) return kQuantizedAvx512Vnni.multiply[kW8a8](panel);
    alignas(64) int32_t sums[kRows * kColumns];
    Rest rest;
    const long done = panel.quads / kTileQuads * kTileQuads;
    long configured = 0;
    for (long row = 0; row < panel.rows; row += kRows) {
        const long rows = panel.rows - row < kRows ? panel.rows - row : kRows;
        if (rows != configured) configure_rows(configured = rows);
        if (done < panel.quads) fill(rest, panel, row, rows, done);
        for (long column = 0; column < kLinearColumns; column += kColumns) {
            if (rows > kTileRows) {
                multiply_rows<true>(panel, rest, row, column, sums);
            } else {
                multiply_rows<false>(panel, rest, row, column, sums);
            }
            scale(panel, row, rows, column, sums);
        }
    }
    release_tiles();  // or the operating system would save them at every switch of threads
}

// -------------------------------------------------------------------------------------------------------- groups

constexpr long kMostQuads = kLargestGroup / kQuad;

// A group of 32 rows and of the block, as tiles read them.
struct Staged {
    alignas(64) uint8_t x[2][kRows][kLargestGroup];  // low bytes, high bytes
    alignas(64) uint8_t weight[kMostQuads][kQuadBytes];
};

// Nibbles of a group become bytes.
void widen_nibbles(const uint8_t* from, long quads, Staged& to) {
    const __m512i low = _mm512_set1_epi8(15);
    for (long quad = 0; quad < quads; ++quad, from += kQuadBytes / 2) {
        for (long both = 0; both < 2; ++both) {
            const __m512i bytes = _mm512_loadu_si512(from + both * kTileBytes);
            uint8_t* const at = to.weight[quad] + both * 2 * kTileBytes;
            _mm512_store_si512(at, _mm512_and_si512(bytes, low));
            _mm512_store_si512(at + kTileBytes, _mm512_and_si512(_mm512_srli_epi16(bytes, 4), low));
        }
    }
}

// A group's rows; zeros for those that are missing.
template <bool Wide>
void stage_rows(const QuantizedPanel& panel, long row, long rows, long group, Staged& to) {
    const long bytes = panel.quads * kQuad;
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
    for (long r = 0; r < kRows; ++r) {
        const uint8_t* x = panel.x + (row + r) * panel.x_stride + group * bytes * (Wide ? 2 : 1);
        for (long i = 0; i < bytes; i += kTileBytes, x += kTileBytes * (Wide ? 2 : 1)) {
            if (r >= rows) {
                for (auto& side : to.x) _mm512_store_si512(side[r] + i, _mm512_setzero_si512());
            } else if constexpr (Wide) {  // a quad's low bytes, then its high bytes
                const __m512i first = _mm512_loadu_si512(x), second = _mm512_loadu_si512(x + kTileBytes);
                _mm512_store_si512(to.x[0][r] + i, _mm512_permutex2var_epi32(first, even, second));
                _mm512_store_si512(to.x[1][r] + i, _mm512_permutex2var_epi32(first, odd, second));
            } else {
                _mm512_store_si512(to.x[0][r] + i, _mm512_loadu_si512(x));
            }
        }
    }
}

// A group's products of 32 rows by 32 columns, of low bytes or of high.
void multiply_group(const uint8_t (&x)[kRows][kLargestGroup], const uint8_t* weight, long quads, bool both, int32_t* sums) {
    zero_tile<0>();
    zero_tile<1>();
    zero_tile<2>();
    zero_tile<3>();
    for (long quad = 0; quad < quads; quad += kTileQuads, weight += kTileQuads * kQuadBytes) {
        if (both) {
            add_tiles<true>(x[0] + quad * kQuad, kLargestGroup, weight);
        } else {
            add_tiles<false>(x[0] + quad * kQuad, kLargestGroup, weight);
        }
    }
    store_tile<0>(sums, kColumns * 4);
    store_tile<1>(sums + kTileColumns, kColumns * 4);
    if (!both) return;
    store_tile<2>(sums + kTileRows * kColumns, kColumns * 4);
    store_tile<3>(sums + kTileRows * kColumns + kTileColumns, kColumns * 4);
}

// Adds what a group gives to the sums of those before it.
template <bool Wide>
void join_group(const QuantizedPanel& panel, long row, long rows, long column, long group, const int32_t (*sums)[kRows * kColumns]) {
    const uint16_t* const scales = static_cast<const uint16_t*>(panel.scales) + group * kLinearColumns + column;
    __m512 units[2];
    for (long v = 0; v < 2; ++v) {
        units[v] = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(scales + v * kTileColumns)));
    }
    for (long r = 0; r < rows; ++r) {
        const uint8_t* const own = panel.x + (row + r) * panel.x_stride + panel.scales_at + group * 4;
        float own_scale;
        int32_t start;
        __builtin_memcpy(&own_scale, own, sizeof own_scale);
        __builtin_memcpy(&start, own + panel.groups * 4, sizeof start);
        for (long v = 0; v < 2; ++v) {
            const long at = r * kColumns + v * kTileColumns;
            __m512i total = _mm512_add_epi32(_mm512_load_si512(sums[0] + at), _mm512_set1_epi32(start));
            if constexpr (Wide) total = _mm512_add_epi32(total, _mm512_slli_epi32(_mm512_load_si512(sums[1] + at), 8));
            float* const to = panel.sums + (row + r) * kLinearColumns + column + v * kTileColumns;
            const __m512 factor = _mm512_mul_ps(units[v], _mm512_set1_ps(own_scale));
            _mm512_storeu_ps(to, _mm512_fmadd_ps(_mm512_cvtepi32_ps(total), factor, _mm512_loadu_ps(to)));
        }
    }
}

template <QuantizedScheme Scheme>
void multiply_groups(const QuantizedPanel& panel) {
    constexpr bool kNibbles = nibbles(Scheme), kWide = largest_input(Scheme) > 127.0F;
    if (panel.rows < kFewestOfGroups || panel.quads % kTileQuads) return kQuantizedAvx512Vnni.multiply[Scheme](panel);
    alignas(64) int32_t sums[2][kRows * kColumns];
    Staged staged;
    configure_rows(kRows);
    for (long group = 0; group < panel.groups; ++group) {
        const uint8_t* weight = panel.weight + group * panel.quads * quad_bytes(Scheme);
        if constexpr (kNibbles) {
            widen_nibbles(weight, panel.quads, staged);
            weight = staged.weight[0];
        }
        for (long row = 0; row < panel.rows; row += kRows) {
            const long rows = panel.rows - row < kRows ? panel.rows - row : kRows;
            stage_rows<kWide>(panel, row, rows, group, staged);
            for (long column = 0; column < kLinearColumns; column += kColumns) {
                multiply_group(staged.x[0], weight + column * kQuad, panel.quads, rows > kTileRows, sums[0]);
                if constexpr (kWide) {
                    multiply_group(staged.x[1], weight + column * kQuad, panel.quads, rows > kTileRows, sums[1]);
                }
                join_group<kWide>(panel, row, rows, column, group, sums);
            }
        }
    }
    release_tiles();
}

}  // namespace

QuantizedKernels with_tiles(const QuantizedKernels& vectors) {
    QuantizedKernels all = vectors;
    all.multiply[kW8a8] = multiply_channels;
    all.multiply[kW8a8Groups] = multiply_groups<kW8a8Groups>;
    all.multiply[kW4a8] = multiply_groups<kW4a8>;
    all.multiply[kInt8] = multiply_groups<kInt8>;
    all.multiply[kInt4] = multiply_groups<kInt4>;
    return all;
}

}  // namespace quintet::cpu
