"""Facts about mixers that a worker settles once."""

from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING

from quintet.interface.types import StateSpec
from quintet.layers.layer_state import LayerMixer
from quintet.ops.states import DRAFT_OPS, MAX_DRAFTS

if TYPE_CHECKING:
    from quintet.engine.executor.worker import Worker


def kv_heads(mixings: Collection[LayerMixer], count: int) -> tuple[int | None, ...]:
    """Returns the KV heads of each of the first `count` tensors of the state; None: layers have none, or differ."""
    owners: list[set[int | None]] = [set() for _ in range(count)]
    for mixing in mixings:
        for place in mixing.tensor_indices:
            if place < count:
                owners[place].add(mixing.kv_heads)
    return tuple(each.pop() if len(each) == 1 else None for each in owners)


def keep_drafts_apart(worker: "Worker", most: int) -> int:
    """Lets the states of a worker's model keep apart what drafts do to them, if those of all layers can -> drafts of a
    request in a step; 0: tokens that a refused draft follows are computed again."""
    states = [(mixer, mixer.spec) for mixer in worker.main.mixers if isinstance(mixer.spec, StateSpec)]
    ops = {spec.op for _, spec in states}
    if not (most and ops) or not ops <= DRAFT_OPS or "max_drafts" not in worker.platform.optional_spec_fields:
        return 0
    most = min(most, MAX_DRAFTS)
    for mixer, spec in states:
        mixer.mixer = worker.platform.mixer(replace(spec, max_drafts=most), worker.ops, worker.rank_info.rank)
    return most
