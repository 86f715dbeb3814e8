"""Look-up tables: tokens, and learned positions."""

from torch import Tensor

from quintet.layers.build import Build, Layer, padded, whole
from quintet.types import Batch
from quintet.weights import Part, Reader, Weight


class Embedding(Layer):
    """Rows by id; shared out over the ranks by rows unless `replicated`."""

    def __init__(self, build: Build, count: int, width: int, replicated: bool = False) -> None:
        super().__init__(build, "embedding", "place_rows", "scale")
        self._build, self._shape = build, (count, width)
        self._split = whole(count, build.size) if replicated else padded(count, build.size)
        self._partial = build.size > 1 and not replicated
        self._reader: Reader | None = None
        self._first = self._split.ranges[build.rank][0]
        self.weight: Tensor

    def settle(self, path: str) -> None:
        """A table that is quantized is looked up in floats."""
        self._reader = self._build.forms.of_table().reader(path)

    def weights(self, path: str) -> list[Weight]:
        part, build = Part(f"{path}.weight", self._shape, self._split.ranges), self._build
        return [Weight("weight", (part,), 0, build.rank, build.dtype, "embedding", reader=self._reader)]

    def forward(self, ids: Tensor) -> Tensor:  # [T] -> [T, width]
        rows = self.ops.embedding(ids, self.weight, self._first, self._partial)
        return self._build.comm.all_reduce(rows) if self._partial else rows

    @property
    def width(self) -> int:
        """Numbers of a row."""
        return self._shape[1]

    def of(self, batch: Batch, scale: float = 1.0) -> Tensor:
        """A step's tokens -> [T, width], scaled; some may come as they are, in the place of their ids."""
        rows, given = self(batch.token_ids), batch.inputs
        if scale != 1.0:
            rows = self.ops.scale(rows, scale)
        if given.embeds is not None:
            rows = self.ops.place_rows(rows, given.embeds, given.places)
        out: Tensor = rows
        return out


class PositionEmbedding(Embedding):
    """Learned positions, on every rank; position p is row `first` + p."""

    def __init__(self, build: Build, count: int, width: int, first: int = 0) -> None:
        if build.max_model_len > count:
            raise ValueError(
                f"max_model_len {build.max_model_len} exceeds the {count} positions that the model learned"
            )
        super().__init__(build, first + count, width, replicated=True)
        self._offset = first

    def forward(self, positions: Tensor) -> Tensor:  # [T] -> [T, width]
        return self.ops.embedding(positions, self.weight, -self._offset, self._offset > 0)
