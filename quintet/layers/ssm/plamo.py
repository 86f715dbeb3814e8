"""Plamo 2's mixers (Preferred Networks 2025): Mamba 2 steered as Mamba 1 is, attention with a norm for each head."""

from dataclasses import dataclass

import torch
from torch import Tensor

from quintet.interface.types import StateSpec
from quintet.interface.weights import Weight
from quintet.layers.build import BuildContext, Layer, Shards, even_shards, vector_weight
from quintet.layers.layer_state import StepState
from quintet.layers.linear import SectionedLinear, column_parallel, row_parallel
from quintet.layers.norm import HeadLayerNorm, RMSNorm
from quintet.layers.ssm.delta_net import sections_by_head
from quintet.layers.ssm.mamba import HEAD_PARAMETERS
from quintet.layers.ssm.short_conv import ShortConv
from quintet.ops.states import ScanInputs, ScanWeights


@dataclass(frozen=True)
class PlamoMamba2Sizes:
    """The sizes of a layer, before it is shared out over ranks."""

    hidden: int
    heads: int
    head_dim: int
    state: int  # numbers that each of a head's features keeps
    dt_rank: int  # of the time steps
    conv_kernel: int
    eps: float


class PlamoMamba2(Layer):
    """x [T, hidden] -> [T, hidden]: what goes into and comes out of states, and the time steps, are made of the
    convolution's output, and normalised. Ranks share the heads."""

    def __init__(self, build: BuildContext, shape: PlamoMamba2Sizes) -> None:
        super().__init__(build, "gated_norm")
        self._build, self._shape, self._heads = build, shape, even_shards(shape.heads, build.size)
        inner, dim = self._heads.times(shape.head_dim), shape.head_dim
        if shape.heads % build.size:
            raise ValueError(
                f"{build.size} ranks cannot share {shape.heads} heads with states; choose a tensor_parallel_size that "
                "divides them"
            )
        self.in_proj = SectionedLinear(
            build, shape.hidden, sections_by_head("in_proj", shape.heads, [dim, dim], build.size)
        )
        self.conv1d = ShortConv(build, [inner], shape.conv_kernel, bias=False, silu=True)
        self.steers = row_parallel(build, inner, ("bcdt_proj", 2 * shape.state + shape.dt_rank))
        self.dt_norm = RMSNorm(build, shape.dt_rank, shape.eps)
        self.B_norm = RMSNorm(build, shape.state, shape.eps)
        self.C_norm = RMSNorm(build, shape.state, shape.eps)
        self.dt_proj = column_parallel(build, shape.dt_rank, {"dt_proj": self._heads})
        self.out_proj = row_parallel(build, inner, ("out_proj", shape.hidden))
        self.mixing = build.make_mixer(StateSpec("state_space", (self._heads.local(build.rank), dim, shape.state)))
        self.A_log: Tensor  # [H] float32, as the next two
        self.dt_bias: Tensor
        self.D: Tensor

    def weights(self, path: str) -> list[Weight]:
        return [vector_weight(self._build, f"{path}.{name}", self._heads, torch.float32) for name in HEAD_PARAMETERS]

    def forward(self, x: Tensor, cache: StepState) -> Tensor:
        shape, tokens = self._shape, x.shape[0]
        gate, mixed = self.in_proj(x).chunk(2, dim=-1)
        given = self.conv1d(mixed, cache)
        into, out, dt = self.steers(given).split([shape.state, shape.state, shape.dt_rank], dim=-1)
        moves = ScanInputs(
            given.reshape(tokens, -1, shape.head_dim),
            self.dt_proj(self.dt_norm(dt)),
            self.B_norm(into)[:, None],
            self.C_norm(out)[:, None],
        )
        y = self.mixing.run_state_op(cache, moves, ScanWeights(self.A_log, self.dt_bias, self.D), settings=(0.0,))
        inner = gate.shape[1]
        return self.out_proj(self.ops.gated_norm(y.reshape(tokens, inner), gate, None, 0.0, inner, True))


class HeadRMSNorm(HeadLayerNorm):
    """Each head divided by its root mean square, times a weight of its own: in float32, rounded once."""

    def __init__(self, build: BuildContext, heads: Shards, head_dim: int, eps: float) -> None:
        super().__init__(build, heads, head_dim, eps)
        self.ops.take("rms_norm")

    def forward(self, x: Tensor) -> Tensor:  # [T, H, D] -> [T, H, D]
        y = self.ops.rms_norm(x.float(), self.ones, self._eps, 0.0)
        return (y * self.weight.reshape(x.shape[1:])).to(x.dtype)
