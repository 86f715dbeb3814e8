"""ERNIE 4.5 with experts (Baidu 2025), the text models: neighbours turned, a softmax moved by a bias for the choice."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from quintet.layers.attention.attention import AttentionSizes, SelfAttention
from quintet.layers.build import BuildContext
from quintet.layers.decoder import CausalLM, DecoderTrunk, PreNormBlock, refuse
from quintet.layers.linear import LMHead
from quintet.layers.mlp import GatedMLP
from quintet.layers.moe.moe import MoE, MoESizes, unstacked
from quintet.layers.rope import Rotary

NOTHING = 1e-6  # hardly ever do the weights of chosen experts add up to less
BIAS = "moe_statics.e_score_correction_bias"


class Ernie4_5_MoeForCausalLM(CausalLM):
    """Pre-norm blocks; experts, and some that serve every token, in a stretch of the layers."""

    ignored_tensors = (*CausalLM.ignored_tensors, r"model\.mtp_.*")

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(build)
        refuse(config, "use_bias")
        if (config.moe_norm_min or 0) > NOTHING:
            raise ValueError(
                f"{config.model_type} with moe_norm_min={config.moe_norm_min!r} is not supported: experts' "
                "weights are divided by their sum, however small"
            )
        rotary = Rotary.from_config(build, config, interleaved=True)
        mixture = MoESizes(
            hidden=config.hidden_size,
            width=config.moe_intermediate_size,
            experts=config.moe_num_experts,
            top_k=config.moe_k,
            activation=config.hidden_act,
            renormalize=True,
            bias=BIAS,
            fp32_router=True,
            shared=config.moe_intermediate_size * config.moe_num_shared_experts,
        )

        def block(config: Any, build: BuildContext, index: int) -> PreNormBlock:
            inside = config.moe_layer_start_index <= index <= config.moe_layer_end_index
            mlp: nn.Module
            if inside and (index + 1) % config.moe_layer_interval == 0:
                mlp = MoE(build, mixture)
            else:
                mlp = GatedMLP(build, config.hidden_size, config.intermediate_size, config.hidden_act)
            return PreNormBlock(config, build, SelfAttention(build, AttentionSizes.from_config(config), rotary), mlp)

        self.model = DecoderTrunk(config, build, block)
        self.lm_head = LMHead.from_config(build, config)

    @staticmethod
    def canonical(name: str) -> str:
        """transformers 5 may write the bias beside the router's weight."""
        return re.sub(rf"\.mlp\.gate\.{re.escape(BIAS)}$", f".mlp.{BIAS}", name)

    @staticmethod
    def unstacked(name: str, shape: Sequence[int]) -> Mapping[str, tuple[Any, ...]]:
        """The bias is a row of a matrix of one."""
        if name.endswith(BIAS) and len(shape) == 2 and shape[0] == 1:
            return {name: (0,)}
        return unstacked(name, shape)
