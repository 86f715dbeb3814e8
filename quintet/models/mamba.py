"""Mamba (Gu and Dao 2023): selective scans alone; in Falcon-Mamba (TII 2024) what steers them is normalised."""

import math
from typing import Any

from quintet.layers.build import BuildContext
from quintet.layers.decoder import CausalLM, DecoderTrunk
from quintet.layers.linear import LMHead
from quintet.layers.ssm.mamba import Mamba1, Mamba1Sizes
from quintet.layers.ssm.short_conv import check_silu
from quintet.models import mamba2


class MambaForCausalLM(CausalLM):
    """Mamba 2's blocks, with other mixers in them."""

    renamed_tensors = mamba2.RENAMED
    # of norms that have none: transformers stores ones
    ignored_tensors = (*CausalLM.ignored_tensors, r".*\.mixer\.(dt|b|c)_layernorm\.weight")

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(build)
        check_silu(config)
        mamba2.say_rounded(config, build)
        shape = Mamba1Sizes(
            hidden=config.hidden_size,
            inner=config.intermediate_size,
            state=config.state_size,
            dt_rank=math.ceil(config.hidden_size / 16) if config.time_step_rank == "auto" else config.time_step_rank,
            conv_kernel=config.conv_kernel,
            conv_bias=config.use_conv_bias,
            bias=config.use_bias,
            norm_eps=getattr(config, "mixer_rms_eps", None),
            norm_has_weight=False,
        )

        def block(config: Any, build: BuildContext, index: int) -> mamba2.Mamba2Block:
            return mamba2.Mamba2Block(config, build, Mamba1(build, shape))

        self.model = DecoderTrunk(config, build, block)
        self.lm_head = LMHead.from_config(build, config)
