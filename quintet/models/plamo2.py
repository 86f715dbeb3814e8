"""Plamo 2 (Preferred Networks 2025): Mamba 2 and attention in windows by turns, with norms around each branch."""

from typing import Any

from torch import Tensor, nn

from quintet.layers.attention.attention import AttentionSizes, SelfAttention
from quintet.layers.build import BuildContext, split_heads
from quintet.layers.decoder import CausalLM, DecoderTrunk, refuse
from quintet.layers.layer_state import StepState
from quintet.layers.linear import CheckpointLayout, LMHead
from quintet.layers.mlp import GatedMLP
from quintet.layers.norm import RMSNorm
from quintet.layers.rope import Rotary
from quintet.layers.ssm.plamo import HeadRMSNorm, PlamoMamba2, PlamoMamba2Sizes

QK_EPS = 1e-6  # of the norms of heads, whatever the others have
RENAMED = {
    "model.layers.layers.": "model.layers.",
    ".B_norm_weight": ".B_norm.weight",
    ".C_norm_weight": ".C_norm.weight",
    ".dt_norm_weight": ".dt_norm.weight",
    ".q_weight": ".q_norm.weight",
    ".k_weight": ".k_norm.weight",
}


class Plamo2DecoderLayer(nn.Module):
    """Norms before and after each branch, kept around 0; around less behind the branches."""

    def __init__(self, config: Any, build: BuildContext, mixer: nn.Module) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.pre_mixer_norm = RMSNorm(build, hidden, eps, 1.0)
        self.mixer = mixer
        self.post_mixer_norm = RMSNorm(build, hidden, eps, 1 / 5)
        self.pre_mlp_norm = RMSNorm(build, hidden, eps, 1.0)
        self.mlp = GatedMLP(
            build, hidden, config.intermediate_size, "silu", stored=CheckpointLayout(fused="gate_up_proj")
        )
        self.post_mlp_norm = RMSNorm(build, hidden, eps, 1 / 5**1.5)

    def forward(self, x: Tensor, residual: Tensor | None, cache: StepState) -> tuple[Tensor, Tensor]:
        x, residual = self.pre_mixer_norm(x, residual)
        x, residual = self.pre_mlp_norm(self.post_mixer_norm(self.mixer(x, cache)), residual)
        assert residual is not None
        return self.post_mlp_norm(self.mlp(x)), residual


class Plamo2ForCausalLM(CausalLM):
    """A window of n sees n tokens before each, and itself."""

    renamed_tensors = RENAMED

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(build)
        refuse(config, "use_predefined_initial_state", "eval_attention_n_bit", "eval_mlp_n_bit")
        rotary = Rotary.from_config(build, config)

        def block(config: Any, build: BuildContext, index: int) -> Plamo2DecoderLayer:
            if config.layer_types[index] == "linear_attention":
                return Plamo2DecoderLayer(config, build, PlamoMamba2(build, steered(config)))
            window = config.attention_window_size + 1
            shape = AttentionSizes.from_config(
                config,
                window=None if config.layer_types[index] == "full_attention" else window,
                stored=CheckpointLayout(fused="qkv_proj"),
            )
            attention = SelfAttention(build, shape, rotary)
            queries, keys = split_heads(shape.heads, shape.kv_heads, build.size)
            attention.q_norm = HeadRMSNorm(build, queries, shape.head_dim, QK_EPS)
            attention.k_norm = HeadRMSNorm(build, keys, shape.head_dim, QK_EPS)
            return Plamo2DecoderLayer(config, build, attention)

        norm = RMSNorm(build, config.hidden_size, config.rms_norm_eps, 1.0)
        self.model = DecoderTrunk(config, build, block, norm=norm)
        self.lm_head = LMHead.from_config(build, config)


def steered(config: Any) -> PlamoMamba2Sizes:
    """The sizes of a state space."""
    return PlamoMamba2Sizes(
        hidden=config.hidden_size,
        heads=config.mamba_num_heads,
        head_dim=config.head_dim,
        state=config.mamba_d_state,
        dt_rank=max(64, config.hidden_size // 16),
        conv_kernel=config.mamba_d_conv,
        eps=config.rms_norm_eps,
    )
