// AMX's tiles: the processor's own, or, in tests, ones of plain C++, since few machines have them.
//
// Eight tiles of at most 16 rows of 64 bytes; a configuration says how many rows and bytes each has.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace quintet::cpu {
namespace {

struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
};
static_assert(sizeof(TileConfig) == 64);

#if defined(QUINTET_EMULATED_TILES)

struct Tiles {
    TileConfig config;
    uint8_t data[8][16][64];
};
thread_local Tiles tiles;

inline void configure_tiles(const TileConfig& config) { tiles.config = config; }
inline void release_tiles() { tiles.config = {}; }

template <int Tile>
void zero_tile() {
    __builtin_memset(tiles.data[Tile], 0, sizeof tiles.data[Tile]);
}

template <int Tile>
void load_tile(const void* at, long stride) {
    zero_tile<Tile>();
    for (int r = 0; r < tiles.config.rows[Tile]; ++r) {
        __builtin_memcpy(tiles.data[Tile][r], static_cast<const char*>(at) + r * stride, tiles.config.row_bytes[Tile]);
    }
}

template <int Tile>
void store_tile(void* at, long stride) {
    for (int r = 0; r < tiles.config.rows[Tile]; ++r) {
        __builtin_memcpy(static_cast<char*>(at) + r * stride, tiles.data[Tile][r], tiles.config.row_bytes[Tile]);
    }
}

inline float of_bfloat16(const uint8_t* at) {
    uint16_t half;
    __builtin_memcpy(&half, at, sizeof half);
    const uint32_t bits = static_cast<uint32_t>(half) << 16;
    float x;
    __builtin_memcpy(&x, &bits, sizeof x);
    return x;
}

// Sum += A times B: A [rows, pairs of inputs], B [pairs of inputs, columns of pairs].
template <int Sum, int A, int B>
void multiply_tiles() {
    for (int r = 0; r < tiles.config.rows[A]; ++r) {
        for (int c = 0; c < tiles.config.row_bytes[B] / 4; ++c) {
            float sum;
            __builtin_memcpy(&sum, &tiles.data[Sum][r][4 * c], sizeof sum);
            for (int k = 0; k < tiles.config.row_bytes[A] / 4; ++k) {
                for (int half = 0; half < 4; half += 2) {
                    sum += of_bfloat16(&tiles.data[A][r][4 * k + half]) * of_bfloat16(&tiles.data[B][k][4 * c + half]);
                }
            }
            __builtin_memcpy(&tiles.data[Sum][r][4 * c], &sum, sizeof sum);
        }
    }
}

// Sum += A times B of bytes: A [rows, quads], B [quads, columns of quads].
template <typename Right, int Sum, int A, int B>
void multiply_bytes() {
    for (int r = 0; r < tiles.config.rows[A]; ++r) {
        for (int c = 0; c < tiles.config.row_bytes[B] / 4; ++c) {
            uint32_t sum;
            __builtin_memcpy(&sum, &tiles.data[Sum][r][4 * c], sizeof sum);
            for (int k = 0; k < tiles.config.row_bytes[A]; ++k) {
                const int right = static_cast<Right>(tiles.data[B][k / 4][4 * c + k % 4]);
                sum += static_cast<uint32_t>(static_cast<int8_t>(tiles.data[A][r][k]) * right);
            }
            __builtin_memcpy(&tiles.data[Sum][r][4 * c], &sum, sizeof sum);
        }
    }
}

// A's bytes have a sign, B's not.
template <int Sum, int A, int B>
void multiply_byte_tiles() {
    multiply_bytes<uint8_t, Sum, A, B>();
}

// Both have.
template <int Sum, int A, int B>
void multiply_signed_tiles() {
    multiply_bytes<int8_t, Sum, A, B>();
}

#else

// In assembly: the compiler's own macros want a tile's number as a word of the source.
inline void configure_tiles(const TileConfig& config) { __asm__ volatile("ldtilecfg %0" ::"m"(config)); }
inline void release_tiles() { __asm__ volatile("tilerelease"); }
template <int Tile>
void zero_tile() {
    __asm__ volatile("tilezero %%tmm%c0" ::"i"(Tile));
}
template <int Tile>
void load_tile(const void* at, long stride) {
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(at), "r"(stride), "i"(Tile) : "memory");
}
template <int Tile>
void store_tile(void* at, long stride) {
    __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(at), "r"(stride), "i"(Tile) : "memory");
}
template <int Sum, int A, int B>
void multiply_tiles() {
    __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sum), "i"(A), "i"(B));
}
template <int Sum, int A, int B>
void multiply_byte_tiles() {
    __asm__ volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sum), "i"(A), "i"(B));
}
template <int Sum, int A, int B>
void multiply_signed_tiles() {
    __asm__ volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sum), "i"(A), "i"(B));
}

#endif

// Tiles 0 to 3 for sums of up to 32 rows, 4 and 5 for these rows, 16 each, 6 and 7 for 16 rows of a right side.
[[maybe_unused]] void configure_rows(long rows) {
    constexpr long kHeight = 16;
    TileConfig config;
    const long first = rows < kHeight ? rows : kHeight, second = rows - first;
    const long heights[8] = {first, first, second, second, first, second, kHeight, kHeight};
    for (int i = 0; i < 8; ++i) {
        config.rows[i] = static_cast<uint8_t>(heights[i] > 0 ? heights[i] : 1);
        config.row_bytes[i] = 64;
    }
    configure_tiles(config);
}

// Tiles 0 to 3 for sums of up to 16 rows, 4 for these rows, 5 to 7 for 16 rows of a right side.
[[maybe_unused]] void configure_columns(long rows) {
    constexpr long kHeight = 16;
    TileConfig config;
    for (int i = 0; i < 8; ++i) {
        config.rows[i] = static_cast<uint8_t>(i < 5 ? rows : kHeight);
        config.row_bytes[i] = 64;
    }
    configure_tiles(config);
}

}  // namespace
}  // namespace quintet::cpu
