"""TeleChat 2 (TeleAI 2024): Llama with k and v of each head in one tensor, and biases behind the branches."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from quintet.layers.attention.attention import AttentionSizes
from quintet.layers.build import BuildContext
from quintet.layers.decoder import refuse
from quintet.layers.encoder import gated_mlp
from quintet.layers.weight_transform import TransformedTensor
from quintet.models.llama import LlamaForCausalLM

KEYS_AND_VALUES = ".self_attn.key_value.weight"
RENAMED = {
    "transformer.h.": "model.layers.",
    "transformer.word_embeddings.": "model.embed_tokens.",
    "transformer.ln_f.": "model.norm.",
    ".self_attention.query.": ".self_attn.q_proj.",
    ".self_attention.dense.": ".self_attn.o_proj.",
    ".self_attention.": ".self_attn.",
}


class TeleChat2ForCausalLM(LlamaForCausalLM):
    """Pre-norm blocks; what each branch gives has a bias, what goes into it has none."""

    renamed_tensors = RENAMED

    def __init__(self, config: Any, build: BuildContext) -> None:
        refuse(config, "embed_layernorm", "apply_residual_connection_post_layernorm")
        super().__init__(config, build)
        self._kv_heads = config.num_key_value_heads

    def _attention_sizes(self, config: Any, index: int) -> AttentionSizes:
        return AttentionSizes.from_config(config, output_bias=True)

    def _mlp(self, config: Any, build: BuildContext, index: int) -> nn.Module:
        return gated_mlp(config, build, config.hidden_act, (False, True))

    def gathered(self, entries: Mapping[str, Any]) -> Mapping[str, Any]:
        """With the keys' rows and the values' apart, which stand head by head."""
        found = {}
        for name, entry in entries.items():
            if not name.endswith(KEYS_AND_VALUES):
                found[name] = entry
                continue
            rows, width = entry.shape
            for half, projection in enumerate(("k_proj", "v_proj")):
                apart = TransformedTensor(entry, self._half(half), new_shape=(rows // 2, width))
                found[name.replace(".key_value.", f".{projection}.")] = apart
        return found

    def _half(self, half: int) -> Callable[[Tensor], Tensor]:
        return lambda both: both.unflatten(0, (self._kv_heads, 2, -1))[:, half].flatten(0, 1)
