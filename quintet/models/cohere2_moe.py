"""Command A+ (Cohere 2026): Cohere 2 with experts."""

from typing import Any

from torch import Tensor, nn

from quintet.layers.attention.attention import AttentionSizes, SelfAttention
from quintet.layers.build import BuildContext
from quintet.layers.decoder import layer_window
from quintet.layers.mlp import GatedMLP
from quintet.layers.moe.moe import MoE, MoESizes, unstacked
from quintet.layers.norm import RMSNorm
from quintet.layers.rope import Rotary
from quintet.models.cohere2 import Cohere2ForCausalLM


class Averaged(MoE):
    """Half of what the chosen experts and the shared ones add up to."""

    def __init__(self, build: BuildContext, mixture: MoESizes) -> None:
        super().__init__(build, mixture)
        self._halved = build.ops.take("scale")

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self._halved.scale(super().forward(x), 0.5)
        return out


class Cohere2MoeForCausalLM(Cohere2ForCausalLM):
    """Parallel blocks; the first layers may have one feed-forward, of another width, and positions without windows."""

    unstacked = staticmethod(unstacked)

    def _norm(self, config: Any, build: BuildContext) -> nn.Module:
        if config.rms_norm_eps is None:
            return super()._norm(config, build)
        return RMSNorm(build, config.hidden_size, config.rms_norm_eps)

    def _feed_forward(self, config: Any, build: BuildContext, index: int) -> nn.Module:
        if config.mlp_layer_types[index] == "dense":
            return GatedMLP(build, config.hidden_size, config.prefix_dense_intermediate_size, config.hidden_act)
        shared = config.num_shared_experts
        how, scores = config.shared_expert_combination_strategy, config.expert_selection_fn
        if scores not in ("softmax", "sigmoid") or (shared and how not in ("average", "sum")):
            raise ValueError(
                f"{config.model_type} has experts chosen by softmax or sigmoid, and shared ones whose average or sum "
                f"with them is taken, not {scores!r} and {how!r}"
            )
        mixture = MoESizes(
            hidden=config.hidden_size,
            width=config.intermediate_size,
            experts=config.num_experts,
            top_k=config.num_experts_per_tok,
            activation=config.hidden_act,
            renormalize=scores == "softmax" or config.norm_topk_prob,
            scores=scores,
            shared=config.intermediate_size * shared,
        )
        return Averaged(build, mixture) if shared and how == "average" else MoE(build, mixture)

    def _attention(self, config: Any, build: BuildContext, rotary: Rotary, index: int) -> SelfAttention:
        first = config.mlp_layer_types[index] == "dense" and config.prefix_dense_sliding_window_pattern == 1
        window, biased = layer_window(config, index), config.attention_bias
        shape = AttentionSizes.from_config(config, window=window, bias=biased, output_bias=biased)
        return SelfAttention(build, shape, rotary if first or window is not None else None)
