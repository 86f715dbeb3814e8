"""Lightning attention (Qin et al. 2024): heads forget at fixed rates, so that a state takes the place of K and V."""

import torch
from torch import Tensor

from quintet.interface.types import StateSpec
from quintet.layers.attention.attention import AttentionSizes
from quintet.layers.build import BuildContext, Layer, split_heads
from quintet.layers.layer_state import StepState
from quintet.layers.linear import SectionedLinear, column_parallel, row_parallel
from quintet.layers.norm import ShardedRMSNorm
from quintet.layers.ssm.delta_net import sections_by_head
from quintet.ops.states import ScanInputs, ScanWeights


class LightningAttention(Layer):
    """x [T, hidden] -> [T, hidden]: silu(q, k, v), a state, a norm over all heads and a gate. Ranks share the heads.

    `rates` [H]: a head keeps exp(-rate) of its state from token to token.
    """

    def __init__(self, build: BuildContext, shape: AttentionSizes, rates: Tensor, eps: float) -> None:
        super().__init__(build, "activate", "sigmoid_gate")
        if shape.heads % build.size:
            raise ValueError(
                f"{build.size} ranks cannot share {shape.heads} heads with states; choose a tensor_parallel_size that "
                "divides them"
            )
        heads, _ = split_heads(shape.heads, shape.heads, build.size)
        inner, dim = heads.times(shape.head_dim), shape.head_dim
        self._dim, self._dtype = dim, build.dtype
        self._rates = rates[slice(*heads.ranges[build.rank])]
        self.qkv = SectionedLinear(
            build, shape.hidden, sections_by_head("qkv_proj", shape.heads, [dim] * 3, build.size)
        )
        self.gate = column_parallel(build, shape.hidden, {"output_gate": inner})
        self.norm = ShardedRMSNorm(build, inner, eps)
        self.out = row_parallel(build, inner, ("out_proj", shape.hidden))
        self.mixing = build.make_mixer(StateSpec("state_space", (heads.local(build.rank), dim, dim)))
        self.log_rates: Tensor  # [H] float32

    def constants(self) -> dict[str, Tensor]:
        return {"log_rates": self._rates.float().log()}

    def forward(self, x: Tensor, cache: StepState) -> Tensor:
        tokens = x.shape[0]
        made = self.ops.activate(self.qkv(x), "silu")
        q, k, v = (each.reshape(tokens, -1, self._dim) for each in made.chunk(3, dim=-1))
        y = self.mixing.run_state_op(cache, ScanInputs(v, None, k, q), ScanWeights(self.log_rates), settings=(0.0,))
        normed = self.norm(y.reshape(tokens, -1).to(self._dtype))
        out: Tensor = self.out(self.ops.sigmoid_gate(normed, self.gate(x)))
        return out


def decay_rates(heads: int, index: int, layers: int) -> Tensor:
    """The rates [H] of a layer: ALiBi's slopes, less with each layer; the last one's hardly forget."""
    slopes = torch.tensor([2 ** (-8 * (head + 1) / heads) for head in range(heads)], dtype=torch.float64)
    return (slopes * (1 - index / (layers - 1 + 1e-5) + 1e-5)).float()
