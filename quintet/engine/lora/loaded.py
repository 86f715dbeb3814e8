"""An adapter that requests name, while it is read, and in host memory."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import wait as wait_for
from contextlib import suppress
from dataclasses import dataclass

from quintet.engine.pooling.adapted_heads import Heads
from quintet.layers.lora import PackedLoRA
from quintet.lora.errors import public_text
from quintet.lora.request import LoRAReference

CLOSED = "the engine was closed"


@dataclass(frozen=True)
class PackedAdapter:
    """An adapter in host memory."""

    ranks: Sequence[PackedLoRA]  # for each rank of this process
    heads: Heads | None = None  # pooling heads in place of the model's
    needs_base: bool = False  # its tensors depend on the model's weights, too


class LoadedLoRA:
    """An adapter that is read and packed for each rank of this process: a need of the requests that name it. It waits
    for a place in host memory, and may lose it while requests wait; then it is read again."""

    def __init__(self, reference: LoRAReference) -> None:
        self.reference, self.what = reference, f"the adapter {reference.name!r}"
        self.future: Future[PackedAdapter] = Future()
        self.has_place = False  # in host memory: it is there, or is being read
        self.confirmed = False  # all ranks have it, where ranks are processes
        self.users = 0  # requests that have not ended

    @property
    def digest(self) -> bytes:
        return self.reference.digest

    @property
    def ready(self) -> bool:
        """True if it can be written to the device."""
        return self.future.done() and self.future.exception() is None

    @property
    def packed(self) -> PackedAdapter:
        """The adapter, once it is ready."""
        return self.future.result()

    @property
    def has_extras(self) -> bool:
        """True if it has more than the A and B of products; it is ready."""
        return self.packed.ranks[0].has_extras

    def refused(self) -> str:
        """Returns why it cannot be served; empty if it can, or still may be."""
        return refusal_of(self.future)

    def wait(self) -> str:
        """Waits until it is ready or refused, and returns refused()."""
        wait_for([self.future])
        return self.refused()

    def pack_again(self, pack: Callable[[LoRAReference], PackedAdapter]) -> None:
        """Packs it with the weights that the model has now, or refuses it; no step runs."""
        self.future = Future()
        try:
            self.future.set_result(pack(self.reference))
        except Exception as error:
            self.future.set_exception(error)

    def lose_place(self) -> None:
        """Frees its tensors: it waits for a place again."""
        self.has_place = self.confirmed = False
        if self.ready:
            self.future = Future()

    def close(self) -> None:
        """Refuses it if it is not there."""
        with suppress(InvalidStateError):
            self.future.set_exception(RuntimeError(CLOSED))


def refusal_of(future: "Future[PackedAdapter]") -> str:
    """Returns why an adapter could not be read, as callers of a server may know it; empty if it was, or still is."""
    error = future.exception() if future.done() else None
    return "" if error is None else public_text(error)
