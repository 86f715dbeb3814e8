"""Protocol of proposers: sources of draft tokens for requests that decode."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Protocol

from quintet.engine.request import Request


class Proposer(Protocol):
    """Proposes draft tokens. Sampled tokens never depend on them, only the number of steps does.

    Where ranks are processes, each rank has a proposer of its own, and all must propose the same tokens: from the
    requests alone, without clocks and without random numbers that are not seeded.
    """

    num_drafts: int  # most draft tokens of a request in a step

    @abstractmethod
    def propose(self, room: Sequence[tuple[Request, int]]) -> None:
        """Puts into `draft_tokens` of each request at most as many tokens as its number in `room` allows, at least 1.

        The tokens follow `token_ids`, all of which are known, and are less than the vocabulary's size. `draft_tokens`
        is empty at the call. The scheduler may take fewer.
        """
        ...

    def may_propose(self, requests: Sequence[Request]) -> bool:
        """Returns whether one of these requests may get drafts before the next step. False lets that step be planned
        while another runs. The last token of each is still being sampled; runs on the host only."""
        return bool(requests)

    def finish(self, request: Request) -> None:
        """Called when a request has ended, for whatever reason; its `token_ids` are all known."""
        return

    def start_over(self) -> None:
        """Called when all requests are computed again: neither pages nor states hold anything. Known tokens stay."""
        return
