"""Adapters (LoRA) where ranks are processes: a request begins when all ranks have its adapter, and no step waits."""

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

from quintet.engine.lora.manager import MAX_ERROR_BYTES, LoRAManager
from quintet.engine.needs import wait_for_any
from quintet.interface.platform import Channel
from quintet.lora.request import LoRAReference

MAX_ADAPTERS = 64  # that ranks compare at once; further ones are compared in the next step


class _State(IntEnum):
    """State of an adapter on one rank; each is a byte of the note that ranks exchange."""

    READING = 0
    READY = 1
    REFUSED = 2


class AgreedAdapters(NamedTuple):
    """Adapters that all ranks have, and those that a rank cannot read, with its reason."""

    ready: list[LoRAReference]
    refused: dict[bytes, str]


def agree_on_adapters(
    lora: LoRAManager, references: Sequence[LoRAReference], channel: Channel, waits: bool
) -> AgreedAdapters:
    """Compares how far the ranks are in reading adapters, MAX_ADAPTERS at most; every rank calls it at the same point,
    with the same ones. `waits`: there is no step to compute, so that each rank first waits a moment."""
    here = [lora.find(reference) for reference in references]
    if waits:
        wait_for_any(adapter for adapter in here if not adapter.future.done())
    refusals = [adapter.refused() for adapter in here]
    states = bytes(
        _State.REFUSED if why else _State.READY if adapter.ready else _State.READING
        for adapter, why in zip(here, refusals, strict=True)
    )
    first = next((why for why in refusals if why), "")
    notes = channel.exchange(states + first.encode()[:MAX_ERROR_BYTES])
    ready, refused = list[LoRAReference](), dict[bytes, str]()
    for at, reference in enumerate(references):
        at_ranks = [note[at] for note in notes]
        if _State.REFUSED in at_ranks:
            rank = at_ranks.index(_State.REFUSED)
            if notes[rank].index(_State.REFUSED) == at:  # the text is this one's; that of another comes the next time
                refused[reference.digest] = f"rank {rank}: {notes[rank][len(here) :].decode(errors='ignore')}"
        elif set(at_ranks) == {_State.READY}:
            ready.append(reference)
    return AgreedAdapters(ready, refused)
