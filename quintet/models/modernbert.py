"""ModernBERT (Warner et al. 2024), the trunk: rotary positions, windows in most layers, norms before each branch."""

from typing import Any

from torch import nn

from quintet.interface.platform import State
from quintet.interface.types import Batch, Outputs
from quintet.layers.attention.attention import SelfAttention
from quintet.layers.build import BuildContext
from quintet.layers.embedding import PositionEmbedding
from quintet.layers.encoder import Encoder, PreNormEncoderBlock, encoder_attention_sizes, gated_mlp
from quintet.layers.norm import LayerNorm
from quintet.layers.rope import Rotary, head_dim


class ModernBertModel(Encoder):
    """Neither segments nor learned positions."""

    prefixes = ("model.",)
    names = (
        ("embeddings.tok_embeddings.", "words."),
        ("embeddings.norm.", "norm."),
        (".attn_norm.", ".attention_norm."),
        (".attn.Wqkv.", ".attention.qkv_proj."),
        (".attn.Wo.", ".attention.o_proj."),
        (".mlp.Wi.", ".mlp.gate_up_proj."),
        (".mlp.Wo.", ".mlp.down_proj."),
    )

    def __init__(self, config: Any, build: BuildContext) -> None:
        config.layer_norm_eps, config.type_vocab_size = config.norm_eps, 0
        self._turning: dict[str, Rotary] = {}
        super().__init__(config, build)
        self.norm, self.final_norm = _norm(config, build), _norm(config, build)

    def positions(self, config: Any, build: BuildContext, width: int) -> PositionEmbedding | None:
        return None

    def block(self, config: Any, build: BuildContext, index: int, rotary: Rotary | None) -> nn.Module:
        kind = config.layer_types[index]
        if kind not in self._turning:
            turning = config.rope_parameters[kind]
            self._turning[kind] = Rotary(build, head_dim(config), turning, config.max_position_embeddings)
        # of so many tokens to each side
        window = config.sliding_window + 1 if kind == "sliding_attention" else None
        sizes = encoder_attention_sizes(config, config.attention_bias, window=window)
        attention = SelfAttention(build, sizes, self._turning[kind])
        mlp = gated_mlp(config, build, config.hidden_activation, (config.mlp_bias, config.mlp_bias))
        return PreNormEncoderBlock(
            build, attention, mlp, (_norm(config, build) if index else None, _norm(config, build))
        )

    def forward(self, state: State, batch: Batch) -> tuple[Outputs, State]:
        """One step of whole requests."""
        outputs, state = super().forward(state, batch)
        assert outputs.hidden_states is not None
        return Outputs(None, self.final_norm(outputs.hidden_states)), state


def _norm(config: Any, build: BuildContext) -> LayerNorm:
    parts = ("weight", "bias") if config.norm_bias else ("weight",)
    return LayerNorm(build, config.hidden_size, config.norm_eps, parts)
