"""Mamba 1 and 2 (Gu and Dao 2023, 2024): a short convolution, a selective state space, and a gate."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quintet.interface.types import StateSpec
from quintet.interface.weights import CheckpointSlice, Weight
from quintet.layers.build import BuildContext, Layer, Shards, even_shards, split_heads, vector_weight
from quintet.layers.layer_state import StepState
from quintet.layers.linear import CheckpointLayout, column_parallel, row_parallel
from quintet.layers.norm import RMSNorm
from quintet.layers.ssm.short_conv import ShortConv
from quintet.ops.states import ScanInputs, ScanWeights

HEAD_PARAMETERS = ("A_log", "dt_bias", "D")  # of each head


@dataclass(frozen=True)
class Mamba2Sizes:
    """The whole layer's sizes, before it is shared out over ranks."""

    hidden: int
    heads: int
    head_dim: int
    groups: int  # of heads that share what goes into and comes out of their states
    state: int  # numbers that each of a head's features keeps
    conv_kernel: int  # of the convolution
    eps: float
    conv_bias: bool = True
    bias: bool = False
    output_bias: bool = False
    dt_min: float = 0.0  # that a time step is
    norm: str = "after the gate"  # or "before the gate", or "none"
    factors: tuple[float, float, float, float, float] | None = None  # of gate, x, B, C and dt (Falcon-H1)


