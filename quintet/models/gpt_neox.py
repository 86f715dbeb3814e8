"""GPT-NeoX and Pythia (Black et al. 2022; Biderman et al. 2023): both branches read the block's input."""

from functools import partial
from typing import Any

from torch import nn

from quintet.layers.attention.attention import AttentionSizes, SelfAttention
from quintet.layers.blocks import NamedParts, NamedTrunk, ParallelBlock, SerialBlock
from quintet.layers.build import BuildContext
from quintet.layers.decoder import CausalLM
from quintet.layers.embedding import VocabParallelEmbedding
from quintet.layers.linear import CheckpointLayout, LMHead
from quintet.layers.mlp import MLP
from quintet.layers.norm import LayerNorm
from quintet.layers.rope import Rotary


class GPTNeoXForCausalLM(CausalLM):
    """Parallel blocks or serial ones, part of each head turned, q, k and v of a head together."""

    trunk_name = "gpt_neox"
    # the causal mask, stored
    ignored_tensors = (*CausalLM.ignored_tensors, r"gpt_neox\.layers\.\d+\.attention\.(bias|masked_bias)")

    mlp_bias = True

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(build)
        hidden, bias = config.hidden_size, getattr(config, "attention_bias", False)
        norm = partial(LayerNorm, build, hidden, config.layer_norm_eps)
        rotary = Rotary.from_config(build, config, partial=True)
        stored = CheckpointLayout(fused="query_key_value", num_strips=config.num_attention_heads)
        names = "dense_h_to_4h", "dense_4h_to_h"
        kind = ParallelBlock if getattr(config, "use_parallel_residual", False) else SerialBlock

        def block(index: int) -> NamedParts:
            shape = AttentionSizes.from_config(
                config, kv_heads=config.num_attention_heads, bias=bias, output_bias=self._output_bias(config, index),
                output="dense", stored=stored,
            )  # fmt: skip
            parts = {
                "input_layernorm": norm(),
                "attention": SelfAttention(build, shape, rotary),
                "post_attention_layernorm": norm(),
                "mlp": MLP(build, (hidden, self._inner_size(config)), config.hidden_act, names, self.mlp_bias),
            }
            return kind(build, parts)

        parts = {
            "embed_in": VocabParallelEmbedding(build, config.vocab_size, hidden),
            "layers": nn.ModuleList(block(index) for index in range(config.num_hidden_layers)),
            "final_layer_norm": norm(),
        }
        self.gpt_neox = NamedTrunk(build, parts)
        self.lm_head = LMHead.from_config(build, config, "gpt_neox.embed_in")

    def _output_bias(self, config: Any, index: int) -> bool:
        """Returns whether a layer's attention has a bias behind its last product."""
        return bool(config.attention_bias)

    def _inner_size(self, config: Any) -> int:
        """Returns the features within a feed-forward."""
        return int(config.intermediate_size)

    @staticmethod
    def canonical(name: str) -> str:
        """Published checkpoints call the head embed_out."""
        return name.replace("embed_out.", "lm_head.") if name.startswith("embed_out.") else name
