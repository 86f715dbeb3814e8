"""Tiny models of transformers for PEFT to adapt, and random weights for what it adds."""

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedModel

VOCABULARY = 40


def llama_config(**settings: Any) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, attention_bias=True, mlp_bias=True, tie_word_embeddings=False, pad_token_id=0,
        max_position_embeddings=64, initializer_range=0.3, **settings,
    )  # fmt: skip


def causal_lm(**settings: Any) -> LlamaForCausalLM:
    """Random weights, the same each time."""
    torch.manual_seed(1)
    return LlamaForCausalLM(llama_config(**settings)).eval()


def sequence_classifier() -> LlamaForSequenceClassification:
    torch.manual_seed(1)
    return LlamaForSequenceClassification(llama_config(num_labels=3)).eval()


def randomize(model: PreTrainedModel) -> Any:
    """Gives what PEFT added random weights: an untrained adapter changes nothing. Returns the model."""
    torch.manual_seed(2)
    for name, parameter in model.named_parameters():
        if "lora_magnitude" in name:
            parameter.data *= 1 + 0.2 * torch.rand_like(parameter)
        elif "lora_" in name or "modules_to_save" in name or (parameter.requires_grad and name.endswith("bias")):
            parameter.data = 0.3 * torch.randn_like(parameter)
    return model.eval()
