// Ceilings with AMX: products of bfloat16 in tiles, of bytes in AVX512, as ours are.
#include "cpu/kernels/ceiling_avx512_dots.h"
#include "cpu/kernels/tiles.h"

namespace quintet::cpu {
namespace {

constexpr int kTileRows = 16, kTileBytes = 64;

// Four sums of 16 by 16, as the products keep them; each step multiplies two tiles of A with two of B.
float tiles_loop(size_t rounds) {
    alignas(64) uint32_t numbers[kTileRows * kTileBytes / 4];
    for (uint32_t& each : numbers) each = 0x3f803f80;  // pairs of ones
    TileConfig config;
    for (int tile = 0; tile < 8; ++tile) {
        config.rows[tile] = kTileRows;
        config.row_bytes[tile] = kTileBytes;
    }
    configure_tiles(config);
    zero_tile<0>();
    zero_tile<1>();
    zero_tile<2>();
    zero_tile<3>();
    load_tile<4>(numbers, kTileBytes);
    load_tile<5>(numbers, kTileBytes);
    load_tile<6>(numbers, kTileBytes);
    load_tile<7>(numbers, kTileBytes);
    for (size_t round = 0; round < rounds; ++round) {
        multiply_tiles<0, 4, 6>();
        multiply_tiles<1, 4, 7>();
        multiply_tiles<2, 5, 6>();
        multiply_tiles<3, 5, 7>();
    }
    alignas(64) float sums[kTileRows * kTileBytes / 4];
    store_tile<0>(sums, kTileBytes);
    release_tiles();
    return sums[0];
}

constexpr size_t kTileAdds = size_t{kTileRows} * 16 * 32;  // 16 columns, 32 inputs

}  // namespace

const CeilingKernels kCeilingAmx = {read_loop, {kLoop<InFloats>, {tiles_loop, 4 * kTileAdds}, kLoop<InBytes>}};

}  // namespace quintet::cpu
