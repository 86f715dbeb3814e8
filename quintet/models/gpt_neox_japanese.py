"""GPT-NeoX Japanese (ABEJA 2022): GPT-NeoX's serial blocks, with one bias, in the last layer's attention."""

from typing import Any

from quintet.models.gpt_neox import GPTNeoXForCausalLM


class GPTNeoXJapaneseForCausalLM(GPTNeoXForCausalLM):
    """Serial blocks; the feed-forward's size is a multiple of the hidden size."""

    mlp_bias = False

    def _output_bias(self, config: Any, index: int) -> bool:
        return index == config.num_hidden_layers - 1

    def _inner_size(self, config: Any) -> int:
        return int(config.hidden_size * config.intermediate_multiple_size)

    @staticmethod
    def canonical(name: str) -> str:
        own = name.replace("gpt_neox_japanese.", "gpt_neox.", 1).replace(".dense_bias", ".dense.bias")
        return GPTNeoXForCausalLM.canonical(own)
