"""Falcon (Almazrouei et al. 2023): parallel blocks, one KV head or few, rotary positions or (RW) ALiBi."""

from functools import partial
from typing import Any

from torch import nn

from quintet.layers.attention.attention import AttentionSizes, SelfAttention
from quintet.layers.blocks import NamedParts, NamedTrunk, ParallelBlock, SerialBlock, alibi_slopes
from quintet.layers.build import BuildContext
from quintet.layers.decoder import CausalLM
from quintet.layers.embedding import VocabParallelEmbedding
from quintet.layers.linear import CheckpointLayout, LMHead
from quintet.layers.mlp import MLP
from quintet.layers.norm import LayerNorm
from quintet.layers.rope import Rotary


class FalconForCausalLM(CausalLM):
    """Each branch of 40B and 180B has its own norm, and KV heads stand beside their queries in those checkpoints."""

    trunk_name = "transformer"

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(build)
        if config.new_decoder_architecture and not config.parallel_attn:
            raise ValueError("falcon with new_decoder_architecture and without parallel_attn is not supported")
        hidden = config.hidden_size
        norm = partial(LayerNorm, build, hidden, config.layer_norm_epsilon)
        rotary = None if config.alibi else Rotary.from_config(build, config)
        shape, two = _heads(config), config.new_decoder_architecture and config.num_ln_in_parallel_attn != 1
        names = "dense_h_to_4h", "dense_4h_to_h"

        def block() -> NamedParts:
            attention = {"self_attention": SelfAttention(build, shape, rotary)}
            mlp = {"mlp": MLP(build, (hidden, config.ffn_hidden_size), config.activation, names, config.bias)}
            if two:
                return ParallelBlock(build, {"ln_attn": norm(), **attention, "ln_mlp": norm(), **mlp})
            if config.parallel_attn:
                return ParallelBlock(build, {"input_layernorm": norm(), **attention, **mlp})
            between = {"post_attention_layernorm": norm()}
            return SerialBlock(build, {"input_layernorm": norm(), **attention, **between, **mlp})

        parts = {
            "word_embeddings": VocabParallelEmbedding(build, config.vocab_size, hidden),
            "h": nn.ModuleList(block() for _ in range(config.num_hidden_layers)),
            "ln_f": norm(),
        }
        self.transformer = NamedTrunk(build, parts)
        self.lm_head = LMHead.from_config(build, config, "transformer.word_embeddings")


def _heads(config: Any) -> AttentionSizes:
    """Slopes are added before the scores are scaled, unlike Bloom's."""
    heads, size = config.num_attention_heads, config.head_dim
    kv_heads = config.num_kv_heads if config.new_decoder_architecture else 1 if config.multi_query else heads
    return AttentionSizes(
        hidden=config.hidden_size,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=size,
        alibi=tuple(slope * size**-0.5 for slope in alibi_slopes(heads)) if config.alibi else None,
        bias=config.bias,
        output_bias=config.bias,
        output="dense",
        stored=CheckpointLayout(fused="query_key_value", num_strips=kv_heads),
    )
