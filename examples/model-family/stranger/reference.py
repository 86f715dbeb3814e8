"""The family on transformers' modules, for `quintet conformance` to compare with; it shares no code with model.py."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from stranger.model import StrangerConfig


class StrangerDecoderLayer(LlamaDecoderLayer):
    """Llama's layer with a vector behind each branch."""

    def __init__(self, config: StrangerConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.attention_scale = nn.Parameter(torch.ones(config.hidden_size))
        self.mlp_scale = nn.Parameter(torch.ones(config.hidden_size))

    def forward(self, hidden_states: Tensor, **arguments: Any) -> Tensor:
        attended, _ = self.self_attn(self.input_layernorm(hidden_states), **arguments)
        hidden_states = hidden_states + self.attention_scale * attended
        return hidden_states + self.mlp_scale * self.mlp(self.post_attention_layernorm(hidden_states))


class StrangerForCausalLM(LlamaForCausalLM):
    """Llama of these layers; save_pretrained() writes a checkpoint that quintet loads."""

    config_class = StrangerConfig

    def __init__(self, config: StrangerConfig) -> None:
        super().__init__(config)
        self.model.layers = nn.ModuleList(StrangerDecoderLayer(config, i) for i in range(config.num_hidden_layers))
