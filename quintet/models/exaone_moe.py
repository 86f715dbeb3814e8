"""K-EXAONE (LG AI Research 2025): EXAONE 4's attention in pre-norm blocks, DeepSeek-V3's experts."""

from typing import Any

from torch import nn

from quintet.layers.build import BuildContext
from quintet.layers.decoder import CausalLM, DecoderTrunk, PreNormBlock, require
from quintet.layers.linear import LMHead
from quintet.layers.mlp import GatedMLP
from quintet.layers.moe.moe import MoE, MoESizes, unstacked
from quintet.layers.rope import Rotary
from quintet.models.deepseek_v3 import dense
from quintet.models.exaone4 import attention

# transformers 5 may write the bias beside the router's weight
RENAMED = {".mlp.gate.e_score_correction_bias": ".mlp.e_score_correction_bias"}


class ExaoneMoeForCausalLM(CausalLM):
    """The first layers have one feed-forward."""

    renamed_tensors = RENAMED
    ignored_tensors = (*CausalLM.ignored_tensors, r"mtp\..*")
    unstacked = staticmethod(unstacked)

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(build)
        require(config, {"scoring_func": "sigmoid", "topk_method": "noaux_tc"})
        rotary = Rotary.from_config(build, config)
        mixture = MoESizes(
            hidden=config.hidden_size,
            width=config.moe_intermediate_size,
            experts=config.num_experts,
            top_k=config.num_experts_per_tok,
            activation=config.hidden_act,
            renormalize=config.norm_topk_prob,
            scores="sigmoid",
            bias="e_score_correction_bias",
            groups=config.n_group,
            top_k_groups=config.topk_group,
            scale=config.routed_scaling_factor,
            shared=config.moe_intermediate_size * config.num_shared_experts,
        )

        def block(config: Any, build: BuildContext, index: int) -> PreNormBlock:
            mlp: nn.Module
            if dense(config, index):
                mlp = GatedMLP(build, config.hidden_size, config.intermediate_size, config.hidden_act)
            else:
                mlp = MoE(build, mixture)
            return PreNormBlock(config, build, attention(config, build, rotary, index), mlp)

        self.model = DecoderTrunk(config, build, block)
        self.lm_head = LMHead.from_config(build, config)
