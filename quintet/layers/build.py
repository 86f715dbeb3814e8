"""Build context of a model: bound ops, mixers, communicator and the few sizes that are not the checkpoint's."""

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from quintet.interface.platform import Communicator
from quintet.interface.types import LayerSpec
from quintet.interface.weights import CheckpointSlice, Weight
from quintet.layers.layer_state import LayerMixer
from quintet.layers.lora_step import LoRAStep
from quintet.layers.moe.expert_placement import ExpertPlacement
from quintet.layers.moe.routed_experts import RoutedExperts
from quintet.layers.pipeline import Stage
from quintet.layers.quantization import QuantizationPlan
from quintet.layers.row_store import RowStore
from quintet.ops import Ops

T = TypeVar("T")


@dataclass(frozen=True)
class RequestedOutputs:
    """Outputs that a model's step returns; fixed when the model is built."""

    logits: bool = True
    vocab_size: int | None = None  # of the logits: of so many tokens, the first; None: of all
    hidden_states: bool = False  # of the same rows, normalised
    # layers that return their output for each token; 0: the first layer's input
    aux_hidden_states: tuple[int, ...] = ()
    routed_experts: bool = False  # of each token, in each layer with a router


@dataclass(frozen=True)
class KVScaling:
    """Source of the scales of K and V, for a cache in fp8."""

    names: Mapping[str, tuple[str, str]] = field(default_factory=dict)  # attention's path -> K's and V's tensor
    computed: bool = False  # from what a first prompt gives, whatever a checkpoint says


@dataclass(frozen=True)
class BuildContext:
    """Injected into every layer; there is no current platform."""

    ops: Ops
    make_mixer: Callable[[LayerSpec], LayerMixer]
    comm: Communicator
    dtype: torch.dtype
    page_size: int
    max_model_len: int  # tokens; rotary tables reach as far
    quantization: QuantizationPlan = QuantizationPlan()  # of the products' weights
    kv_dtype: torch.dtype | None = None  # of the cache; None: dtype
    kv_scales: KVScaling = field(default_factory=KVScaling)
    requested_outputs: RequestedOutputs = RequestedOutputs()
    causal: bool = True  # False: tokens of a decoder see those after them, and it keeps nothing
    whole_prompts: bool = False  # tokens of a prompt see all of it, those that are generated only what is before them
    tied_head: bool | None = None  # the head is the token embedding; None: as the config's tie_word_embeddings has it
    expert_placement: ExpertPlacement | None = None  # how whole experts are given to ranks; None: each is cut
    routed_experts: RoutedExperts | None = None  # collects what routers choose; None: steps do not return it
    stage: Stage = Stage()  # of several that the model's layers are shared out over
    lora: LoRAStep | None = None  # the adapters of a step's tokens; None: the model takes none
    row_store: RowStore | None = None  # rows in the places of tokens' embeddings; None: steps bring none
    layers: Mapping[str, type] = field(default_factory=dict)  # a layer's class name -> the platform's subclass of it

    def replacement_for(self, layer: type[T]) -> type[T]:
        """The class that is built where the model names this one."""
        return self.layers.get(layer.__name__, layer)

    def ties_head(self, config: Any) -> bool:
        """Returns whether the head of a model is its token embedding."""
        return bool(getattr(config, "tie_word_embeddings", False)) if self.tied_head is None else self.tied_head

    @property
    def rank(self) -> int:
        return self.comm.rank

    @property
    def size(self) -> int:
        return self.comm.size


def replacements(named: Mapping[str, str]) -> dict[str, type]:
    """A platform's own layers, by the class that each stands for: "GatedMLP" -> "package.module:Class"."""
    found = {}
    for name, path in named.items():
        module, _, attribute = path.partition(":")
        made = getattr(importlib.import_module(module), attribute, None)
        if not isinstance(made, type) or name not in [base.__name__ for base in made.__mro__[1:]]:
            raise TypeError(f"{path} cannot stand for the layer {name}: it is no subclass of it")
        found[name] = made
    return found


