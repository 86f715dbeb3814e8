"""ModernBERT's decoder (Ettin; Weller et al. 2025): ModernBERT's layers with tokens that see those before them."""

from functools import partial
from typing import Any

from torch import Tensor, nn

from quintet.layers.attention.attention import AttentionSizes, SelfAttention
from quintet.layers.blocks import NamedTrunk, SerialBlock
from quintet.layers.build import BuildContext, replicated
from quintet.layers.decoder import CausalLM, layer_window
from quintet.layers.embedding import VocabParallelEmbedding
from quintet.layers.linear import CheckpointLayout, LMHead, column_parallel
from quintet.layers.mlp import GatedMLP, activation_name
from quintet.layers.norm import LayerNorm
from quintet.layers.rope import Rotary, head_dim

NAMES = (
    ("model.embeddings.tok_embeddings.", "model.embed_tokens."),
    ("model.embeddings.norm.", "model.embedding_norm."),
    ("decoder.", "lm_head."),
)


class Unnormed(nn.Module):
    """The place of a norm that the first layer lacks: what comes in is the residual."""

    def forward(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        assert residual is None, "nothing is before the first layer"
        return x, x


class PredictionHead(LMHead):
    """A product, an activation and a norm before the logits."""

    def __init__(self, config: Any, build: BuildContext, norm: LayerNorm) -> None:
        source = "/model.embed_tokens" if build.ties_head(config) else "/lm_head"
        hidden = config.hidden_size
        super().__init__(build, hidden, config.vocab_size, source, config.decoder_bias)
        self.dense = column_parallel(build, hidden, {"dense": replicated(hidden, build.size)}, config.classifier_bias)
        self.norm, self.ops = norm, build.ops.take("activate")
        self._kind = activation_name(config.classifier_activation)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(self.ops.activate(self.dense(x), self._kind)))


class ModernBertDecoderForCausalLM(CausalLM):
    """Pre-norm blocks with windows in most layers, which turn positions otherwise than the others."""

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(build)
        hidden, trained = config.hidden_size, config.max_position_embeddings
        parts = ("weight", "bias") if config.norm_bias else ("weight",)
        norm = partial(LayerNorm, build, hidden, config.norm_eps, parts)
        rotaries = {
            kind: Rotary(build, head_dim(config), config.rope_parameters[kind], trained)
            for kind in sorted(set(config.layer_types))
        }

        def block(index: int) -> SerialBlock:
            bias, stored = config.attention_bias, CheckpointLayout(fused="Wi")
            heads, window = config.num_attention_heads, layer_window(config, index)
            shape = AttentionSizes.from_config(
                config, kv_heads=heads, bias=bias, output_bias=bias, output="Wo", window=window
            )
            layer = {
                "attn_norm": norm() if index else Unnormed(),
                "attn": SelfAttention(build, shape, rotaries[config.layer_types[index]]),
                "mlp_norm": norm(),
                "mlp": GatedMLP(
                    build, hidden, config.intermediate_size, config.hidden_activation, config.mlp_bias, stored
                ),
            }
            return SerialBlock(build, layer)

        layers = nn.ModuleList(block(index) for index in range(config.num_hidden_layers))
        trunk = {"embed_tokens": VocabParallelEmbedding(build, config.vocab_size, hidden), "embedding_norm": norm()}
        self.model = NamedTrunk(build, {**trunk, "layers": layers, "final_norm": norm()})
        self.lm_head = PredictionHead(config, build, norm())

    @staticmethod
    def canonical(name: str) -> str:
        """The head's weight stands beside what is before it; the feed-forward's second product has attention's name."""
        for theirs, ours in NAMES:
            if name.startswith(theirs):
                name = ours + name.removeprefix(theirs)
        return name.replace(".mlp.Wo.", ".mlp.down_proj.")
