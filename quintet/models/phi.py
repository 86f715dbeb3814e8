"""Phi-1, Phi-1.5 and Phi-2 (Gunasekar et al. 2023): both branches from one LayerNorm, biases throughout."""

from functools import partial
from typing import Any

from torch import nn

from quintet.layers.attention.attention import AttentionSizes, SelfAttention
from quintet.layers.blocks import NamedTrunk, ParallelBlock
from quintet.layers.build import BuildContext
from quintet.layers.decoder import CausalLM
from quintet.layers.embedding import VocabParallelEmbedding
from quintet.layers.linear import LMHead
from quintet.layers.mlp import MLP
from quintet.layers.norm import LayerNorm
from quintet.layers.rope import Rotary, head_dim

RENAMED = {".q_layernorm.": ".q_norm.", ".k_layernorm.": ".k_norm."}


class PhiForCausalLM(CausalLM):
    """Parallel blocks, part of each head turned; q and k of each head normalised where the checkpoint says so."""

    renamed_tensors = RENAMED

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(build)
        hidden, eps = config.hidden_size, config.layer_norm_eps
        rotary = Rotary.from_config(build, config, partial=True)
        norm = partial(LayerNorm, build, hidden, eps)

        def block() -> ParallelBlock:
            attention = SelfAttention(
                build, AttentionSizes.from_config(config, bias=True, output_bias=True, output="dense"), rotary
            )
            if config.qk_layernorm:
                attention.q_norm = LayerNorm(build, head_dim(config), eps)
                attention.k_norm = LayerNorm(build, head_dim(config), eps)
            mlp = MLP(build, (hidden, config.intermediate_size), config.hidden_act, ("fc1", "fc2"))
            return ParallelBlock(build, {"input_layernorm": norm(), "self_attn": attention, "mlp": mlp})

        parts = {
            "embed_tokens": VocabParallelEmbedding(build, config.vocab_size, hidden),
            "layers": nn.ModuleList(block() for _ in range(config.num_hidden_layers)),
            "final_layernorm": norm(),
        }
        self.model = NamedTrunk(build, parts)
        self.lm_head = LMHead.from_config(build, config, bias=True)
