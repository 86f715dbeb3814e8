"""OLMo (Groeneveld et al. 2024): Llama with norms that learn nothing, and q, k and v clipped where trained so."""

from functools import partial
from typing import Any

from torch import nn

from quintet.layers.attention.attention import AttentionSizes, ClippedAttention
from quintet.layers.blocks import NamedTrunk, SerialBlock
from quintet.layers.build import BuildContext
from quintet.layers.decoder import CausalLM, head_source
from quintet.layers.embedding import VocabParallelEmbedding
from quintet.layers.linear import LMHead
from quintet.layers.mlp import GatedMLP
from quintet.layers.norm import LayerNorm
from quintet.layers.rope import Rotary

EPS = 1e-5  # of every norm


class OlmoForCausalLM(CausalLM):
    """Pre-norm blocks, rotary positions, a gated feed-forward."""

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(build)
        hidden, biased = config.hidden_size, config.attention_bias
        norm = partial(LayerNorm, build, hidden, EPS, ())
        rotary = Rotary.of(build, config)

        def block() -> SerialBlock:
            attention = ClippedAttention(build, AttentionSizes.of(config, bias=biased, output_bias=biased), rotary)
            attention.most = config.clip_qkv
            parts = {
                "input_layernorm": norm(),
                "self_attn": attention,
                "post_attention_layernorm": norm(),
                "mlp": GatedMLP(build, hidden, config.intermediate_size, config.hidden_act),
            }
            return SerialBlock(build, parts)

        parts = {
            "embed_tokens": VocabParallelEmbedding(build, config.vocab_size, hidden),
            "layers": nn.ModuleList(block() for _ in range(config.num_hidden_layers)),
            "norm": norm(),
        }
        self.model = NamedTrunk(build, parts)
        self.lm_head = LMHead(build, hidden, config.vocab_size, head_source(config))
