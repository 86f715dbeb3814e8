"""BERT (Devlin et al. 2019), the trunk: tokens see both ways, nothing is kept, and hidden states come out."""

import re
from typing import Any

from torch import Tensor, nn

from quintet.layers.attention import Heads, SelfAttention
from quintet.layers.build import Build
from quintet.layers.decoder import Family
from quintet.layers.embedding import Embedding, PositionEmbedding
from quintet.layers.mixing import Cache
from quintet.layers.mlp import MLP
from quintet.layers.norm import LayerNorm
from quintet.platforms.interface import State
from quintet.types import Batch, Outputs


class Block(nn.Module):
    """Attention and feed-forward, each followed by its sum and a norm."""

    def __init__(self, config: Any, build: Build) -> None:
        super().__init__()
        self._add, width, heads = build.ops.take("add").add, config.hidden_size, config.num_attention_heads
        shape = Heads(
            hidden=width,
            heads=heads,
            kv_heads=heads,
            head_dim=width // heads,
            causal=False,
            keeps=False,
            bias=True,
            output_bias=True,
            names=("self.query", "self.key", "self.value"),
            output="output.dense",
        )
        self.attention = SelfAttention(build, shape, None)
        self.attention_norm = LayerNorm(build, width, config.layer_norm_eps)
        names = ("intermediate.dense", "output.dense")
        self.mlp = MLP(build, (width, config.intermediate_size), config.hidden_act, names)
        self.norm = LayerNorm(build, width, config.layer_norm_eps)

    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        x = self.attention_norm(self._add(self.attention(x, cache), x))
        out: Tensor = self.norm(self._add(self.mlp(x), x))
        return out


class Model(Family):
    """The hidden states of the step's rows. Segment ids are those of the batch's inputs, or 0."""

    ignored = (r"(pooler|cls)\..*", r"embeddings\.position_ids")  # what heads are made of
    takes_types = encodes = True

    def __init__(self, config: Any, build: Build) -> None:
        super().__init__()
        if build.wanted.logits:
            raise ValueError("bert gives hidden states and no logits, so it generates nothing; choose a decoder model")
        if build.wanted.taps:
            raise ValueError("bert gives its last hidden states, and no taps of its layers")
        self.vocab_size, width = config.vocab_size, config.hidden_size
        self.words = Embedding(build, config.vocab_size, width)
        self.places = PositionEmbedding(build, config.max_position_embeddings, width)
        self.types = Embedding(build, config.type_vocab_size, width, replicated=True)
        self.norm = LayerNorm(build, width, config.layer_norm_eps)
        self.layers = nn.ModuleList(Block(config, build) for _ in range(config.num_hidden_layers))
        self._ops = build.ops.take("add", "take_rows")

    @staticmethod
    def canonical(name: str) -> str:
        """The modules' names; the trunk of a model with a head stands under "bert."."""
        name = name.removeprefix("bert.")
        for theirs, ours in NAMES:
            name = name.replace(theirs, ours)
        return re.sub(r"^(layers\.\d+)\.output\.dense\.", r"\1.mlp.output.dense.", name)

    def forward(self, state: State, batch: Batch) -> tuple[Outputs, State]:
        """One step of whole requests."""
        cache, add = Cache(state, batch), self._ops.add
        types = batch.positions * 0 if batch.inputs.types is None else batch.inputs.types
        x = self.norm(add(add(self.words.of(batch), self.types(types)), self.places(batch.positions)))
        for layer in self.layers:
            x = layer(x, cache)
        return Outputs(None, self._ops.take_rows(x, batch.rows)), cache.state


NAMES = (  # (a checkpoint's, the modules')
    ("embeddings.word_embeddings.", "words."),
    ("embeddings.position_embeddings.", "places."),
    ("embeddings.token_type_embeddings.", "types."),
    ("embeddings.LayerNorm.", "norm."),
    ("encoder.layer.", "layers."),
    ("attention.output.LayerNorm.", "attention_norm."),
    (".output.LayerNorm.", ".norm."),
    (".intermediate.dense.", ".mlp.intermediate.dense."),
)
