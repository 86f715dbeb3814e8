"""Qwen3-Next and Qwen3.5 (Yang et al. 2025): gated delta nets and, in some layers, gated attention; experts."""

from typing import Any

from torch import nn

from quintet.layers.attention.attention import AttentionSizes
from quintet.layers.build import BuildContext
from quintet.layers.decoder import CausalLM, DecoderTrunk, PreNormBlock
from quintet.layers.linear import LMHead
from quintet.layers.mlp import GatedMLP
from quintet.layers.moe.moe import SharedMoE, unstacked
from quintet.layers.norm import RMSNorm
from quintet.layers.rope import Rotary
from quintet.layers.ssm.delta_net import QWEN3_5, DeltaNet, DeltaNetSizes, GatedAttention
from quintet.layers.ssm.short_conv import check_silu
from quintet.models.qwen3_moe import mixes, mixture

RENAMED = {".linear_attn.": ".self_attn."}


class Qwen3NextForCausalLM(CausalLM):
    """Pre-norm blocks, norms kept around 0, a part of each head turned."""

    renamed_tensors = RENAMED
    unstacked = staticmethod(unstacked)
    ignored_tensors = (*CausalLM.ignored_tensors, r"mtp\..*")

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(build)
        rotary = Rotary.from_config(build, config, partial=True)

        def block(config: Any, build: BuildContext, index: int) -> PreNormBlock:
            mixer: nn.Module
            if config.layer_types[index] == "linear_attention":
                mixer = DeltaNet(build, deltas(config), None if config.model_type == "qwen3_next" else QWEN3_5)
            else:
                mixer = attention(config, build, rotary)
            mlp: nn.Module
            if hasattr(config, "num_experts") and mixes(config, index):
                mlp = SharedMoE(build, mixture(config), config.shared_expert_intermediate_size)
            else:
                mlp = GatedMLP(build, config.hidden_size, config.intermediate_size, config.hidden_act)
            return PreNormBlock(config, build, mixer, mlp, norm_offset=1.0)

        norm = RMSNorm(build, config.hidden_size, config.rms_norm_eps, 1.0)
        self.model = DecoderTrunk(config, build, block, norm=norm)
        self.lm_head = LMHead.from_config(build, config)


def deltas(config: Any) -> DeltaNetSizes:
    """The sizes of a delta net."""
    check_silu(config)
    return DeltaNetSizes(
        hidden=config.hidden_size,
        key_heads=config.linear_num_key_heads,
        heads=config.linear_num_value_heads,
        key_dim=config.linear_key_head_dim,
        value_dim=config.linear_value_head_dim,
        conv_kernel=config.linear_conv_kernel_dim,
        eps=config.rms_norm_eps,
    )


def attention(config: Any, build: BuildContext, rotary: Rotary) -> GatedAttention:
    """Builds gated attention with norms on the heads of q and k."""
    bias = config.attention_bias
    made = GatedAttention(build, AttentionSizes.from_config(config, bias=bias, output_bias=bias), rotary)
    made.q_norm = RMSNorm(build, config.head_dim, config.rms_norm_eps, 1.0)
    made.k_norm = RMSNorm(build, config.head_dim, config.rms_norm_eps, 1.0)
    return made
