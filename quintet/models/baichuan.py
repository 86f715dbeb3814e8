"""Baichuan 1 and 2 (Baichuan 2023): Llama with q, k and v in one; the 13B models have ALiBi instead of a rotation."""

from collections.abc import Mapping
from typing import Any

from quintet.layers.attention.attention import AttentionSizes
from quintet.layers.blocks import alibi_slopes
from quintet.layers.build import BuildContext
from quintet.layers.linear import CheckpointLayout
from quintet.layers.rope import Rotary
from quintet.layers.weight_transform import normalise_head, normalise_rows
from quintet.models.llama import LlamaForCausalLM


class BaichuanForCausalLM(LlamaForCausalLM):
    """Llama's blocks; in Baichuan 2, each token's row of the head has length 1."""

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(config, build)
        self._normalised = config.normalised_head

    def _rotary(self, config: Any, build: BuildContext) -> Rotary | None:
        return None if config.alibi else super()._rotary(config, build)

    def _attention_sizes(self, config: Any, index: int) -> AttentionSizes:
        alibi = alibi_slopes(config.num_attention_heads) if config.alibi else None
        return AttentionSizes.from_config(config, stored=CheckpointLayout(fused="W_pack"), alibi=alibi)

    def gathered(self, entries: Mapping[str, Any]) -> Mapping[str, Any]:
        return normalise_head(entries, normalise_rows) if self._normalised else entries