class Layer(nn.Module):
    """A module that declares where its parameters come from. The loader reads them, the platform places them."""

    def __new__(cls, *args: Any, **settings: Any) -> Any:
        """Makes the platform's subclass of the layer, if there is one."""
        build = next(each for each in (*args, *settings.values()) if isinstance(each, BuildContext))
        return super().__new__(build.replacement_for(cls))

    def __init__(self, build: BuildContext, *ops: str) -> None:
        """`ops`: those that forward() calls."""
        super().__init__()
        self.ops = build.ops.take(*ops)

    def finalize(self, path: str) -> None:
        """Called once, when the model is whole, with the module's path in it: what depends on that is decided here."""

    def weights(self, path: str) -> list[Weight]:
        """Its parameters, given the module's own dotted path in the model."""
        return []

    def constants(self) -> Mapping[str, Tensor]:
        """Tensors that are computed, not read; placed like weights, on every rank alike."""
        return {}

    def assign(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            setattr(self, name, nn.Parameter(tensor, requires_grad=False))

    @property
    def assigned_tensors(self) -> dict[str, Tensor]:
        """Tensors that were assigned, by name: other numbers may be written into them."""
        return dict(self.named_parameters(recurse=False))


def named_layers(model: nn.Module) -> Iterator[tuple[str, Layer]]:
    """Yields the layers of a model with their paths."""
    yield from ((path, module) for path, module in model.named_modules() if isinstance(module, Layer))


def finalize(model: nn.Module) -> None:
    """Calls finalize() of every layer of a whole model with its path."""
    for path, layer in named_layers(model):
        layer.finalize(path)


@dataclass(frozen=True)
class Shards:
    """Shares of an axis of `total` features: one range per rank."""

    total: int
    ranges: tuple[tuple[int, int], ...]

    def local(self, rank: int) -> int:
        start, stop = self.ranges[rank]
        return stop - start

    def times(self, n: int) -> "Shards":
        """The same shares where each unit is n features wide."""
        return Shards(self.total * n, tuple((a * n, b * n) for a, b in self.ranges))


def replicated(total: int, size: int) -> Shards:
    """Every rank keeps all."""
    return Shards(total, ((0, total),) * size)


def vector_weight(
    build: BuildContext,
    source: str,
    shards: Shards | int,
    dtype: torch.dtype | None = None,
    shift: float = 0.0,
    name: str = "",
) -> Weight:
    """Returns a layer's parameter with one axis. `source`: its tensor in the checkpoint. `shards`: its width, where
    every rank keeps all. `dtype`: the model's if None. `name`: the attribute, by default the last part of `source`.
    """
    split = replicated(shards, build.size) if isinstance(shards, int) else shards
    part = CheckpointSlice(source, (split.total,), split.ranges, shift=shift)
    return Weight(name or source.rpartition(".")[2], (part,), 0, build.rank, dtype or build.dtype, "vector")


def even_shards(total: int, size: int) -> Shards:
    """As even as integers allow: 11 over 3 is 3, 4, 4."""
    bounds = [rank * total // size for rank in range(size + 1)]
    return Shards(total, tuple(zip(bounds[:-1], bounds[1:], strict=True)))


def padded_shards(total: int, size: int) -> Shards:
    """Equal shares; the last ones run past the end, where there are zeros."""
    share = -(-total // size)
    return Shards(total, tuple((rank * share, (rank + 1) * share) for rank in range(size)))


def split_heads(heads: int, kv_heads: int, size: int) -> tuple[Shards, Shards]:
    """(query heads, KV heads) per rank, a query head always beside its KV head.

    Enough KV heads: each rank takes some, with their queries. Too few: several ranks keep the same KV head and share
    out its queries.
    """
    group = heads // kv_heads
    if kv_heads >= size:
        kv = even_shards(kv_heads, size)
        return kv.times(group), kv
    queries, keys = [], []
    for head, (first, last) in enumerate(even_shards(size, kv_heads).ranges):
        if last - first > group:
            raise ValueError(
                f"{size} ranks cannot share {heads} attention heads over {kv_heads} KV heads: a rank would have none; "
                f"lower tensor_parallel_size to {kv_heads * group} or less"
            )
        for start, stop in even_shards(group, last - first).ranges:
            queries.append((head * group + start, head * group + stop))
            keys.append((head, head + 1))
    return Shards(heads, tuple(queries)), Shards(kv_heads, tuple(keys))
