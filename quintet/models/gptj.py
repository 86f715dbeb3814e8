"""GPT-J 6B (Wang and Komatsuzaki 2021): both branches read one norm, neighbours turned in part of each head."""

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


class GPTJForCausalLM(CausalLM):
    """Parallel blocks; biases in the feed-forward and the head."""

    trunk_name = "transformer"
    # the causal mask, stored
    ignored_tensors = (*CausalLM.ignored_tensors, r"transformer\.h\.\d+\.attn\.(bias|masked_bias|causal_mask)")

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(build)
        hidden = config.hidden_size
        norm = partial(LayerNorm, build, hidden, config.layer_norm_epsilon)
        rotary = _rotary(config, build)

        def block() -> ParallelBlock:
            sizes = hidden, config.n_inner or 4 * hidden
            mlp = MLP(build, sizes, config.activation_function, ("fc_in", "fc_out"))
            attention = SelfAttention(build, self._heads(config), rotary)
            return ParallelBlock(build, {"ln_1": norm(), "attn": attention, "mlp": mlp})

        parts = {
            "wte": VocabParallelEmbedding(build, config.vocab_size, hidden),
            "h": nn.ModuleList(block() for _ in range(config.num_hidden_layers)),
            "ln_f": norm(),
        }
        self.transformer = NamedTrunk(build, parts)
        self.lm_head = LMHead.from_config(build, config, "transformer.wte", bias=True)

    def _heads(self, config: Any) -> AttentionSizes:
        return AttentionSizes.from_config(config, kv_heads=config.num_attention_heads, output="out_proj")


def _rotary(config: Any, build: BuildContext) -> Rotary:
    """Rotary positions for the first rotary_dim features."""
    size = head_dim(config)
    if not config.rotary_dim or config.rotary_dim % 2 or config.rotary_dim > size:
        raise ValueError(f"{config.model_type} with rotary_dim={config.rotary_dim} of {size} is not supported")
    factor = (config.rotary_dim + 0.5) / size  # half a feature more, which rounding down takes off again
    parameters = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": min(factor, 1.0)}
    return Rotary(build, size, parameters, config.max_position_embeddings, partial=True, interleaved=True)
