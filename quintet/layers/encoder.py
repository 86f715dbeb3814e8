"""Encoders: tokens see both ways, nothing is kept, and hidden states come out. Families fill in hooks."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor, nn

from quintet.interface.platform import State
from quintet.interface.types import Batch, Outputs
from quintet.layers.attention.attention import AttentionSizes, SelfAttention
from quintet.layers.build import BuildContext, even_shards, replicated
from quintet.layers.decoder import ModelBase
from quintet.layers.embedding import PositionEmbedding, VocabParallelEmbedding
from quintet.layers.layer_state import StepState
from quintet.layers.linear import column_parallel, row_parallel
from quintet.layers.mlp import MLP, GatedMLP
from quintet.layers.norm import LayerNorm
from quintet.layers.rope import Rotary

QKV = ("q_proj", "k_proj", "v_proj")


class PostNormEncoderBlock(nn.Module):
    """Attention and feed-forward, each followed by its sum and a norm."""

    def __init__(self, build: BuildContext, attention: nn.Module, mlp: nn.Module, width: int, eps: float) -> None:
        super().__init__()
        self._add = build.ops.take("add").add
        self.attention, self.attention_norm = attention, LayerNorm(build, width, eps)
        self.mlp, self.norm = mlp, LayerNorm(build, width, eps)

    def forward(self, x: Tensor, cache: StepState) -> Tensor:
        x = self.attention_norm(self._add(self.attention(x, cache), x))
        out: Tensor = self.norm(self._add(self.mlp(x), x))
        return out


class PreNormEncoderBlock(nn.Module):
    """Attention and feed-forward, each behind a norm; the first may have none."""

    def __init__(
        self, build: BuildContext, attention: nn.Module, mlp: nn.Module, norms: tuple[nn.Module | None, nn.Module]
    ) -> None:
        super().__init__()
        self._add = build.ops.take("add").add
        self.attention, self.mlp = attention, mlp
        self.attention_norm, self.mlp_norm = norms

    def forward(self, x: Tensor, cache: StepState) -> Tensor:
        x = self._add(self.attention(x if self.attention_norm is None else self.attention_norm(x), cache), x)
        out: Tensor = self._add(self.mlp(self.mlp_norm(x)), x)
        return out


class Encoder(ModelBase):
    """The hidden states of the step's rows: words, segments and positions summed and normed, and blocks as BERT's.

    Segment ids are those of the batch's inputs, or 0. `names` bring a checkpoint's names to the modules', one after the
    other; `prefixes` are what a model with a head has before its trunk's.
    """

    # what heads are made of, and what is computed
    ignored_tensors: tuple[str, ...] = (
        r"(pooler|cls)\..*",
        r".*embeddings\.(position|token_type)_ids",
        r".*rotary_emb\.inv_freq",
    )
    is_encoder = True
    names: ClassVar[Sequence[tuple[str, str]]] = ()
    prefixes: ClassVar[Sequence[str]] = ()

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__()
        kind = config.model_type
        if build.requested_outputs.logits:
            raise ValueError(
                f"{kind} gives hidden states and no logits, so it generates nothing; choose a decoder model"
            )
        if build.requested_outputs.aux_hidden_states:
            raise ValueError(f"{kind} gives its last hidden states, and no taps of its layers")
        self.vocab_size, width = config.vocab_size, getattr(config, "embedding_size", None) or config.hidden_size
        self._ops, self._lora = build.ops.take("add", "take_rows"), build.lora
        self.words = VocabParallelEmbedding(build, config.vocab_size, width)
        self.places = self.positions(config, build, width)
        segments = getattr(config, "type_vocab_size", 0)
        self.types = VocabParallelEmbedding(build, segments, width, is_replicated=True) if segments else None
        self.uses_token_types = segments > 1
        self.norm: nn.Module = LayerNorm(build, width, eps(config))
        self.widened = None
        if width != config.hidden_size:
            split = replicated(config.hidden_size, build.size)
            self.widened = column_parallel(build, width, {"widened": split}, True)
        rotary = self.rotary(config, build)
        self.layers = nn.ModuleList(self.block(config, build, i, rotary) for i in range(self.blocks(config)))

    def positions(self, config: Any, build: BuildContext, width: int) -> PositionEmbedding | None:
        """Learned ones, added to the words."""
        return PositionEmbedding(build, config.max_position_embeddings, width)

    def rotary(self, config: Any, build: BuildContext) -> Rotary | None:
        """Returns the rotary embedding of queries and keys, if there is one."""
        return None

    def blocks(self, config: Any) -> int:
        """Returns the number of blocks."""
        count: int = config.num_hidden_layers
        return count

    def order(self) -> Iterable[nn.Module]:
        """The blocks, as a token goes through them."""
        return self.layers

    def block(self, config: Any, build: BuildContext, index: int, rotary: Rotary | None) -> nn.Module:
        attention = SelfAttention(build, encoder_attention_sizes(config), rotary)
        return PostNormEncoderBlock(build, attention, plain_mlp(config, build), config.hidden_size, eps(config))

    @classmethod
    def canonical(cls, name: str) -> str:
        """The modules' names, also of the layer norms of older checkpoints."""
        for prefix in cls.prefixes:
            name = name.removeprefix(prefix)
        for theirs, our in cls.names:
            name = name.replace(theirs, our)
        return re.sub(r"\.gamma$", ".weight", re.sub(r"\.beta$", ".bias", name))

    @staticmethod
    def unstacked(name: str, shape: Sequence[int]) -> Mapping[str, tuple[Any, ...]]:
        """Projections that are one tensor: q, k and v, or the feed-forward's two."""
        for stack, parts in STACKS.items():
            if f".{stack}." in name:
                share = shape[0] // len(parts)
                return {
                    name.replace(f".{stack}.", f".{part}."): (slice(at * share, (at + 1) * share),)
                    for at, part in enumerate(parts)
                }
        return {}

    def forward(self, state: State, batch: Batch) -> tuple[Outputs, State]:
        """One step of whole requests."""
        cache, add = StepState(state, batch, self._lora), self._ops.add
        x = self.words.embed(batch)
        if self.types is not None:
            x = add(
                x,
                self.types(batch.positions * 0 if batch.inputs.token_type_ids is None else batch.inputs.token_type_ids),
            )
        if self.places is not None:
            x = add(x, self.places(batch.positions))
        x = self.norm(x)
        if self.widened is not None:
            x = self.widened(x)
        for layer in self.order():
            x = layer(x, cache)
        return Outputs(None, self._ops.take_rows(self.finished(x, batch), batch.logits_indices)), cache.state

    def finished(self, x: Tensor, batch: Batch) -> Tensor:
        """Returns what the model gives of its last block's x [T, H]."""
        return x


