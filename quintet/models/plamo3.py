"""Plamo 3 (Preferred Networks 2025): attention in windows, in every eighth layer to all; norms around each branch."""

from typing import Any

from quintet.layers.attention.attention import AttentionSizes, SelfAttention
from quintet.layers.build import BuildContext
from quintet.layers.decoder import CausalLM, DecoderTrunk, layer_window, refuse
from quintet.layers.linear import CheckpointLayout, LMHead
from quintet.layers.norm import RMSNorm
from quintet.layers.rope import Rotary
from quintet.models.plamo2 import Plamo2DecoderLayer


class Plamo3ForCausalLM(CausalLM):
    """Plamo 2's blocks with QK-norm; positions turn by another base in windows."""

    renamed_tensors = {"model.layers.layers.": "model.layers."}

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(build)
        refuse(config, "scale_embedding", "attention_bias")
        rotaries = {
            kind: Rotary(build, config.head_dim, config.rope_parameters[kind], config.max_position_embeddings)
            for kind in sorted(set(config.layer_types))
        }

        def block(config: Any, build: BuildContext, index: int) -> Plamo2DecoderLayer:
            stored, window = CheckpointLayout(fused="qkv_proj"), layer_window(config, index)
            shape = AttentionSizes.from_config(config, window=window, stored=stored)
            attention = SelfAttention(build, shape, rotaries[config.layer_types[index]])
            attention.q_norm = RMSNorm(build, config.head_dim, config.rms_norm_eps, offset=1.0)
            attention.k_norm = RMSNorm(build, config.head_dim, config.rms_norm_eps, offset=1.0)
            return Plamo2DecoderLayer(config, build, attention)

        norm = RMSNorm(build, config.hidden_size, config.rms_norm_eps, offset=1.0)
        self.model = DecoderTrunk(config, build, block, norm=norm)
        self.lm_head = LMHead.from_config(build, config)
