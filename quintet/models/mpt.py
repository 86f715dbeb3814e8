"""MPT (MosaicML 2023): ALiBi, no biases, q, k and v in one, clipped where trained so."""

from functools import partial
from typing import Any

from torch import nn

from quintet.layers.attention.attention import AttentionSizes, ClippedAttention
from quintet.layers.blocks import NamedTrunk, SerialBlock, alibi_slopes
from quintet.layers.build import BuildContext
from quintet.layers.decoder import CausalLM, refuse
from quintet.layers.embedding import VocabParallelEmbedding
from quintet.layers.linear import CheckpointLayout, LMHead
from quintet.layers.mlp import MLP
from quintet.layers.norm import LayerNorm


class MptForCausalLM(CausalLM):
    """Pre-norm blocks; a head that is tied as a rule."""

    trunk_name = "transformer"

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(build)
        _refuse(config)
        hidden, heads, attn_config = config.hidden_size, config.num_attention_heads, config.attn_config
        norm = partial(LayerNorm, build, hidden, config.layer_norm_epsilon, ("weight",))
        stored = CheckpointLayout(fused="Wqkv")
        shape = AttentionSizes.from_config(
            config,
            kv_heads=heads,
            scale=attn_config.softmax_scale,
            output="out_proj",
            stored=stored,
            alibi=alibi_slopes(heads),
        )

        def block() -> SerialBlock:
            attention = ClippedAttention(build, shape, None)
            attention.clip_qkv = attn_config.clip_qkv
            mlp = MLP(build, (hidden, 4 * hidden), "gelu", ("up_proj", "down_proj"), bias=False)
            return SerialBlock(build, {"norm_1": norm(), "attn": attention, "norm_2": norm(), "ffn": mlp})

        parts = {
            "wte": VocabParallelEmbedding(build, config.vocab_size, hidden),
            "blocks": nn.ModuleList(block() for _ in range(config.num_hidden_layers)),
            "norm_f": norm(),
        }
        self.transformer = NamedTrunk(build, parts)
        self.lm_head = LMHead.from_config(build, config, "transformer.wte")


def _refuse(config: Any) -> None:
    """ValueError for what MPT's own code knows and transformers' does not compute."""
    attn_config = config.attn_config
    refuse(config, "logit_scale")
    for name, plain in (("alibi", True), ("alibi_bias_max", 8), ("attn_type", "multihead_attention")):
        if getattr(attn_config, name) != plain:
            raise ValueError(f"mpt with attn_config.{name}={getattr(attn_config, name)!r} is not supported")
    refuse(attn_config, "qk_ln", "prefix_lm")
    if not config.no_bias or config.expansion_ratio != 4:
        raise ValueError("mpt with no_bias=False, or an expansion_ratio other than 4, is not supported")
