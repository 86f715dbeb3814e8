"""BLOOM and BLOOMZ (Le Scao et al. 2022): ALiBi, a norm behind the embedding, q, k and v of a head together."""

from functools import partial
from typing import Any

from torch import nn

from quintet.layers.attention.attention import AttentionSizes, SelfAttention
from quintet.layers.blocks import NamedTrunk, SerialBlock, alibi_slopes
from quintet.layers.build import BuildContext
from quintet.layers.decoder import CausalLM, refuse
from quintet.layers.embedding import VocabParallelEmbedding
from quintet.layers.linear import CheckpointLayout, LMHead
from quintet.layers.mlp import MLP
from quintet.layers.norm import LayerNorm


class BloomForCausalLM(CausalLM):
    """Pre-norm blocks with biases; a head that is tied as a rule."""

    trunk_name = "transformer"

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(build)
        refuse(config, "apply_residual_connection_post_layernorm")
        hidden, heads = config.hidden_size, config.num_attention_heads
        norm = partial(LayerNorm, build, hidden, config.layer_norm_epsilon)
        stored = CheckpointLayout(fused="query_key_value", num_strips=heads)
        shape = AttentionSizes.from_config(
            config,
            kv_heads=heads,
            bias=True,
            output_bias=True,
            output="dense",
            stored=stored,
            alibi=alibi_slopes(heads),
        )

        def block() -> SerialBlock:
            parts = {
                "input_layernorm": norm(),
                "self_attention": SelfAttention(build, shape, None),
                "post_attention_layernorm": norm(),
                "mlp": MLP(build, (hidden, 4 * hidden), "gelu_new", ("dense_h_to_4h", "dense_4h_to_h")),
            }
            return SerialBlock(build, parts)

        parts = {
            "word_embeddings": VocabParallelEmbedding(build, config.vocab_size, hidden),
            "word_embeddings_layernorm": norm(),
            "h": nn.ModuleList(block() for _ in range(config.num_hidden_layers)),
            "ln_f": norm(),
        }
        self.transformer = NamedTrunk(build, parts)
        self.lm_head = LMHead.from_config(build, config, "transformer.word_embeddings")

    @staticmethod
    def canonical(name: str) -> str:
        """Checkpoints of the trunk alone have no prefix."""
        return name if name.startswith(("transformer.", "lm_head.")) else f"transformer.{name}"
