"""VaultGemma (Google 2025): Gemma 2 without the norms behind the branches."""

from typing import Any

from torch import nn

from quintet.layers.blocks import SerialBlock
from quintet.layers.build import BuildContext
from quintet.layers.norm import RMSNorm
from quintet.models.gemma2 import Gemma2ForCausalLM


class VaultGemmaForCausalLM(Gemma2ForCausalLM):
    """Pre-norm blocks, soft-capped scores and logits where the checkpoint has them."""

    @staticmethod
    def block(config: Any, build: BuildContext, attention: nn.Module, mlp: nn.Module) -> nn.Module:
        def norm() -> RMSNorm:
            return RMSNorm(build, config.hidden_size, config.rms_norm_eps, offset=1.0)

        before = {"input_layernorm": norm(), "self_attn": attention}
        return SerialBlock(build, {**before, "pre_feedforward_layernorm": norm(), "mlp": mlp})
