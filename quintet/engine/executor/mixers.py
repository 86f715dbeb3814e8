"""Facts about mixers that a worker settles once."""

from collections.abc import Collection

from quintet.layers.layer_state import LayerMixer


def kv_heads(mixings: Collection[LayerMixer], count: int) -> tuple[int | None, ...]:
    """Returns the KV heads of each of the first `count` tensors of the state; None: layers have none, or differ."""
    owners: list[set[int | None]] = [set() for _ in range(count)]
    for mixing in mixings:
        for place in mixing.tensor_indices:
            if place < count:
                owners[place].add(mixing.kv_heads)
    return tuple(each.pop() if len(each) == 1 else None for each in owners)