class Mamba2(Layer):
    """x [T, hidden] -> [T, hidden]. Ranks share the heads, and their groups as attention shares KV heads."""

    def __init__(self, build: BuildContext, shape: Mamba2Sizes) -> None:
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
        self.in_proj = column_parallel(build, shape.hidden, parts, shape.bias, CheckpointLayout(fused="in_proj"))
        self.conv1d = ShortConv(build, [inner, kept, kept], shape.conv_kernel, shape.conv_bias, silu=True)
        self.norm = GatedNorm(build, inner, shape.eps, shape.norm) if shape.norm != "none" else None
        self.out_proj = row_parallel(build, inner, ("out_proj", shape.hidden), shape.output_bias)
        size = (heads.local(build.rank), shape.head_dim, shape.state)
        self.mixing = build.make_mixer(StateSpec("state_space", size))
        self.A_log: Tensor  # [H] float32, as the next two
        self.dt_bias: Tensor
        self.D: Tensor
        self.factors: Tensor

    def weights(self, path: str) -> list[Weight]:
        return [vector_weight(self._build, f"{path}.{name}", self._heads, torch.float32) for name in HEAD_PARAMETERS]

    def constants(self) -> dict[str, Tensor]:
        """A factor for each feature of what is projected."""
        if self._shape.factors is None:
            return {}
        each = [torch.full((size, 1), factor) for size, factor in zip(self._sizes, self._shape.factors, strict=True)]
        return {"factors": torch.cat(each)}

    def forward(self, x: Tensor, cache: StepState) -> Tensor:
        shape, tokens = self._shape, x.shape[0]
        made = self.in_proj(x)
        if shape.factors is not None:
            made = self.ops.scale_heads(made[:, :, None], self.factors).squeeze(2)
        inner, _, kept, _, heads = self._sizes
        gate, mixed, dt = made.split([inner, inner + 2 * kept, heads], dim=-1)
        given, into, out = self.conv1d(mixed, cache).split([inner, kept, kept], dim=-1)
        into, out = into.reshape(tokens, -1, shape.state), out.reshape(tokens, -1, shape.state)
        moves, scan = (
            ScanInputs(given.reshape(tokens, heads, -1), dt, into, out),
            ScanWeights(self.A_log, self.dt_bias, self.D),
        )
        y = self.mixing.run_state_op(cache, moves, scan, settings=(shape.dt_min,)).reshape(tokens, inner)
        if self.norm is not None:
            return self.out_proj(self.norm(y, gate, inner * self._heads.total // heads // shape.groups))
        return self.out_proj(self.ops.gated_norm(y, gate, None, 0.0, inner, True))


class GatedNorm(Layer):
    """The weight of a norm beside a gate; each piece of so many features is normalised by itself."""

    def __init__(self, build: BuildContext, split: Shards, eps: float, where: str) -> None:
        super().__init__(build, "gated_norm")
        self._build, self._split, self._eps, self._after = build, split, eps, where == "before the gate"
        self.weight: Tensor

    def weights(self, path: str) -> list[Weight]:
        return [vector_weight(self._build, f"{path}.weight", self._split)]

    def forward(self, x: Tensor, gate: Tensor, width: int) -> Tensor:
        out: Tensor = self.ops.gated_norm(x, gate, self.weight, self._eps, width, self._after)
        return out


@dataclass(frozen=True)
class Mamba1Sizes:
    """The sizes of a Mamba 1 layer, before it is shared out over ranks."""

    hidden: int
    inner: int
    state: int  # numbers that each channel keeps
    dt_rank: int  # of the time steps
    conv_kernel: int
    conv_bias: bool = True
    bias: bool = False
    norm_eps: float | None = None  # of norms on the time steps, and on what goes into and comes out of states
    norm_has_weight: bool = True  # these norms have weights


class Mamba1(Layer):
    """x [T, hidden] -> [T, hidden]. Ranks share the channels."""

    def __init__(self, build: BuildContext, shape: Mamba1Sizes) -> None:
        super().__init__(build, "gated_norm", "rms_norm")
        self._build, self._shape, self._split = build, shape, even_shards(shape.inner, build.size)
        parts = dict(zip(("x", "z"), (self._split, self._split), strict=True))
        self.in_proj = column_parallel(build, shape.hidden, parts, shape.bias, CheckpointLayout(fused="in_proj"))
        self.conv1d = ShortConv(build, [self._split], shape.conv_kernel, shape.conv_bias, silu=True)
        self.x_proj = row_parallel(build, self._split, ("x_proj", shape.dt_rank + 2 * shape.state))
        self.dt_proj = column_parallel(build, shape.dt_rank, {"dt_proj": self._split})
        self.out_proj = row_parallel(build, self._split, ("out_proj", shape.hidden), shape.bias)
        self._norms: list[nn.Module] = []
        if shape.norm_eps is not None:
            widths = {"dt_layernorm": shape.dt_rank, "b_layernorm": shape.state, "c_layernorm": shape.state}
            for name, width in widths.items():
                self.add_module(name, RMSNorm(build, width, shape.norm_eps, has_weight=shape.norm_has_weight))
                self._norms.append(getattr(self, name))
        self.mixing = build.make_mixer(StateSpec("selective_scan", (self._split.local(build.rank), shape.state)))
        self.A_log: Tensor  # [C, N] float32
        self.dt_bias: Tensor  # [C] float32, as the next
        self.D: Tensor

    def weights(self, path: str) -> list[Weight]:
        total, ranges, rank = self._split.total, self._split.ranges, self._build.rank
        parts = {
            "A_log": CheckpointSlice(f"{path}.A_log", (total, self._shape.state), ranges),
            "dt_bias": CheckpointSlice(f"{path}.dt_proj.bias", (total,), ranges),
            "D": CheckpointSlice(f"{path}.D", (total,), ranges),
        }
        return [Weight(name, (part,), 0, rank, torch.float32, "vector") for name, part in parts.items()]

    def forward(self, x: Tensor, cache: StepState) -> Tensor:
        inner, state = self._split.local(self._build.rank), self._shape.state
        given, gate = self.in_proj(x).split([inner, inner], dim=-1)
        given = self.conv1d(given, cache)
        parts = self.x_proj(given).split([self._shape.dt_rank, state, state], dim=-1)
        dt, into, out = [norm(each) for norm, each in zip(self._norms, parts, strict=True)] if self._norms else parts
        moves = ScanInputs(given[:, :, None], self.dt_proj(dt), into[:, None], out[:, None])
        y = self.mixing.run_state_op(cache, moves, ScanWeights(self.A_log, self.dt_bias, self.D)).squeeze(2)
        return self.out_proj(self.ops.gated_norm(y, gate, None, 0.0, inner, True))