# tensors that stand for several -> these, in order
STACKS = {"qkv_proj": QKV, "gate_up_proj": ("gate_proj", "up_proj"), "up_gate_proj": ("up_proj", "gate_proj")}


def eps(config: Any) -> float:
    """Returns the epsilon of the norms."""
    found: float = config.layer_norm_eps
    return found


def encoder_attention_sizes(config: Any, bias: bool = True, **differences: Any) -> AttentionSizes:
    """Attention that keeps nothing and sees both ways."""
    return AttentionSizes.from_config(
        config, causal=False, uses_kv_cache=False, bias=bias, output_bias=bias, **differences
    )


def plain_mlp(config: Any, build: BuildContext, bias: bool = True) -> MLP:
    """down(act(up(x)))."""
    sizes = config.hidden_size, config.intermediate_size
    return MLP(build, sizes, config.hidden_act, ("up_proj", "down_proj"), bias)


def gated_mlp(config: Any, build: BuildContext, kind: str, bias: tuple[bool, bool] = (False, False)) -> GatedMLP:
    """down(act(gate(x)) * up(x)); `bias`: of the first two, and of the last."""
    made = GatedMLP(build, config.hidden_size, config.intermediate_size, kind, bias[0])
    if bias[0] != bias[1]:
        made.down = row_parallel(
            build, even_shards(config.intermediate_size, build.size), ("down_proj", config.hidden_size), bias[1]
        )
    return made
