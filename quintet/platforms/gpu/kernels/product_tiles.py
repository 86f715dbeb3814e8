"""Tiles of products with quantized weights, by the number of tokens. Not verified on a GPU yet."""

from dataclasses import dataclass, replace

from quintet.platforms.gpu.kernels.chips import ChipLimits


@dataclass(frozen=True)
class ProductTile:
    """Tile that one program computes, and its warps and stages."""

    tokens: int
    outputs: int
    warps: int
    stages: int

    def within(self, cut: ChipLimits) -> "ProductTile":
        return ProductTile(
            min(self.tokens, cut.side), min(self.outputs, cut.side), self.warps, min(self.stages, cut.stages)
        )


# By the most tokens that each is for. Untuned guesses: few tokens wait for memory, so that many loads are under way (64
# rows of 64 or 128 bytes, 4 deep, several programs per processor); many fill a tensor core's 64 rows per 4 warps.
TILES = ((16, ProductTile(16, 64, 4, 4)), (64, ProductTile(64, 128, 8, 3)), (1 << 31, ProductTile(128, 128, 8, 3)))
SPLIT_UP_TO = 64  # tokens


def tile_for(tokens: int, heavy: bool, kind: str = "", cut: ChipLimits | None = None) -> ProductTile:
    """`heavy`: sums that are scaled by both sides group by group, sums of activations or tables beside numbers of 4
    bits, and float32 leave no registers for large tiles. With what the chip bears, and what its table has for `kind`.
    """
    tiles = TILES[:-1] if heavy else TILES
    most, tile = next((each for each in tiles if tokens <= each[0]), tiles[-1])
    if cut is None:
        return tile
    found = cut.table.products.get(f"{kind} {most if most <= SPLIT_UP_TO else 'more'}") if cut.table.products else None
    return replace(tile.within(cut), **(found or {}))
