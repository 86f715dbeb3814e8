"""Normalisations, plain and joined with the residual."""

from collections.abc import Sequence
from typing import overload

import torch
from torch import Tensor

from quintet.interface.weights import CheckpointSlice, Weight
from quintet.layers.build import BuildContext, Layer, Shards, vector_weight


class RMSNorm(Layer):
    """norm(x), or with a residual (norm(x + residual), x + residual).

    `offset` is 1 if the weight is kept around 0. What is not `weighed` has ones.
    """

    def __init__(
        self, build: BuildContext, width: int, eps: float, offset: float = 0.0, has_weight: bool = True
    ) -> None:
        super().__init__(build, "rms_norm", "add_rms_norm")
        self._build, self._width, self.eps, self.offset = build, width, eps, offset
        self._has_weight = has_weight
        self.weight: Tensor

    def constants(self) -> dict[str, Tensor]:
        return {} if self._has_weight else {"weight": torch.ones(self._width, dtype=self._build.dtype)}

    def weights(self, path: str) -> list[Weight]:
        if not self._has_weight:
            return []
        return [vector_weight(self._build, f"{path}.weight", self._width)]

    @overload
    def forward(self, x: Tensor, /) -> Tensor: ...
    @overload
    def forward(self, x: Tensor, residual: Tensor | None, /) -> tuple[Tensor, Tensor]: ...
    def forward(self, x: Tensor, /, *residual: Tensor | None) -> Tensor | tuple[Tensor, Tensor]:
        if not residual:
            return self.ops.rms_norm(x, self.weight, self.eps, self.offset)
        if residual[0] is None:
            return self.ops.rms_norm(x, self.weight, self.eps, self.offset), x
        return self.ops.add_rms_norm(x, residual[0], self.weight, self.eps, self.offset)


class ShardedRMSNorm(Layer):
    """RMSNorm over features that are shared out over the ranks; a feature that several ranks keep counts once."""

    def __init__(self, build: BuildContext, split: Shards, eps: float) -> None:
        super().__init__(build, "rms_norm")
        self._build, self._split, self._eps = build, split, eps
        self.weight: Tensor
        self.counted: Tensor

    def weights(self, path: str) -> list[Weight]:
        return [vector_weight(self._build, f"{path}.weight", self._split)]

    def constants(self) -> dict[str, Tensor]:
        ranges, rank = self._split.ranges, self._build.rank
        first = ranges.index(ranges[rank]) == rank
        return {"counted": torch.full((self._split.local(rank),), float(first))}

    def forward(self, x: Tensor) -> Tensor:
        """x [T, ...] -> the same shape; its other axes together are this rank's features."""
        flat = x.flatten(1)
        if self._build.size == 1:
            return self.ops.rms_norm(flat, self.weight, self._eps, 0.0).reshape(x.shape)
        y = flat.float()
        squares = self._build.comm.all_reduce((y.pow(2) * self.counted).sum(-1, keepdim=True))
        y = y * torch.rsqrt(squares / self._split.total + self._eps)
        return (y.to(x.dtype) * self.weight).reshape(x.shape)


class LayerNorm(Layer):
    """Mean and variance normalised; then times a weight plus a bias, as far as `parts` has them ("weight", "bias").

    With a residual as RMSNorm. `offset` is 1 if the weight is kept around 0.
    """

    def __init__(
        self,
        build: BuildContext,
        width: int,
        eps: float,
        parts: Sequence[str] = ("weight", "bias"),
        offset: float = 0.0,
    ) -> None:
        super().__init__(build, "layer_norm", "add")
        self._build, self._width, self._eps, self._parts, self._offset = build, width, eps, tuple(parts), offset
        self.weight: Tensor
        self.bias: Tensor | None = None

    def weights(self, path: str) -> list[Weight]:
        shifts = {"weight": self._offset}
        return [
            vector_weight(self._build, f"{path}.{name}", self._width, shift=shifts.get(name, 0.0))
            for name in self._parts
        ]

    def constants(self) -> dict[str, Tensor]:
        return {} if "weight" in self._parts else {"weight": torch.ones(self._width, dtype=self._build.dtype)}

    @overload
    def forward(self, x: Tensor, /) -> Tensor: ...
    @overload
    def forward(self, x: Tensor, residual: Tensor | None, /) -> tuple[Tensor, Tensor]: ...
    def forward(self, x: Tensor, /, *residual: Tensor | None) -> Tensor | tuple[Tensor, Tensor]:
        if not residual:
            return self.ops.layer_norm(x, self.weight, self.bias, self._eps)
        total = x if residual[0] is None else self.ops.add(x, residual[0])
        return self.ops.layer_norm(total, self.weight, self.bias, self._eps), total


class HeadLayerNorm(Layer):
    """Mean and variance of each head normalised, then times a weight of its own: in float32, rounded once."""

    def __init__(self, build: BuildContext, heads: Shards, head_dim: int, eps: float, name: str = "") -> None:
        """`name`: of a head's weight, by its number, where the checkpoint has them apart, and not in one [H, D]."""
        super().__init__(build, "layer_norm")
        self._build, self._heads, self._dim, self._eps, self._name = build, heads, head_dim, eps, name
        self.weight: Tensor
        self.ones: Tensor

    def weights(self, path: str) -> list[Weight]:
        rank, ranges = self._build.rank, self._heads.ranges
        if not self._name:
            part = CheckpointSlice(f"{path}.weight", (self._heads.total, self._dim), ranges)
            return [Weight("weight", (part,), 0, rank, torch.float32, "vector")]
        parts = []
        for head in range(self._heads.total):
            kept = tuple((0, self._dim if start <= head < stop else 0) for start, stop in ranges)
            parts.append(CheckpointSlice(f"{path}.{self._name.format(head)}", (self._dim,), kept))
        return [Weight("weight", tuple(parts), 0, rank, torch.float32, "channels")]

    def constants(self) -> dict[str, Tensor]:
        return {"ones": torch.ones(self._dim)}

    def forward(self, x: Tensor) -> Tensor:  # [T, H, D] -> [T, H, D]
        y = self.ops.layer_norm(x.float(), self.ones, None, self._eps)
        return (y * self.weight.reshape(x.shape[1:])).to(x.dtype)
