"""Jamba (Lieber et al. 2024): Mamba and, in some layers, attention without positions; experts in some."""

from typing import Any

from torch import nn

from quintet.layers.attention.attention import AttentionSizes, SelfAttention
from quintet.layers.build import BuildContext
from quintet.layers.decoder import CausalLM, DecoderTrunk, PreNormBlock
from quintet.layers.linear import LMHead
from quintet.layers.mlp import GatedMLP
from quintet.layers.moe.moe import MoE, MoESizes, unstacked
from quintet.layers.ssm.mamba import Mamba1, Mamba1Sizes
from quintet.layers.ssm.short_conv import check_silu

RENAMED = {
    ".mamba.": ".self_attn.",
    ".pre_ff_layernorm.": ".post_attention_layernorm.",
    ".feed_forward.router.": ".mlp.gate.",
    ".feed_forward.": ".mlp.",
    ".final_layernorm.": ".norm.",
}


class JambaForCausalLM(CausalLM):
    """Pre-norm blocks; the weights of a token's experts are those of all, not made to add up."""

    renamed_tensors = RENAMED
    unstacked = staticmethod(unstacked)

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(build)
        check_silu(config)
        shape = Mamba1Sizes(
            hidden=config.hidden_size,
            inner=config.mamba_expand * config.hidden_size,
            state=config.mamba_d_state,
            dt_rank=config.mamba_dt_rank,
            conv_kernel=config.mamba_d_conv,
            conv_bias=config.mamba_conv_bias,
            bias=config.mamba_proj_bias,
            norm_eps=config.rms_norm_eps,
        )
        mixture = MoESizes(
            hidden=config.hidden_size,
            width=config.intermediate_size,
            experts=config.num_experts,
            top_k=config.num_experts_per_tok,
            activation=config.hidden_act,
            renormalize=False,
        )

        def block(config: Any, build: BuildContext, index: int) -> PreNormBlock:
            mixer: nn.Module
            if config.layers_block_type[index] == "mamba":
                mixer = Mamba1(build, shape)
            else:
                mixer = SelfAttention(build, AttentionSizes.from_config(config), None)
            mlp: nn.Module
            if config.layers_num_experts[index] > 1:
                mlp = MoE(build, mixture)
            else:
                mlp = GatedMLP(build, config.hidden_size, config.intermediate_size, config.hidden_act)
            return PreNormBlock(config, build, mixer, mlp)

        self.model = DecoderTrunk(config, build, block)
        self.lm_head = LMHead.from_config(build, config)
