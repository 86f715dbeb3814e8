"""Steps laid out by hand: stretches of requests, with pages that a check chooses, as the arrays of a HostBatch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from quintet.engine.executor.batch_builder import state_group
from quintet.engine.kv_cache.groups import KVCacheGroup
from quintet.interface.types import HostBatch, HostGroup, IntArray


@dataclass(frozen=True)
class Stretch:
    """Consecutive tokens of one request, from position `first` on, and its pages by group."""

    token_ids: Sequence[int]
    first: int
    pages: Sequence[Sequence[int]]
    slots: tuple[int, int] | None = None  # of its state, where layers keep one: read, and written


def host_batch(stretches: Sequence[Stretch], page_size: int, kept: Sequence[KVCacheGroup]) -> HostBatch:
    """One step of these, with a row of outputs for each token; `kept` by group. Pages that no token of the step can see
    are 0, as an engine has them where it has given them back."""
    counts = [len(each.token_ids) for each in stretches]
    positions = [p for each in stretches for p in range(each.first, each.first + len(each.token_ids))]
    owners = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    starts = np.concatenate([np.zeros(1, np.int32), np.cumsum(counts, dtype=np.int32)])
    lengths = int32([each.first + len(each.token_ids) for each in stretches])
    groups = []
    for index, keeping in enumerate(kept):
        table = _table(stretches, index, keeping, page_size)
        slots = [
            table[row, p // page_size] * page_size + p % page_size for row, p in zip(owners, positions, strict=True)
        ]
        groups.append(HostGroup(int32(slots), table, lengths))
    states = [each.slots for each in stretches if each.slots is not None]
    if states:
        groups.append(state_group(states, len(positions), lengths))
    return HostBatch(
        token_ids=int32([token for each in stretches for token in each.token_ids]),
        positions=int32(positions),
        token_to_seq=owners,
        query_start_loc=starts,
        logits_indices=np.arange(sum(counts), dtype=np.int32),
        groups=tuple(groups),
    )


def _table(stretches: Sequence[Stretch], index: int, kept: KVCacheGroup, page_size: int) -> IntArray:
    table = np.zeros((len(stretches), max(len(each.pages[index]) for each in stretches)), np.int32)
    for row, each in enumerate(stretches):
        gone = kept.first_visible(each.first) // page_size
        table[row, gone : len(each.pages[index])] = each.pages[index][gone:]
    return table


def int32(values: Any) -> IntArray:
    return np.array(values, dtype=np.int32)
