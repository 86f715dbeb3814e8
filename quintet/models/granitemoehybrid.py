"""Granite 4 (IBM 2025): Mamba 2 and some attention, Granite's multipliers, experts beside a shared feed-forward."""

from typing import Any

from torch import Tensor, nn

from quintet.layers.build import BuildContext
from quintet.layers.linear import CheckpointLayout
from quintet.layers.mlp import GatedMLP
from quintet.layers.moe.moe import MoE, MoESizes, unstacked
from quintet.layers.rope import Rotary
from quintet.layers.ssm.mamba import Mamba2
from quintet.models.bamba import spaces
from quintet.models.granite import GraniteForCausalLM

RENAMED = {
    ".mamba.": ".self_attn.",
    ".block_sparse_moe.router.layer.": ".mlp.moe.gate.",
    ".block_sparse_moe.input_linear.weight": ".mlp.moe.experts.gate_up_proj",
    ".block_sparse_moe.output_linear.weight": ".mlp.moe.experts.down_proj",
    ".block_sparse_moe.": ".mlp.moe.",
    ".shared_mlp.output_linear.": ".shared_mlp.down_proj.",
    ".shared_mlp.": ".mlp.shared.",
}


class GraniteMoeHybridMLP(nn.Module):
    """A gated feed-forward that serves every token and, where there are some, experts beside it."""

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__()
        self._ops = build.ops.take("add")
        hidden, kind = config.hidden_size, config.hidden_act
        fused = CheckpointLayout(fused="input_linear")
        self.shared = GatedMLP(build, hidden, config.shared_intermediate_size, kind, stored=fused)
        mixture = (
            MoESizes(
                hidden=hidden,
                width=config.intermediate_size,
                experts=config.num_local_experts,
                top_k=config.num_experts_per_tok,
                activation=kind,
                renormalize=True,
            )
            if config.num_local_experts
            else None
        )
        self.moe = None if mixture is None else MoE(build, mixture)

    def forward(self, x: Tensor) -> Tensor:
        every = self.shared(x)
        out: Tensor = every if self.moe is None else self._ops.add(self.moe(x), every)
        return out


class GraniteMoeHybridForCausalLM(GraniteForCausalLM):
    """Granite with layers of Mamba 2 or attention, which may have no positions."""

    renamed_tensors = RENAMED
    unstacked = staticmethod(unstacked)

    def _rotary(self, config: Any, build: BuildContext) -> Rotary | None:
        return super()._rotary(config, build) if config.position_embedding_type == "rope" else None

    def _attention(self, config: Any, build: BuildContext, index: int, rotary: Rotary | None) -> nn.Module:
        if config.layer_types[index] == "linear_attention":
            return Mamba2(build, spaces(config))
        return super()._attention(config, build, index, rotary)

    def _mlp(self, config: Any, build: BuildContext, index: int) -> nn.Module:
        return GraniteMoeHybridMLP(config, build)
