"""Mamba 2 (Dao and Gu 2024): a short convolution, a selective state space, and a gated norm."""

from dataclasses import dataclass

import torch
from torch import Tensor

from quintet.layers.build import Build, Layer, Split, split_heads
from quintet.layers.linear import Stored, columns, rows
from quintet.layers.mixing import Cache
from quintet.layers.short_conv import ShortConv
from quintet.ops.states import Moves, Scan
from quintet.types import StateSpec
from quintet.weights import Part, Weight

SCANNED = ("A_log", "dt_bias", "D")  # of each head


@dataclass(frozen=True)
class Spaces:
    """The whole layer's sizes, before it is shared out over ranks."""

    hidden: int
    heads: int
    head_dim: int
    groups: int  # of heads that share what goes into and comes out of their states
    state: int  # numbers that each of a head's features keeps
    taps: int  # of the convolution
    eps: float
    conv_bias: bool = True
    bias: bool = False
    output_bias: bool = False
    least: float = 0.0  # that a time step is
    norm: str = "after the gate"  # or "before the gate", or "none"
    factors: tuple[float, float, float, float, float] | None = None  # of gate, x, B, C and dt (Falcon-H1)


class Mamba2(Layer):
    """x [T, hidden] -> [T, hidden]. Ranks share the heads, and their groups as attention shares KV heads."""

    def __init__(self, build: Build, shape: Spaces) -> None:
        super().__init__(build, "gated_norm", "scale_heads")
        if shape.norm != "none" and shape.groups % build.size:
            raise ValueError(
                f"{build.size} ranks cannot share {shape.groups} groups of heads that are normalised together; choose "
                "a tensor_parallel_size that divides them"
            )
        self._build, self._shape = build, shape
        heads, groups = split_heads(shape.heads, shape.groups, build.size)
        inner, kept = heads.times(shape.head_dim), groups.times(shape.state)
        parts = dict(zip(("z", "x", "B", "C", "dt"), (inner, inner, kept, kept, heads), strict=True))
        self._heads, self._sizes = heads, [each.local(build.rank) for each in (inner, inner, kept, kept, heads)]
        self.in_proj = columns(build, shape.hidden, parts, shape.bias, Stored(fused="in_proj"))
        self.conv1d = ShortConv(build, [inner, kept, kept], shape.taps, shape.conv_bias, silu=True)
        self.norm = GatedNorm(build, inner, shape.eps, shape.norm) if shape.norm != "none" else None
        self.out_proj = rows(build, inner, ("out_proj", shape.hidden), shape.output_bias)
        size = (heads.local(build.rank), shape.head_dim, shape.state)
        self.mixing = build.mixing(StateSpec("state_space", size))
        self.A_log: Tensor  # [H] float32, as the next two
        self.dt_bias: Tensor
        self.D: Tensor
        self.factors: Tensor

    def weights(self, path: str) -> list[Weight]:
        rank = self._build.rank
        parts = {name: Part(f"{path}.{name}", (self._heads.total,), self._heads.ranges) for name in SCANNED}
        return [Weight(name, (part,), 0, rank, torch.float32, "vector") for name, part in parts.items()]

    def constants(self) -> dict[str, Tensor]:
        """A factor for each feature of what is projected."""
        if self._shape.factors is None:
            return {}
        each = [torch.full((size, 1), factor) for size, factor in zip(self._sizes, self._shape.factors, strict=True)]
        return {"factors": torch.cat(each)}

    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        shape, tokens = self._shape, x.shape[0]
        made = self.in_proj(x)
        if shape.factors is not None:
            made = self.ops.scale_heads(made[:, :, None], self.factors).squeeze(2)
        inner, _, kept, _, heads = self._sizes
        gate, mixed, dt = made.split([inner, inner + 2 * kept, heads], dim=-1)
        given, into, out = self.conv1d(mixed, cache).split([inner, kept, kept], dim=-1)
        into, out = into.reshape(tokens, -1, shape.state), out.reshape(tokens, -1, shape.state)
        moves, scan = Moves(given.reshape(tokens, heads, -1), dt, into, out), Scan(self.A_log, self.dt_bias, self.D)
        y = self.mixing.advance(cache, moves, scan, settings=(shape.least,)).reshape(tokens, inner)
        if self.norm is not None:
            return self.out_proj(self.norm(y, gate, inner * self._heads.total // heads // shape.groups))
        return self.out_proj(self.ops.gated_norm(y, gate, None, 0.0, inner, True))


class GatedNorm(Layer):
    """The weight of a norm beside a gate; each piece of so many features is normalised by itself."""

    def __init__(self, build: Build, split: Split, eps: float, where: str) -> None:
        super().__init__(build, "gated_norm")
        self._build, self._split, self._eps, self._after = build, split, eps, where == "before the gate"
        self.weight: Tensor

    def weights(self, path: str) -> list[Weight]:
        part = Part(f"{path}.weight", (self._split.total,), self._split.ranges)
        return [Weight("weight", (part,), 0, self._build.rank, self._build.dtype, "vector")]

    def forward(self, x: Tensor, gate: Tensor, width: int) -> Tensor:
        out: Tensor = self.ops.gated_norm(x, gate, self.weight, self._eps, width, self._after)
        return out
