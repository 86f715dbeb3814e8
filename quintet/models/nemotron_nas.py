"""Llama Nemotron Super and Ultra (NVIDIA 2025): Llama with other heads and widths by layer, some without a branch."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from quintet.layers.attention.attention import AttentionSizes
from quintet.layers.build import BuildContext
from quintet.layers.layer_state import StepState
from quintet.layers.mlp import GatedMLP
from quintet.layers.norm import RMSNorm
from quintet.layers.rope import Rotary
from quintet.models.llama import LlamaForCausalLM

UNKNOWN = ("replace_with_linear", "sparsify", "window_length", "num_sink_tokens")  # of a branch, not computed here


class DeciLMDecoderLayer(nn.Module):
    """A pre-norm block of the branches that the layer has."""

    def __init__(self, config: Any, build: BuildContext, attention: nn.Module | None, mlp: nn.Module | None) -> None:
        super().__init__()
        self.self_attn, self.mlp = attention, mlp
        if attention is not None:
            self.input_layernorm = RMSNorm(build, config.hidden_size, config.rms_norm_eps)
        if mlp is not None:
            self.post_attention_layernorm = RMSNorm(build, config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, residual: Tensor | None, cache: StepState) -> tuple[Tensor, Tensor | None]:
        if self.self_attn is not None:
            x, residual = self.input_layernorm(x, residual)
            x = self.self_attn(x, cache)
        if self.mlp is not None:
            x, residual = self.post_attention_layernorm(x, residual)
            x = self.mlp(x)
        return x, residual


class DeciLMForCausalLM(LlamaForCausalLM):
    """Blocks by `block_configs`."""

    config_counts_layers = False  # some have no tensors

    def _block(self, config: Any, build: BuildContext, attention: nn.Module | None, mlp: nn.Module | None) -> nn.Module:
        return DeciLMDecoderLayer(config, build, attention, mlp)

    def _attention(self, config: Any, build: BuildContext, index: int, rotary: Rotary | None) -> Any:
        return None if _branch(config, index, "attention") is None else super()._attention(config, build, index, rotary)

    def _attention_sizes(self, config: Any, index: int) -> AttentionSizes:
        branch = _branch(config, index, "attention")
        assert branch is not None
        kv_heads, bias = config.num_attention_heads // branch["n_heads_in_group"], config.attention_bias
        return AttentionSizes.from_config(config, kv_heads=kv_heads, bias=bias, output_bias=bias)

    def _mlp(self, config: Any, build: BuildContext, index: int) -> Any:
        branch = _branch(config, index, "ffn")
        if branch is None:
            return None
        kind = branch.get("hidden_act") or config.hidden_act
        return GatedMLP(build, config.hidden_size, _width(config, branch), kind, config.mlp_bias)


def _branch(config: Any, index: int, name: str) -> Mapping[str, Any] | None:
    """Returns the entries of a layer's branch; None: the layer has none. ValueError names what is not computed."""
    branch: Mapping[str, Any] = config.block_configs[index][name]
    for entry in UNKNOWN:
        if branch.get(entry):
            raise ValueError(
                f"{config.model_type} with {entry}={branch[entry]!r} in block_configs[{index}].{name} is not supported"
            )
    return None if branch.get("no_op") else branch


def _width(config: Any, branch: Mapping[str, Any]) -> int:
    """Returns the features of a feed-forward: two thirds of a multiple of hidden_size, in steps of 256, or as given."""
    if (factor := branch.get("ffn_mult")) is None:
        return int(branch["intermediate_size"])
    return -(-int(2 * factor * config.hidden_size / 3) // 256) * 256
