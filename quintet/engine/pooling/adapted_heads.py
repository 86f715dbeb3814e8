"""Pooling heads of adapters (LoRA): whole weights that were trained with one (PEFT's modules_to_save)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from quintet.engine.pooling.heads import FloatRows, PoolingLinear

Heads = Mapping[str, Sequence[Callable[[FloatRows], FloatRows]]]  # by task


@dataclass(frozen=True)
class AdaptedHeads:
    """Heads of the texts that are answered with an adapter."""

    heads: Heads | None = None  # None: the model's own
    used: frozenset[str] = frozenset()  # names of the adapter's tensors that they are made of


def adapt_heads(heads: Heads, saved: Mapping[str, Tensor]) -> AdaptedHeads:
    """Returns the heads with the tensors that an adapter has in place of theirs, by the base model's names. ValueError
    names one whose shape differs."""
    used: set[str] = set()
    adapted = {task: tuple(_adapt(each, saved, used) for each in layers) for task, layers in heads.items()}
    return AdaptedHeads(adapted, frozenset(used)) if used else AdaptedHeads()


def unchecked_heads(is_pooling: bool, saved: Mapping[str, Tensor]) -> AdaptedHeads:
    """Returns what adapt_heads() may return when the heads are there: a pooling model may have all of the tensors."""
    return AdaptedHeads(used=frozenset(saved if is_pooling else ()))


def _adapt(
    layer: Callable[[FloatRows], FloatRows], saved: Mapping[str, Tensor], used: set[str]
) -> Callable[[FloatRows], FloatRows]:
    if not isinstance(layer, PoolingLinear) or not layer.source:
        return layer
    changes: dict[str, FloatRows] = {}
    for part, own in (("weight", layer.weight), ("bias", layer.bias)):
        name = f"{layer.source}.{part}"
        if name not in saved or own is None:
            continue
        if tuple(saved[name].shape) != own.shape:
            raise ValueError(
                f"{name}: the adapter's head has the shape {list(saved[name].shape)}, and the model's "
                f"{list(own.shape)}; serve the model that the adapter was trained on, with as many labels"
            )
        changes[part] = saved[name].float().numpy()
        used.add(name)
    return replace(layer, weight=changes.get("weight", layer.weight), bias=changes.get("bias", layer.bias))
