"""BioGPT (Luo et al. 2022): learned positions, LayerNorm, biases."""

import math
from functools import partial
from typing import Any

from torch import nn

from quintet.layers.attention.attention import AttentionSizes, SelfAttention
from quintet.layers.blocks import NamedTrunk, SerialBlock
from quintet.layers.build import BuildContext
from quintet.layers.decoder import CausalLM
from quintet.layers.embedding import PositionEmbedding, VocabParallelEmbedding
from quintet.layers.linear import LMHead
from quintet.layers.mlp import MLP
from quintet.layers.norm import LayerNorm
from quintet.models.xglm import EPS, FIRST_ROW, RENAMED


class BioGptForCausalLM(CausalLM):
    """Pre-norm blocks; a head that is tied as a rule."""

    trunk_name = "biogpt"
    renamed_tensors = {**RENAMED, "output_projection.": "lm_head."}

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(build)
        hidden = config.hidden_size
        norm = partial(LayerNorm, build, hidden, EPS)
        heads = config.num_attention_heads
        shape = AttentionSizes.from_config(config, kv_heads=heads, bias=True, output_bias=True, output="out_proj")

        def block() -> SerialBlock:
            mlp = MLP(build, (hidden, config.intermediate_size), config.hidden_act, ("fc1", "fc2"))
            attention = SelfAttention(build, shape, None)
            parts = {"self_attn_layer_norm": norm(), "self_attn": attention, "final_layer_norm": norm(), "mlp": mlp}
            return SerialBlock(build, parts)

        parts = {
            "embed_tokens": VocabParallelEmbedding(build, config.vocab_size, hidden),
            "embed_positions": PositionEmbedding(build, config.max_position_embeddings, hidden, FIRST_ROW),
            "layers": nn.ModuleList(block() for _ in range(config.num_hidden_layers)),
            "layer_norm": norm(),
        }
        self.biogpt = NamedTrunk(build, parts, math.sqrt(hidden) if config.scale_embedding else 1.0)
        self.lm_head = LMHead.from_config(build, config, "biogpt.embed_tokens")
