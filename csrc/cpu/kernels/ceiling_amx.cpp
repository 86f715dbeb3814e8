// Ceilings with AMX: products of bfloat16 and of bytes in tiles.
#include "cpu/kernels/ceiling_avx512_vectors.h"
#include "cpu/kernels/tiles.h"

namespace quintet::cpu {
namespace {

constexpr int kTileRows = 16, kTileBytes = 64;

struct Pairs {
    using Sum = float;
    static constexpr uint32_t kOnes = 0x3f803f80;  // of bfloat16
    static float total(Sum sum) { return sum; }
    template <int Sum, int A, int B>
    static void multiply() {
        multiply_tiles<Sum, A, B>();
    }
};

struct Quads {
    using Sum = int32_t;  // which wraps around
    static constexpr uint32_t kOnes = 0x01010101;
    static float total(Sum sum) { return static_cast<float>(sum & 0xffff) + 1.0F; }
    template <int Sum, int A, int B>
    static void multiply() {
        multiply_byte_tiles<Sum, A, B>();
    }
};

// Four sums of 16 by 16, as the products keep them; each step multiplies two tiles of A with two of B.
template <typename Numbers>
float tiles_loop(size_t rounds) {
    alignas(64) uint32_t numbers[kTileRows * kTileBytes / 4];
    for (uint32_t& each : numbers) each = Numbers::kOnes;
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
        Numbers::template multiply<0, 4, 6>();
        Numbers::template multiply<1, 4, 7>();
        Numbers::template multiply<2, 5, 6>();
        Numbers::template multiply<3, 5, 7>();
    }
    alignas(64) typename Numbers::Sum sums[kTileRows * kTileBytes / 4];
    store_tile<0>(sums, kTileBytes);
    release_tiles();
    return Numbers::total(sums[0]);
}

constexpr size_t kTileAdds = size_t{kTileRows} * 16 * 32;  // 16 columns, 32 inputs of bfloat16

}  // namespace

const CeilingKernels kCeilingAmx = {read_loop, {kLoop<InFloats>, {tiles_loop<Pairs>, 4 * kTileAdds}, {tiles_loop<Quads>, 8 * kTileAdds}}};

}  // namespace quintet::cpu
