"""Look-up tables: tokens, and learned positions."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from quintet.interface.types import Batch
from quintet.interface.weights import PLAIN, CheckpointSlice, Matrix, Weight, WeightFormat, WeightReader
from quintet.layers.build import BuildContext, Layer, Shards, padded_shards, replicated
from quintet.layers.lora_step import LORA_POOL, LoRAStep


class VocabParallelEmbedding(Layer):
    """Rows by id; shared out over the ranks by rows unless `replicated`.

    A table that a checkpoint holds quantized stays so where the platform looks rows up in its format ("embedding" of
    Capabilities.weight_formats): a tied head has the same format, and the two are held once.
    """

    def __init__(self, build: BuildContext, count: int, width: int, is_replicated: bool = False) -> None:
        super().__init__(build, "embedding", "place_rows", "scale")
        self._build, self._shape = build, (count, width)
        self._split = replicated(count, build.size) if is_replicated else padded_shards(count, build.size)
        self._partial = build.size > 1 and not is_replicated
        self.format: WeightFormat = PLAIN  # of the table, once settled
        self._reader: WeightReader | None = None
        self._first = self._split.ranges[build.rank][0]
        self.weight: Tensor
        self._lora: LoRAStep | None = None  # where there is a pool of adapters beside the table

    def finalize(self, path: str) -> None:
        """The format, and the provider for it. What has padding is held in floats."""
        (weight,) = self.weights(path)
        fmt, self._reader = self._build.quantization.for_embedding().format_for(path, weight.shard(weight.slices[0]))
        self.format = PLAIN if weight.padded else fmt
        if not self.format.plain:
            self.ops.take("quantized_embedding")

    def weights(self, path: str) -> list[Weight]:
        part, build = CheckpointSlice(f"{path}.weight", self._shape, self._split.ranges), self._build
        return [Weight("weight", (part,), 0, build.rank, build.dtype, "embedding", self.format, self._reader)]

    def forward(self, ids: Tensor) -> Tensor:  # [T] -> [T, width]
        rows = self._looked_up(ids, self._first, self._partial)
        if self._lora is not None and self._lora.extras is not None:
            rows = self._modules[LORA_POOL](rows, ids)  # type: ignore[misc]
        return self._build.comm.all_reduce(rows) if self._partial else rows

    def _looked_up(self, ids: Tensor, first: int, partial: bool) -> Tensor:
        """The table's own rows, which begin with number `first`."""
        if self.format.plain:
            plain: Tensor = self.ops.embedding(ids, self.weight, first, partial)
            return plain
        held: Mapping[str, Any] = self._parameters
        beside = held.get("scales"), held.get("zeros"), held.get("order")
        table = Matrix(held["weight"], *beside, self.format, held.get("mins"))
        shape = self._split.local(self._build.rank), self.width
        rows: Tensor = self.ops.quantized_embedding(ids, table, first, shape, self._build.dtype)
        return rows

    @property
    def width(self) -> int:
        """Numbers of a row."""
        return self._shape[1]

    @property
    def shards(self) -> Shards:
        """Its rows, and which of them each rank has."""
        return self._split

    def base_weight(self, path: str) -> Weight:
        """Returns the checkpoint's floats of all rows."""
        part = CheckpointSlice(f"{path}.weight", self._shape, ((0, self._shape[0]),) * self._build.size)
        build = self._build
        return Weight("weight", (part,), 0, build.rank, build.dtype, "embedding", reader=self._reader)

    def add_lora_pool(self, pool: nn.Module) -> None:
        """Has a pool of adapters add to the rows: a module with forward(rows, ids)."""
        self._lora = self._build.lora
        self.add_module(LORA_POOL, pool)

    def embed(self, batch: Batch, scale: float = 1.0) -> Tensor:
        """A step's tokens -> [T, width], scaled; rows of the row store stand in the places of some."""
        rows, given = self(batch.token_ids), batch.inputs
        if scale != 1.0:
            rows = self.ops.scale(rows, scale)
        if given.embed_indices is not None:
            assert self._build.row_store is not None, "a step brings places where there is a store"
            rows = self.ops.place_rows(rows, self._build.row_store.rows, given.embed_indices)
        out: Tensor = rows
        return out


class PositionEmbedding(VocabParallelEmbedding):
    """Learned positions, on every rank; position p is row `first` + p."""

    def __init__(self, build: BuildContext, count: int, width: int, first: int = 0) -> None:
        if build.max_model_len > count:
            raise ValueError(
                f"max_model_len {build.max_model_len} exceeds the {count} positions that the model learned"
            )
        super().__init__(build, first + count, width, is_replicated=True)
        self._offset = first

    def forward(self, positions: Tensor) -> Tensor:  # [T] -> [T, width]
        return self._looked_up(positions, -self._offset, self._offset > 0)


class SinusoidalPositionEmbedding(PositionEmbedding):
    """Positions that are not learned: half of a row are sines, half cosines, of ever longer waves (Vaswani et al. 2017,
    with the halves side by side)."""

    def finalize(self, path: str) -> None:
        """It is computed: no checkpoint holds it."""

    def weights(self, path: str) -> list[Weight]:
        return []

    def constants(self) -> Mapping[str, Tensor]:
        return {"weight": self._table(*self._shape).to(self._build.dtype)}

    def _table(self, count: int, width: int) -> Tensor:
        half = width // 2
        waves = torch.exp(torch.arange(half, dtype=torch.int64).float() * -(math.log(10000) / (half - 1)))
        angles = torch.arange(count, dtype=torch.int64).float()[:, None] * waves[None, :]
        return torch.cat([angles.sin(), angles.cos(), torch.zeros(count, width % 2)], dim=1)


class VaswaniPositionEmbedding(SinusoidalPositionEmbedding):
    """The same with waves that never reach 10,000 * 2 pi positions, as the paper has them (Marian, Pegasus)."""

    def _table(self, count: int, width: int) -> Tensor:
        sines, cosines = (width + 1) // 2, width // 2
        waves = 10000.0 ** (torch.arange(sines, dtype=torch.float64) * 2 / width)
        angles = torch.arange(count, dtype=torch.float64)[:, None] / waves[None, :]
        return torch.cat([angles.sin(), angles[:, :cosines].cos()], dim=1).float()
