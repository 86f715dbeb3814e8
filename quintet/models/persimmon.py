"""Persimmon 8B (Adept 2023): q, k and v of a head side by side, q and k normalised, squared relu."""

from functools import partial
from typing import Any

from torch import nn

from quintet.layers.attention.attention import AttentionSizes, SelfAttention
from quintet.layers.blocks import NamedTrunk, SerialBlock
from quintet.layers.build import BuildContext
from quintet.layers.decoder import CausalLM
from quintet.layers.embedding import VocabParallelEmbedding
from quintet.layers.linear import CheckpointLayout, LMHead
from quintet.layers.mlp import MLP
from quintet.layers.norm import LayerNorm
from quintet.layers.rope import Rotary, head_dim

RENAMED = {".q_layernorm.": ".q_norm.", ".k_layernorm.": ".k_norm."}


class PersimmonForCausalLM(CausalLM):
    """Pre-norm blocks with biases, half of each head turned."""

    renamed_tensors = RENAMED

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(build)
        hidden, eps = config.hidden_size, config.layer_norm_eps
        norm = partial(LayerNorm, build, hidden, eps)
        rotary = Rotary.from_config(build, config, partial=True)
        stored = CheckpointLayout(fused="query_key_value", num_strips=config.num_attention_heads)
        names = "dense_h_to_4h", "dense_4h_to_h"

        def block() -> SerialBlock:
            shape = AttentionSizes.from_config(
                config, kv_heads=config.num_attention_heads, bias=True, output_bias=True, output="dense", stored=stored
            )
            attention = SelfAttention(build, shape, rotary)
            if config.qk_layernorm:
                attention.q_norm = LayerNorm(build, head_dim(config), eps)
                attention.k_norm = LayerNorm(build, head_dim(config), eps)
            parts = {
                "input_layernorm": norm(),
                "self_attn": attention,
                "post_attention_layernorm": norm(),
                "mlp": MLP(build, (hidden, config.intermediate_size), config.hidden_act, names),
            }
            return SerialBlock(build, parts)

        parts = {
            "embed_tokens": VocabParallelEmbedding(build, config.vocab_size, hidden),
            "layers": nn.ModuleList(block() for _ in range(config.num_hidden_layers)),
            "final_layernorm": norm(),
        }
        self.model = NamedTrunk(build, parts)
        self.lm_head = LMHead.from_config(build, config)
