"""SantaCoder and StarCoder (Li et al. 2023): GPT-2 with one KV head for all queries."""

from functools import partial
from typing import Any

from torch import nn

from quintet.layers.attention.attention import AttentionSizes, SelfAttention
from quintet.layers.blocks import NamedTrunk, SerialBlock
from quintet.layers.build import BuildContext
from quintet.layers.decoder import CausalLM, refuse
from quintet.layers.embedding import PositionEmbedding, VocabParallelEmbedding
from quintet.layers.linear import CheckpointLayout, LMHead
from quintet.layers.mlp import MLP
from quintet.layers.norm import LayerNorm


class GPTBigCodeForCausalLM(CausalLM):
    """Learned positions, LayerNorm, biases; a head that is tied as a rule."""

    trunk_name = "transformer"
    # the causal mask, stored
    ignored_tensors = (*CausalLM.ignored_tensors, r"transformer\.h\.\d+\.attn\.(bias|masked_bias)")

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(build)
        refuse(config, "add_cross_attention")
        hidden, heads = config.hidden_size, config.num_attention_heads
        norm = partial(LayerNorm, build, hidden, config.layer_norm_epsilon)
        shape = AttentionSizes.from_config(
            config,
            kv_heads=1 if config.multi_query else heads,
            scale=None if config.scale_attn_weights else 1.0,
            bias=True,
            output_bias=True,
            output="c_proj",
            stored=CheckpointLayout(fused="c_attn", num_strips=1 if config.multi_query else heads),
        )

        def block() -> SerialBlock:
            sizes = hidden, config.n_inner or 4 * hidden
            mlp = MLP(build, sizes, config.activation_function, ("c_fc", "c_proj"))
            attention = SelfAttention(build, shape, None)
            return SerialBlock(build, {"ln_1": norm(), "attn": attention, "ln_2": norm(), "mlp": mlp})

        parts = {
            "wte": VocabParallelEmbedding(build, config.vocab_size, hidden),
            "wpe": PositionEmbedding(build, config.max_position_embeddings, hidden),
            "h": nn.ModuleList(block() for _ in range(config.num_hidden_layers)),
            "ln_f": norm(),
        }
        self.transformer = NamedTrunk(build, parts)
        self.lm_head = LMHead.from_config(build, config, "transformer.wte")
