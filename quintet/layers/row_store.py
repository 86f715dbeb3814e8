"""Row store: rows on the device that stand in the places of tokens' embeddings, such as prompt embeddings.

It is a parameter of the model and no input: steps that are recorded, captured or compiled read it where it lies, and
bring only the numbers of its rows (Inputs.embed_indices). A row is written once, before the first step that reads it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quintet.interface.platform import Device, Platform
from quintet.interface.types import FloatArray, IntArray, RankInfo
from quintet.interface.weights import CheckpointSlice, Weight

PAGE_ROWS = 16  # rows of one page of the store: an item begins with a page
# rows of one write where each number of rows is a program of its own; multiples of a page, the largest first
BLOCKS = (1024, 256, 64, PAGE_ROWS)


@dataclass(frozen=True)
class RowStoreSizes:
    """Room for rows on the device."""

    rows: int  # that items can have, a multiple of PAGE_ROWS
    by_torch: bool = False  # torch can write to what the device holds
    whole_runs: bool = False  # tokens of an item that stand side by side are computed in one step
    deep_layers: tuple[int, ...] = ()  # whose inputs a further row of each token is added to, beside its embedding
    whole_prompts: bool = False  # tokens of a prompt see one another, and are computed in one step

    @property
    def total_rows(self) -> int:
        """S: rows of the tensor. The first page holds zeros, and no item."""
        return PAGE_ROWS + self.rows


class RowStore(nn.Module):
    """The store of one rank's model."""

    rows: Tensor  # [S, H], of the model's type
    deep: Tensor  # [num_deep * S, H], level by level, where there are several

    def __init__(self, sizes: RowStoreSizes, dtype: torch.dtype, rank: int) -> None:
        super().__init__()
        self._sizes, self._dtype, self._rank = sizes, dtype, rank
        self._width = 0

    @classmethod
    def make(cls, sizes: RowStoreSizes | None, dtype: torch.dtype, rank_info: RankInfo, rank: int) -> "RowStore | None":
        """Returns the store of a rank, `rank` in its pipeline stage; None where it embeds no tokens, or without
        `sizes`."""
        return None if sizes is None or rank_info.stage else cls(sizes, dtype, rank)

    def attach(self, model: nn.Module, width: int) -> None:
        """Makes it part of a model with embeddings of `width` numbers."""
        self._width = width
        model.add_module("row_store", self)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return (1 + self.num_deep) * self._width * self._dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self._sizes.total_rows * self.row_bytes

    def place(self, platform: Platform) -> None:
        """Makes the tensor on the device, of zeros."""
        shape = (self._sizes.total_rows, self._width)
        made = platform.place(self._weight(*shape), {"rows": torch.zeros(shape, dtype=self._dtype)})
        self.rows = nn.Parameter(made["rows"], requires_grad=False)
        if self.num_deep:
            shape = (self.num_deep * shape[0], shape[1])
            made = platform.place(self._weight(*shape), {"rows": torch.zeros(shape, dtype=self._dtype)})
            self.deep = nn.Parameter(made["rows"], requires_grad=False)
        if not self._sizes.by_torch:  # a platform may compile what writing takes: now, and not for a request
            for count in BLOCKS:
                if count <= self._sizes.total_rows:
                    self._place_rows(platform, 0, torch.zeros(count, self._width, dtype=self._dtype))

    @torch.inference_mode()
    def write(self, platform: Platform, device: Device, places: IntArray, rows: FloatArray) -> None:
        """Writes rows [N, H] float32 to these places [N] of the store, none of them twice. What an item has begins
        with a page and has the rest of its last page to itself: where numbers of rows are programs, that is written,
        too. Steps that were started before read what was there before."""
        if not len(self.rows):  # a platform that computes nothing holds nothing
            return
        if self._sizes.by_torch:
            values, at = device.to_device((rows, places))
            self._write((values,), at.long())
            return
        for first, stretch in _stretches(places.tolist()):
            values = torch.from_numpy(rows[stretch]).to(self._dtype)
            start, rest = first, nn.functional.pad(values, (0, 0, 0, -len(values) % PAGE_ROWS))
            while len(rest):
                count = next(each for each in BLOCKS if each <= len(rest))
                self._place_rows(platform, start, rest[:count].clone())
                start, rest = start + count, rest[count:]

    @torch.inference_mode()
    def write_levels(self, levels: Sequence[Tensor], places: IntArray) -> None:
        """Writes rows [N, H] of each level, which lie on the device, to these places [N]; torch must be able to."""
        if len(self.rows):
            self._write(levels, torch.from_numpy(places).to(self.rows.device).long())

    def _write(self, levels: Sequence[Tensor], places: Tensor) -> None:
        """Rows of levels that are not given are zeros."""
        self.rows.index_copy_(0, places, levels[0].to(self._dtype))
        for index in range(self.num_deep):
            given = levels[index + 1] if index + 1 < len(levels) else torch.zeros_like(levels[0])
            self.level(index + 1).index_copy_(0, places, given.to(self._dtype))

    @property
    def num_deep(self) -> int:
        """Levels behind the first."""
        return len(self._sizes.deep_layers)

    @property
    def levels(self) -> dict[int, int]:
        """Returns the level that is added to the inputs of each of these layers."""
        return {layer: number for number, layer in enumerate(self._sizes.deep_layers, 1)}

    def level(self, index: int) -> Tensor:
        """Returns the rows of a level, [S, H]; 0: those of embeddings."""
        if not index:
            return self.rows
        size = self._sizes.total_rows
        return self.deep[(index - 1) * size : index * size]

    def _place_rows(self, platform: Platform, first: int, rows: Tensor) -> None:
        platform.place(self._weight(len(rows), self._width, first), {"rows": rows}, into={"rows": self.rows})

    def _weight(self, count: int, width: int, first: int | None = None) -> Weight:
        """The tensor, or rows of it: each rank has it whole."""
        part = CheckpointSlice("rows", (count, width), ((0, count),) * (self._rank + 1))
        rows = None if first is None else (first, count)
        return Weight("rows", (part,), 0, self._rank, self._dtype, "vector", rows=rows)


def _stretches(places: list[int]) -> Iterator[tuple[int, slice]]:
    """Yields the first place of each run of places that follow one another from a page's first row on, and the run."""
    begin = 0
    for at in range(1, len(places) + 1):
        if at == len(places) or places[at] != places[at - 1] + 1:
            yield places[begin], slice(begin, at)
            begin = at
