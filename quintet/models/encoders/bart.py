"""Encoders of BART's kind (Lewis et al. 2020): tokens and positions, and blocks with norms before or behind."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from quintet.layers.build import BuildContext
from quintet.layers.embedding import (
    PositionEmbedding,
    SinusoidalPositionEmbedding,
    VaswaniPositionEmbedding,
    VocabParallelEmbedding,
)
from quintet.layers.encoder_decoder import EPS, BlockSizes, CrossEncoderBlock, CrossProjection
from quintet.layers.layer_state import StepState
from quintet.layers.norm import LayerNorm
from quintet.layers.weight_transform import TransformedTensor
from quintet.models.encoders.base import CrossEncoder

SHARED = "model.shared.weight"  # the table of both parts
_TABLES = ("model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight")
LOGITS_BIAS = "final_logits_bias"
COMPUTED = r"model\.(encoder|decoder)\.embed_positions\.weights?"  # of positions that are not learned


@dataclass(frozen=True)
class BartTraits:
    """Differences between model types of BART's kind."""

    pre_norm: bool = False  # True: norms before the branches, and a last one
    positions: type[PositionEmbedding] = PositionEmbedding
    first: int = 2  # row of the first position
    embedding_norm: bool = True  # of tokens and positions together
    norms_tokens: bool = False  # True: in the decoder, of tokens before positions are added
    logits_bias: bool = True


TRAITS = {
    "bart": BartTraits(),
    "plbart": BartTraits(),
    "mvp": BartTraits(),
    "blenderbot-small": BartTraits(first=0, norms_tokens=True),
    "mbart": BartTraits(pre_norm=True),
    "marian": BartTraits(positions=VaswaniPositionEmbedding, first=0, embedding_norm=False),
    "pegasus": BartTraits(pre_norm=True, positions=VaswaniPositionEmbedding, first=0, embedding_norm=False),
    "m2m_100": BartTraits(
        pre_norm=True, positions=SinusoidalPositionEmbedding, embedding_norm=False, logits_bias=False
    ),
    "blenderbot": BartTraits(pre_norm=True, first=0, embedding_norm=False),
}


def canonical_name(name: str) -> str:
    """Returns the modules' name of a checkpoint's tensor; some were saved without the head's class around them."""
    return f"model.{name}" if name.startswith(("encoder.", "decoder.", "shared.")) else name


def with_own_tables(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a checkpoint's tensors with a table of tokens for each part, and the bias of logits under the head's
    name."""
    found = dict(entries)
    if (shared := found.pop(SHARED, None)) is not None:
        for name in _TABLES:
            found.setdefault(name, shared)
    if (bias := found.pop(LOGITS_BIAS, None)) is not None:
        found["lm_head.bias"] = TransformedTensor(bias, torch.flatten, new_shape=(math.prod(bias.shape),))
    return found


class BartStack(nn.Module):
    """Tokens and positions of one part, its blocks, and a last norm where the model has one."""

    def __init__(self, config: Any, build: BuildContext, vocab_size: int, layers: nn.ModuleList) -> None:
        super().__init__()
        traits, width = TRAITS[config.model_type], config.d_model
        self._add = build.ops.take("add").add
        self._scale = math.sqrt(width) if config.scale_embedding else 1.0
        self.embed_tokens = VocabParallelEmbedding(build, vocab_size, width)
        self.embed_positions = traits.positions(build, config.max_position_embeddings, width, traits.first)
        self.layernorm_embedding = LayerNorm(build, width, EPS) if traits.embedding_norm else nn.Identity()
        self.layers = layers
        self.layer_norm = LayerNorm(build, width, EPS) if traits.pre_norm else nn.Identity()

    def embed(self, cache: StepState) -> Tensor:
        """A step's tokens -> [T, H]."""
        batch = cache.batch
        x = self._add(self.embed_tokens.embed(batch, self._scale), self.embed_positions(batch.positions))
        out: Tensor = self.layernorm_embedding(x)
        return out


class BartEncoder(CrossEncoder):
    """The encoder, and for each decoder layer the products that make K and V of its rows."""

    takes_text = True
    recordable = False  # few texts are of one length
    gathered_from = (SHARED,)
    # of the decoder, all but those two
    ignored_tensors: tuple[str, ...] = (
        r"model\.decoder\.(embed_tokens|embed_positions|layernorm_embedding|layer_norm)\..*",
        r"model\.decoder\.layers\.\d+\.(self_attn|self_attn_layer_norm|encoder_attn_layer_norm|final_layer_norm)\..*",
        r"model\.decoder\.layers\.\d+\.(fc1|fc2|encoder_attn\.(q_proj|out_proj))\..*",
        r"lm_head\..*",
        COMPUTED,
    )

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__()
        traits, self.rows = TRAITS[config.model_type], config.max_position_embeddings
        whole = replace(build, max_model_len=self.rows)
        sizes, decoder = (BlockSizes.of(config, part, traits.pre_norm) for part in ("encoder", "decoder"))
        layers = nn.ModuleList(CrossEncoderBlock(sizes, whole) for _ in range(config.encoder_layers))
        self.model = nn.ModuleDict({"encoder": BartStack(config, whole, config.vocab_size, layers)})
        cross = decoder.attention()
        self.cross = nn.ModuleList(CrossProjection(cross, whole, each) for each in range(config.decoder_layers))

    canonical = staticmethod(canonical_name)  # no other name depends on the class

    def gathered(self, entries: Mapping[str, Any]) -> Mapping[str, Any]:
        """Each part gets the table of both."""
        return with_own_tables(entries)

    def encode(self, cache: StepState) -> Tensor:
        stack: Any = self.model["encoder"]
        x = stack.embed(cache)
        for layer in stack.layers:
            x = layer(x, cache)
        out: Tensor = stack.layer_norm(x)
        return out
