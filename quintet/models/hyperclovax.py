"""HyperCLOVA X SEED Think (Naver 2025): Granite with norms behind the branches, and logits that are multiplied."""

from typing import Any

from torch import Tensor, nn

from quintet.layers.build import BuildContext
from quintet.layers.layer_state import StepState
from quintet.layers.norm import RMSNorm
from quintet.models.granite import GraniteDecoderLayer, GraniteForCausalLM


class HyperCLOVAXDecoderLayer(GraniteDecoderLayer):
    """A block that normalises each branch again (use_post_norm), and then scales it."""

    def __init__(self, config: Any, build: BuildContext, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__(config, build, attention, mlp)

        def norm() -> nn.Module:
            again = config.use_post_norm
            return RMSNorm(build, config.hidden_size, config.rms_norm_eps) if again else nn.Identity()

        self.post_norm1, self.post_norm2 = norm(), norm()

    def forward(self, x: Tensor, residual: Tensor | None, cache: StepState) -> tuple[Tensor, Tensor]:
        x, residual = self.input_layernorm(x, residual)
        x = self._ops.scale(self.post_norm1(self.self_attn(x, cache)), self._scale)
        x, residual = self.post_attention_layernorm(x, residual)
        assert residual is not None
        return self._ops.scale(self.post_norm2(self.mlp(x)), self._scale), residual


class HyperCLOVAXForCausalLM(GraniteForCausalLM):
    """Pre-norm blocks with scaled branches."""

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(config, build)
        self._factor = config.logits_scaling

    def _block(self, config: Any, build: BuildContext, attention: nn.Module, mlp: nn.Module) -> nn.Module:
        return HyperCLOVAXDecoderLayer(config, build, attention, mlp)
