"""GLM-4-0414 and GLM-Z1 (Z.ai 2025): GLM with norms behind the branches too; text of GLM-4.1V and GLM-OCR."""

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
from quintet.models.deepseek_v3 import beyond

_BIASES = {"glm4v_text": True, "glm_ocr_text": False}  # of q, k and v, where config.json does not say


class Glm4ForCausalLM(CausalLM):
    """Norms around each branch, half of each head turned with neighbours paired, gate and up fused."""

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(build)
        rotary = Rotary.from_config(build, config, partial=True, interleaved=True)
        bias = _BIASES[config.model_type] if config.model_type in _BIASES else config.attention_bias
        norm = partial(RMSNorm, build, config.hidden_size, config.rms_norm_eps)

        def block(config: Any, build: BuildContext, index: int) -> BetweenNormsBlock:
            fused = CheckpointLayout(fused="gate_up_proj")
            parts = {
                "input_layernorm": norm(),
                "self_attn": SelfAttention(build, AttentionSizes.from_config(config, bias=bias), rotary),
                "post_self_attn_layernorm": norm(),
                "post_attention_layernorm": norm(),
                "mlp": GatedMLP(build, config.hidden_size, config.intermediate_size, config.hidden_act, stored=fused),
                "post_mlp_layernorm": norm(),
            }
            return BetweenNormsBlock(build, parts)

        self.ignored_tensors = (*CausalLM.ignored_tensors, beyond(config))
        self.model = DecoderTrunk(config, build, block)
        self.lm_head = LMHead.from_config(build, config)
