"""DeepSeekMoE 16B (Dai et al. 2024), the first DeepSeek with experts: Llama's attention, experts by softmax."""

from typing import Any

from torch import nn

from quintet.layers.attention.attention import AttentionSizes
from quintet.layers.build import BuildContext
from quintet.layers.decoder import require
from quintet.layers.moe.moe import MoE, MoESizes, unstacked
from quintet.models.llama import LlamaForCausalLM


class DeepseekForCausalLM(LlamaForCausalLM):
    """The first layers have one feed-forward, the others experts and some that serve every token."""

    unstacked = staticmethod(unstacked)

    def __init__(self, config: Any, build: BuildContext) -> None:
        computed = {"scoring_func": "softmax", "moe_layer_freq": 1, "routed_scaling_factor": 1.0}
        require(config, {**computed, "attention_bias": False, "rswa_window": None})
        super().__init__(config, build)

    def _attention_sizes(self, config: Any, index: int) -> AttentionSizes:
        return AttentionSizes.from_config(config)

    def _mlp(self, config: Any, build: BuildContext, index: int) -> nn.Module:
        if index < config.first_k_dense_replace:
            return super()._mlp(config, build, index)
        mixture = MoESizes(
            hidden=config.hidden_size,
            width=config.moe_intermediate_size,
            experts=config.num_experts,
            top_k=config.num_experts_per_tok,
            activation=config.hidden_act,
            renormalize=config.norm_topk_prob,
            shared=config.moe_intermediate_size * (config.n_shared_experts or 0),
        )
        return MoE(build, mixture)
