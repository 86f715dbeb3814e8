"""GPT-Neo (Black et al. 2021): learned positions, scores that are not scaled, windows in every other layer."""

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

RENAMED = {".attn.attention.": ".attn."}


class GPTNeoForCausalLM(CausalLM):
    """Pre-norm blocks; a head that is tied as a rule."""

    renamed_tensors = RENAMED
    trunk_name = "transformer"
    # the causal mask, stored
    ignored_tensors = (*CausalLM.ignored_tensors, r"transformer\.h\.\d+\.attn\.(bias|masked_bias)")

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(build)
        hidden = config.hidden_size
        norm = partial(LayerNorm, build, hidden, config.layer_norm_epsilon)

        def block(kind: str) -> SerialBlock:
            window = config.window_size if kind == "local" else None
            shape = AttentionSizes.from_config(
                config,
                kv_heads=config.num_attention_heads,
                scale=1.0,
                window=window,
                output_bias=True,
                output="out_proj",
            )
            sizes = hidden, config.intermediate_size or 4 * hidden
            mlp = MLP(build, sizes, config.activation_function, ("c_fc", "c_proj"))
            attention = SelfAttention(build, shape, None)
            return SerialBlock(build, {"ln_1": norm(), "attn": attention, "ln_2": norm(), "mlp": mlp})

        parts = {
            "wte": VocabParallelEmbedding(build, config.vocab_size, hidden),
            "wpe": PositionEmbedding(build, config.max_position_embeddings, hidden),
            "h": nn.ModuleList(block(kind) for kind in config.attention_layers),
            "ln_f": norm(),
        }
        self.transformer = NamedTrunk(build, parts)
        self.lm_head = LMHead.from_config(build, config, "transformer.wte")
