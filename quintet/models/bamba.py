"""Bamba (IBM, CMU, Princeton and UIUC 2024): Mamba 2 and, in some layers, attention that turns half of each head."""

from typing import Any

from torch import nn

from quintet.layers.build import BuildContext
from quintet.layers.rope import Rotary
from quintet.layers.ssm.mamba import Mamba2, Mamba2Sizes
from quintet.layers.ssm.short_conv import check_silu
from quintet.models.llama import LlamaForCausalLM

RENAMED = {
    ".mamba.": ".self_attn.",
    ".pre_ff_layernorm.": ".post_attention_layernorm.",
    ".feed_forward.": ".mlp.",
    ".final_layernorm.": ".norm.",
}


def spaces(config: Any, **differences: Any) -> Mamba2Sizes:
    """The sizes under the names that this family and those after it have."""
    check_silu(config)
    sizes = {"heads": config.mamba_n_heads, "head_dim": config.mamba_d_head, "groups": config.mamba_n_groups}
    return Mamba2Sizes(
        hidden=config.hidden_size,
        state=config.mamba_d_state,
        conv_kernel=config.mamba_d_conv,
        eps=config.rms_norm_eps,
        conv_bias=config.mamba_conv_bias,
        **{
            **sizes,
            "bias": config.mamba_proj_bias,
            "output_bias": config.mamba_proj_bias,
            "dt_min": least(config),
            **differences,
        },
    )


def least(config: Any) -> float:
    """That a time step is; ValueError if it has an upper limit, too."""
    lowest, highest = config.time_step_limit or (0.0, float("inf"))
    if highest != float("inf"):
        raise ValueError(
            f"{config.model_type} with time_step_limit={config.time_step_limit} is not supported: time steps have a "
            "lower limit alone"
        )
    return float(lowest)


class BambaForCausalLM(LlamaForCausalLM):
    """Pre-norm blocks with a gated feed-forward."""

    renamed_tensors = RENAMED

    def _rotary(self, config: Any, build: BuildContext) -> Rotary:
        return Rotary.from_config(build, config, partial=True)

    def _attention(self, config: Any, build: BuildContext, index: int, rotary: Rotary | None) -> nn.Module:
        if config.layers_block_type[index] == "linear_attention":
            return Mamba2(build, spaces(config))
        return super()._attention(config, build, index, rotary)
