"""Facts about a model's mixers that a worker settles once."""

from collections.abc import Collection, Sequence

from quintet.interface.platform import Mixer
from quintet.layers.layer_state import LayerMixer


def kv_heads(mixings: Collection[LayerMixer], count: int) -> tuple[int | None, ...]:
    """Returns the KV heads of each of the first `count` tensors of the state; None: layers have none, or differ."""
    owners: list[set[int | None]] = [set() for _ in range(count)]
    for mixing in mixings:
        for place in mixing.tensor_indices:
            if place < count:
                owners[place].add(mixing.kv_heads)
    return tuple(each.pop() if len(each) == 1 else None for each in owners)


def planning_mixer(mixings: Sequence[LayerMixer]) -> Mixer:
    """Returns the mixer that plans for a group: any of them, since all are of one class."""
    kinds = {type(mixing.mixer) for mixing in mixings}
    if len(kinds) > 1:
        names = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise ValueError(
            f"layers that keep alike are mixed by several classes here: {names}; one class plans for a group"
        )
    return mixings[0].mixer
