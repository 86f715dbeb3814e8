"""XGLM (Lin et al. 2021): sinusoidal positions, which are not learned, LayerNorm, biases."""

import math
from functools import partial
from typing import Any

from torch import nn

from quintet.layers.attention.attention import AttentionSizes, SelfAttention
from quintet.layers.blocks import NamedTrunk, SerialBlock
from quintet.layers.build import BuildContext
from quintet.layers.decoder import CausalLM, refuse
from quintet.layers.embedding import SinusoidalPositionEmbedding, VocabParallelEmbedding
from quintet.layers.linear import LMHead
from quintet.layers.mlp import MLP
from quintet.layers.norm import LayerNorm

# the feed-forward has no module of its own
RENAMED = {".fc1.": ".mlp.fc1.", ".fc2.": ".mlp.fc2."}

EPS = 1e-5  # of every norm
FIRST_ROW = 2  # of the position table; the rows before it are never looked up


class XGLMForCausalLM(CausalLM):
    """Pre-norm blocks; a head that is tied as a rule."""

    renamed_tensors = RENAMED

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(build)
        refuse(config, "add_cross_attention")
        hidden = config.d_model
        norm = partial(LayerNorm, build, hidden, EPS)
        shape = AttentionSizes.from_config(config, bias=True, output_bias=True, output="out_proj")

        def block() -> SerialBlock:
            mlp = MLP(build, (hidden, config.ffn_dim), config.activation_function, ("fc1", "fc2"))
            attention = SelfAttention(build, shape, None)
            parts = {"self_attn_layer_norm": norm(), "self_attn": attention, "final_layer_norm": norm(), "mlp": mlp}
            return SerialBlock(build, parts)

        parts = {
            "embed_tokens": VocabParallelEmbedding(build, config.vocab_size, hidden),
            "embed_positions": SinusoidalPositionEmbedding(build, config.max_position_embeddings, hidden, FIRST_ROW),
            "layers": nn.ModuleList(block() for _ in range(config.num_layers)),
            "layer_norm": norm(),
        }
        self.model = NamedTrunk(build, parts, math.sqrt(hidden) if config.scale_embedding else 1.0)
        self.lm_head = LMHead.from_config(build, config)
