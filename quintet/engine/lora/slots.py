"""Slots of the device: which adapter each holds for the requests that run. Bookkeeping alone; no tensors."""

from collections import OrderedDict
from collections.abc import Collection

from quintet.engine.request import Request


class LoRASlots:
    """A slot is an adapter's as long as a running request has that adapter; of the others, the one that was not used
    for longest is given away first."""

    def __init__(self, count: int) -> None:
        self._held: OrderedDict[int, bytes] = OrderedDict((slot, b"") for slot in range(1, count + 1))
        self._pinned: set[bytes] = set()
        self._seen: tuple[int, frozenset[bytes]] = -1, frozenset()  # running requests, and their adapters

    def begin_plan(self) -> None:
        """Called before the first acquire() of a step: other requests may run than in the last one."""
        self._seen = -1, frozenset()

    def acquire(self, request: Request, running: Collection[Request]) -> bool:
        """Gives a request that is about to start its adapter's slot -> whether there is one."""
        assert request.lora is not None
        digest = request.lora.digest
        if len(running) != self._seen[0]:  # within a plan requests are only added: the set is made when one has started
            self._seen = len(running), frozenset(each.lora.digest for each in running if each.lora is not None)
        request.lora_slot = self._find(digest, self._seen[1])
        if request.lora_slot:
            self._held[request.lora_slot] = digest
            self._held.move_to_end(request.lora_slot)
        return request.lora_slot != 0

    def _find(self, digest: bytes, used: Collection[bytes]) -> int:
        """Returns the slot that an adapter has or may take; 0: there is none."""
        own = next((slot for slot, held in self._held.items() if held == digest), 0)
        kept = {*used, *self._pinned}
        return own or next((slot for slot, held in self._held.items() if held not in kept), 0)

    def pin(self, digest: bytes) -> None:
        """Keeps an adapter's slot for it from its next request on. ValueError if no slot would be left for others."""
        if digest not in self._pinned and len(self._pinned) + 1 >= len(self._held):
            raise ValueError(
                f"{len(self._pinned)} of {len(self._held)} slots are pinned, and one must stay free; raise max_loras"
            )
        self._pinned.add(digest)

    def unpin(self, digest: bytes) -> None:
        """Lets the slot be given away again."""
        self._pinned.discard(digest)

    def check_integrity(self, running: Collection[Request]) -> None:
        """Asserts that each running request's slot holds its adapter."""
        for request in running:
            if request.lora is not None:
                assert self._held[request.lora_slot] == request.lora.digest, f"{request} has another adapter's slot"
            else:
                assert request.lora_slot == 0, f"{request} has a slot and no adapter"
