"""Baichuan 1 and 2 (Baichuan 2023): Llama with q, k and v in one; the 13B models have ALiBi instead of a rotation."""

from collections.abc import Mapping
from typing import Any

from quintet.layers.attention.attention import AttentionSizes
from quintet.layers.blocks import slopes
from quintet.layers.build import BuildContext
from quintet.layers.linear import CheckpointLayout
from quintet.layers.normalised_weights import by_row, normalised
from quintet.models.llama import LlamaForCausalLM


class BaichuanForCausalLM(LlamaForCausalLM):
    """Llama's blocks; in Baichuan 2, each token's row of the head has length 1."""

    def __init__(self, config: Any, build: BuildContext) -> None:
        alibi = slopes(config.num_attention_heads) if config.alibi else None
        shape = AttentionSizes.of(config, stored=CheckpointLayout(fused="W_pack"), alibi=alibi)
        super().__init__(config, build, shape)
        self._normalised = config.normalised_head

    def gathered(self, entries: Mapping[str, Any]) -> Mapping[str, Any]:
        return normalised(entries, by_row) if self._normalised else entries
