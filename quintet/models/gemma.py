"""Gemma (Mesnard et al. 2024): Llama with norms that are kept around 0 and an embedding scaled by sqrt(hidden)."""

from functools import partial
from typing import Any

from torch import nn

from quintet.layers.attention.attention import AttentionSizes, SelfAttention
from quintet.layers.blocks import NamedTrunk, SerialBlock
from quintet.layers.build import BuildContext
from quintet.layers.decoder import CausalLM, head_source, refuse, rounded
from quintet.layers.embedding import VocabParallelEmbedding
from quintet.layers.linear import LMHead
from quintet.layers.mlp import GatedMLP
from quintet.layers.norm import RMSNorm
from quintet.layers.rope import Rotary


class GemmaForCausalLM(CausalLM):
    """Pre-norm blocks, rotary positions, a feed-forward gated by gelu."""

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(build)
        refuse(config, "use_bidirectional_attention")
        hidden, biased = config.hidden_size, config.attention_bias
        rotary = Rotary.of(build, config)
        norm = partial(RMSNorm, build, hidden, config.rms_norm_eps, offset=1.0)

        def block() -> SerialBlock:
            shape = AttentionSizes.of(config, bias=biased, output_bias=biased)
            parts = {
                "input_layernorm": norm(),
                "self_attn": SelfAttention(build, shape, rotary),
                "post_attention_layernorm": norm(),
                "mlp": GatedMLP(build, hidden, config.intermediate_size, config.hidden_act),
            }
            return SerialBlock(build, parts)

        parts = {
            "embed_tokens": VocabParallelEmbedding(build, config.vocab_size, hidden),
            "layers": nn.ModuleList(block() for _ in range(config.num_hidden_layers)),
            "norm": norm(),
        }
        self.model = NamedTrunk(build, parts, rounded(hidden**0.5, build.dtype))
        self.lm_head = LMHead(build, hidden, config.vocab_size, head_source(config))
