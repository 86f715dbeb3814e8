"""Jina Embeddings v2 (Günther et al. 2023), the trunk: BERT with ALiBi both ways and a gated feed-forward."""

from typing import Any

from torch import Tensor, nn

from quintet.layers.attention.attention import AttentionSizes, SelfAttention
from quintet.layers.blocks import alibi_slopes
from quintet.layers.build import BuildContext
from quintet.layers.embedding import PositionEmbedding
from quintet.layers.encoder import Encoder, PostNormEncoderBlock, encoder_attention_sizes, eps, gated_mlp, plain_mlp
from quintet.layers.layer_state import StepState
from quintet.layers.norm import LayerNorm
from quintet.layers.rope import Rotary
from quintet.models.bert import NAMES

GATES = {"geglu": "gelu", "reglu": "relu"}  # feed_forward_type -> the gate's activation


class NormedAttention(SelfAttention):
    """q and k are normed, each over all heads."""

    def __init__(self, build: BuildContext, shape: AttentionSizes, norm_eps: float) -> None:
        if build.size > 1:
            raise ValueError(
                f"jina_bert norms q and k over all heads, which {build.size} ranks would share out; set "
                "tensor_parallel_size to 1"
            )
        super().__init__(build, shape, None)
        self.over_q, self.over_k = (LayerNorm(build, shape.hidden, norm_eps) for _ in range(2))

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().project(x)
        return self.over_q(q.flatten(1)).reshape(q.shape), self.over_k(k.flatten(1)).reshape(k.shape), v


class TwiceNormed(PostNormEncoderBlock):
    """Post-norm block that adds attention's input to its output and normalises, twice."""

    def __init__(self, build: BuildContext, attention: nn.Module, mlp: nn.Module, width: int, eps: float) -> None:
        super().__init__(build, attention, mlp, width, eps)
        self.between = LayerNorm(build, width, eps)

    def forward(self, x: Tensor, cache: StepState) -> Tensor:
        y = self.attention_norm(self._add(self.attention(x, cache), x))
        y = self.between(self._add(y, x))
        out: Tensor = self.norm(self._add(self.mlp(y), y))
        return out


class JinaBertModel(Encoder):
    """Segments; positions are slopes. Of both generations: v2 in English, and the later ones (German, Spanish, Chinese,
    code), which norm more."""

    prefixes = ("bert.",)
    names = (
        (".attention.self.layer_norm_q.", ".attention.over_q."),
        (".attention.self.layer_norm_k.", ".attention.over_k."),
        (".layer_norm_1.", ".between."),
        (".layer_norm_2.", ".norm."),
        (".mlp.gated_layers.", ".mlp.gate_up_proj."),
        (".mlp.wo.", ".mlp.down_proj."),
        (".mlp.layernorm.", ".norm."),
        (".mlp.up_gated_layer.", ".mlp.up_gate_proj."),
        (".mlp.up_layer.", ".mlp.up_proj."),
        (".mlp.down_layer.", ".mlp.down_proj."),
        *NAMES,
    )

    def positions(self, config: Any, build: BuildContext, width: int) -> PositionEmbedding | None:
        return None

    def block(self, config: Any, build: BuildContext, index: int, rotary: Rotary | None) -> nn.Module:
        kind, width, later = config.feed_forward_type, config.hidden_size, config.qk_post_norm
        if kind in GATES:
            mlp: nn.Module = gated_mlp(config, build, GATES[kind], (False, True))
        elif kind == "original" and not later:
            mlp = plain_mlp(config, build)
        else:
            raise ValueError(f"jina_bert with feed_forward_type={kind!r} is not supported; {', '.join(GATES)} are")
        shape = encoder_attention_sizes(config, alibi=alibi_slopes(config.num_attention_heads))
        if later:
            return TwiceNormed(build, NormedAttention(build, shape, eps(config)), mlp, width, eps(config))
        return PostNormEncoderBlock(build, SelfAttention(build, shape, None), mlp, width, eps(config))
