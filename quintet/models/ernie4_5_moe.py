"""ERNIE 4.5 with experts (Baidu 2025), the text models: neighbours turned, a softmax moved by a bias for the choice."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from quintet.layers.build import BuildContext
from quintet.layers.decoder import CausalLM, refuse
from quintet.layers.moe.moe import MoE, MoESizes, unstacked
from quintet.models.ernie4_5 import Ernie4_5ForCausalLM

NOTHING = 1e-6  # hardly ever do the weights of chosen experts add up to less
BIAS = "moe_statics.e_score_correction_bias"


class Ernie4_5_MoeForCausalLM(Ernie4_5ForCausalLM):
    """Pre-norm blocks; experts, and some that serve every token, in a stretch of the layers."""

    ignored_tensors = (*CausalLM.ignored_tensors, r"model\.mtp_.*")

    def __init__(self, config: Any, build: BuildContext) -> None:
        refuse(config, "use_bias")
        if (config.moe_norm_min or 0) > NOTHING:
            raise ValueError(
                f"{config.model_type} with moe_norm_min={config.moe_norm_min!r} is not supported: experts' "
                "weights are divided by their sum, however small"
            )
        super().__init__(config, build)

    def _mlp(self, config: Any, build: BuildContext, index: int) -> nn.Module:
        inside = config.moe_layer_start_index <= index <= config.moe_layer_end_index
        if not inside or (index + 1) % config.moe_layer_interval:
            return super()._mlp(config, build, index)
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
        return MoE(build, mixture)

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
