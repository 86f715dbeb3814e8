"""Causal attention whose queries have a number for each distance (Inkling, Thinking Machines 2026)."""

from dataclasses import replace

import torch
from torch import Tensor

from quintet.layers.attention.attention import AttentionSizes, SelfAttention
from quintet.layers.build import BuildContext, Shards, replicated, split_heads
from quintet.layers.layer_state import StepState
from quintet.layers.linear import CheckpointLayout, column_parallel
from quintet.layers.norm import RMSNorm
from quintet.layers.quantization import QuantizationPlan
from quintet.layers.rope import PositionScaling
from quintet.layers.ssm.short_conv import ShortConv


class LogScaling(PositionScaling):
    """A factor for each position: 1 + beta log((position + 1) / first), and 1 before `first`."""

    def constants(self) -> dict[str, Tensor]:
        places = torch.arange(1, self._served + 1, dtype=torch.float32)
        return {"table": (1 + self._beta * torch.log((places / self._first).clamp(min=1.0)))[:, None]}


class ResidualConv(ShortConv):
    """x [T, C] plus its short convolution over the request's last K tokens."""

    def __init__(self, build: BuildContext, channels: Shards, conv_kernel: int) -> None:
        super().__init__(build, [channels], conv_kernel)
        self._add = build.ops.take("add").add

    def forward(self, x: Tensor, cache: StepState, gates: Tensor | None = None) -> Tensor:
        out: Tensor = self._add(super().forward(x, cache, gates), x)
        return out


class DistanceBiasAttention(SelfAttention):
    """Queries and keys are normed; keys and values go through a convolution; a query's numbers for distances are
    products of a narrow state of each head, r_proj, with profiles of all distances, rel_logits_proj."""

    def __init__(
        self, build: BuildContext, shape: AttentionSizes, state: int, conv_kernel: int, eps: float,
        scaling: LogScaling | None,
    ) -> None:  # fmt: skip
        """`state`: numbers of a head's state. `scaling`: of queries and their numbers, by position."""
        super().__init__(build, shape, None)
        queries, keys = split_heads(shape.heads, shape.kv_heads, build.size)
        self.q_norm, self.k_norm = RMSNorm(build, shape.head_dim, eps), RMSNorm(build, shape.head_dim, eps)
        self.k_sconv = ResidualConv(build, keys.times(shape.head_dim), conv_kernel)
        self.v_sconv = ResidualConv(build, keys.times(shape.head_dim), conv_kernel)
        self.states = column_parallel(build, shape.hidden, {"r_proj": queries.times(state)})
        floats = replace(build, quantization=QuantizationPlan())
        profiles = {"rel_logits_proj": replicated(shape.distances, build.size)}
        self.profiles = column_parallel(floats, state, profiles, stored=CheckpointLayout(transposed=True))
        self._state, self._scaling = state, (scaling,)  # the model's

    def forward(self, x: Tensor, cache: StepState) -> Tensor:
        assert self.q_norm is not None and self.k_norm is not None
        (scaling,), tokens = self._scaling, x.shape[0]
        q, k, v = self.project(x)
        k = self.k_sconv(k.reshape(tokens, -1), cache).reshape(k.shape)
        v = self.v_sconv(v.reshape(tokens, -1), cache).reshape(v.shape)
        q, k = self.q_norm(q), self.k_norm(k)
        numbers = self.profiles(self.states(x).reshape(-1, self._state)).reshape(*q.shape[:2], -1)
        if scaling is not None:
            q, numbers = scaling(q, cache.batch.positions), scaling(numbers, cache.batch.positions)
        if not self.kv_scales.enabled:
            mixed = self.mixing.attend_distances(q, k, v, numbers, cache).reshape(tokens, -1)
        else:
            out = self.mixing.attend_distances(*self.kv_scales.scale_inputs(q, k, v), numbers, cache)
            mixed = self.kv_scales.scale_output(out.reshape(q.shape)).reshape(tokens, -1)
        projected: Tensor = self.out(mixed)
        return projected
