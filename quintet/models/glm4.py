"""GLM-4-0414 and GLM-Z1 (Z.ai 2025): GLM with norms behind the branches too."""

from functools import partial
from typing import Any

from quintet.layers.attention.attention import AttentionSizes, SelfAttention
from quintet.layers.blocks import BetweenNormsBlock
from quintet.layers.build import BuildContext
from quintet.layers.decoder import CausalLM, DecoderTrunk
from quintet.layers.linear import CheckpointLayout, LMHead
from quintet.layers.mlp import GatedMLP
from quintet.layers.norm import RMSNorm
from quintet.layers.rope import Rotary


class Glm4ForCausalLM(CausalLM):
    """Norms around each branch, half of each head turned with neighbours paired, gate and up fused."""

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(build)
        rotary = Rotary.from_config(build, config, partial=True, interleaved=True)
        norm = partial(RMSNorm, build, config.hidden_size, config.rms_norm_eps)

        def block(config: Any, build: BuildContext, index: int) -> BetweenNormsBlock:
            fused = CheckpointLayout(fused="gate_up_proj")
            parts = {
                "input_layernorm": norm(),
                "self_attn": SelfAttention(
                    build, AttentionSizes.from_config(config, bias=config.attention_bias), rotary
                ),
                "post_self_attn_layernorm": norm(),
                "post_attention_layernorm": norm(),
                "mlp": GatedMLP(build, config.hidden_size, config.intermediate_size, config.hidden_act, stored=fused),
                "post_mlp_layernorm": norm(),
            }
            return BetweenNormsBlock(build, parts)

        self.model = DecoderTrunk(config, build, block)
        self.lm_head = LMHead.from_config(build, config)
