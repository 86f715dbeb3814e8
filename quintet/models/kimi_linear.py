"""Kimi Linear (Kimi Team 2025): Kimi Delta Attention and, in some layers, latent attention without positions."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from quintet.layers.attention.mla import LatentAttention, MLASizes
from quintet.layers.build import BuildContext
from quintet.layers.decoder import require
from quintet.layers.moe.moe import MoE, unstacked
from quintet.layers.rope import Rotary
from quintet.layers.ssm.kimi_delta import KimiDeltaAttention, KimiDeltaSizes
from quintet.layers.ssm.short_conv import check_silu
from quintet.models.deepseek_v3 import dense, grouped
from quintet.models.llama import LlamaForCausalLM
from quintet.models.mixtral import MixtralForCausalLM

# entries of Moonshot's own code that transformers does not read -> what its classes compute
COMPUTED = {"mla_use_nope": True, "moe_router_activation_func": "sigmoid", "moe_layer_freq": 1}


class KimiLinearForCausalLM(LlamaForCausalLM):
    """Pre-norm blocks; the first have one feed-forward, the others experts as DeepSeek-V3's."""

    def __init__(self, config: Any, build: BuildContext) -> None:
        require(config, COMPUTED)
        check_silu(config)
        super().__init__(config, build)

    def _rotary(self, config: Any, build: BuildContext) -> Rotary | None:
        return None

    def _attention(self, config: Any, build: BuildContext, index: int, rotary: Rotary | None) -> nn.Module:
        if config.layer_types[index] == "full_attention":
            return LatentAttention(build, MLASizes.from_config(config), None)
        heads, dim = config.linear_num_heads, config.linear_head_dim
        sizes = KimiDeltaSizes(config.hidden_size, heads, dim, config.linear_conv_kernel_dim, config.rms_norm_eps)
        return KimiDeltaAttention(build, sizes)

    def _mlp(self, config: Any, build: BuildContext, index: int) -> nn.Module:
        return super()._mlp(config, build, index) if dense(config, index) else MoE(build, grouped(config))

    @staticmethod
    def canonical(name: str) -> str:
        """Moonshot names experts as Mixtral does; transformers has a module for what forgets."""
        return MixtralForCausalLM.canonical(name).replace(".forget_gate.", ".")

    @staticmethod
    def unstacked(name: str, shape: Sequence[int]) -> Mapping[str, tuple[Any, ...]]:
        """One number of each head has axes of one beside it; transformers may hold the convolutions in one tensor."""
        if name.endswith(".A_log") and len(shape) == 4:
            return {name: (0, 0, slice(None), 0)}
        if name.endswith(".conv1d.weight") and shape:
            size = shape[0] // 3
            cuts = {part: (slice(at * size, (at + 1) * size),) for at, part in enumerate("qkv")}
            return {name.replace(".conv1d.", f".{part}_conv1d."): cut for part, cut in cuts.items()}
        return unstacked(name, shape)
