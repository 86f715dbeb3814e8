"""Kimi Delta Attention (Kimi Team 2025): gated delta nets that forget each number of a key at a rate of its own."""

from dataclasses import dataclass

import torch
from torch import Tensor

from quintet.interface.types import StateSpec
from quintet.interface.weights import Weight
from quintet.layers.build import BuildContext, Layer, even_shards, replicated, vector_weight
from quintet.layers.layer_state import StepState
from quintet.layers.linear import column_parallel, row_parallel
from quintet.layers.norm import RMSNorm
from quintet.layers.ssm.short_conv import ShortConv
from quintet.ops.states import DeltaRuleInputs, ScanWeights


@dataclass(frozen=True)
class KimiDeltaSizes:
    """The whole layer's sizes, before its heads are shared out over ranks."""

    hidden: int
    heads: int
    head_dim: int  # of queries, keys and values
    conv_kernel: int  # of the convolutions
    eps: float
    low_rank: bool = True  # both gates are products of two matrices; else of one
    lower_bound: float = 0.0  # of the logarithms of decays, below 0; 0: there is none


class KimiDeltaAttention(Layer):
    """x [T, hidden] -> [T, hidden]. Ranks share the heads."""

    def __init__(self, build: BuildContext, shape: KimiDeltaSizes) -> None:
        super().__init__(build, "sigmoid_gate")
        if shape.heads < build.size:
            raise ValueError(
                f"{build.size} ranks cannot share {shape.heads} heads with states: a rank would have none; lower "
                f"tensor_parallel_size to {shape.heads} or less"
            )
        heads, low = even_shards(shape.heads, build.size), replicated(shape.head_dim, build.size)
        inner = heads.times(shape.head_dim)
        self._build, self._shape, self._split, self._inner = build, shape, heads, inner
        mixed = dict.fromkeys(("q_proj", "k_proj", "v_proj"), inner)
        gates = {"f_a_proj": low, "g_a_proj": low} if shape.low_rank else {"f_proj": inner, "g_proj": inner}
        self.in_proj = column_parallel(build, shape.hidden, {**mixed, "b_proj": heads, **gates})
        sources = ("q_conv1d", "k_conv1d", "v_conv1d")
        self.conv1d = ShortConv(build, [inner] * 3, shape.conv_kernel, silu=True, sources=sources)
        self.forget = column_parallel(build, shape.head_dim, {"f_b_proj": inner}) if shape.low_rank else None
        self.gate = column_parallel(build, shape.head_dim, {"g_b_proj": inner}) if shape.low_rank else None
        self.o_norm = RMSNorm(build, shape.head_dim, shape.eps)
        self.o_proj = row_parallel(build, inner, ("o_proj", shape.hidden))
        size = (heads.local(build.rank), shape.head_dim, shape.head_dim)
        self.mixing = build.make_mixer(StateSpec("kimi_delta_rule", size))
        self.A_log: Tensor  # [H] float32
        self.dt_bias: Tensor  # [H D] float32

    def weights(self, path: str) -> list[Weight]:
        splits = {"A_log": self._split, "dt_bias": self._inner}
        return [vector_weight(self._build, f"{path}.{name}", split, torch.float32) for name, split in splits.items()]

    def forward(self, x: Tensor, cache: StepState) -> Tensor:
        shape, heads = self._shape, self._split.local(self._build.rank)
        by_head, made = (x.shape[0], heads, shape.head_dim), self.in_proj(x)
        inner = heads * shape.head_dim
        mixed, learn, gates = made.split([3 * inner, heads, made.shape[1] - 3 * inner - heads], dim=-1)
        forget, gate = gates.chunk(2, dim=-1)
        if self.forget is not None and self.gate is not None:
            forget, gate = self.forget(forget), self.gate(gate)
        q, k, v = (each.reshape(by_head) for each in self.conv1d(mixed, cache).chunk(3, dim=-1))
        turns = DeltaRuleInputs(q, k, v, forget.reshape(by_head), learn)
        scan = ScanWeights(self.A_log, self.dt_bias.reshape(heads, -1))
        o = self.mixing.run_state_op(cache, turns, scan, settings=(shape.lower_bound,))
        o = self.o_norm(o.to(x.dtype)).reshape(x.shape[0], -1)
        return self.o_proj(self.ops.sigmoid_gate(o, gate))
