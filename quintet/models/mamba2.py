"""Mamba 2 (Dao and Gu 2024): state spaces alone."""

import functools
import logging
from typing import Any

import torch
from torch import Tensor, nn

from quintet.layers.build import BuildContext
from quintet.layers.decoder import CausalLM, DecoderTrunk, norm_eps
from quintet.layers.layer_state import StepState
from quintet.layers.linear import LMHead
from quintet.layers.norm import RMSNorm
from quintet.layers.ssm.mamba import Mamba2, Mamba2Sizes
from quintet.layers.ssm.short_conv import check_silu
from quintet.models.bamba import least

logger = logging.getLogger(__name__)

RENAMED = {
    "backbone.embedding.": "model.embed_tokens.",
    "backbone.embeddings.": "model.embed_tokens.",
    "backbone.norm_f.": "model.norm.",
    "backbone.": "model.",
}


class Mamba2Block(nn.Module):
    """A norm and a mixer: there is no feed-forward."""

    def __init__(self, config: Any, build: BuildContext, mixer: nn.Module) -> None:
        super().__init__()
        self.norm = RMSNorm(build, config.hidden_size, norm_eps(config))
        self.mixer = mixer

    def forward(self, x: Tensor, residual: Tensor | None, cache: StepState) -> tuple[Tensor, Tensor]:
        x, residual = self.norm(x, residual)
        return self.mixer(x, cache), residual


class Mamba2ForCausalLM(CausalLM):
    """The blocks, and a head that may be tied to the embedding."""

    renamed_tensors = RENAMED

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(build)
        check_silu(config)
        say_rounded(config, build)

        def block(config: Any, build: BuildContext, index: int) -> Mamba2Block:
            shape = Mamba2Sizes(
                hidden=config.hidden_size,
                heads=config.num_heads,
                head_dim=config.head_dim,
                groups=config.n_groups,
                state=config.state_size,
                conv_kernel=config.conv_kernel,
                eps=config.layer_norm_epsilon,
                conv_bias=config.use_conv_bias,
                bias=config.use_bias,
                output_bias=config.use_bias,
                dt_min=least(config),
            )
            return Mamba2Block(config, build, Mamba2(build, shape))

        self.model = DecoderTrunk(config, build, block)
        self.lm_head = LMHead.from_config(build, config)


def say_rounded(config: Any, build: BuildContext) -> None:
    """residual_in_fp32 is not computed: sums of the layers' outputs are held in the model's own type."""
    if getattr(config, "residual_in_fp32", False) and build.dtype != torch.float32:
        _say(config.model_type, str(build.dtype).removeprefix("torch."))


@functools.cache
def _say(kind: str, dtype: str) -> None:
    logger.warning(
        "%s: residual_in_fp32 asks for sums of the layers' outputs in float32; here they are rounded to %s, layer by "
        "layer. --dtype float32 keeps them whole",
        kind, dtype,
    )  # fmt: skip
