"""Needs of a request, which it waits for before its first step: its grammar, its adapter."""

from collections.abc import Iterable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, Protocol

from quintet.engine.request import Request

WAIT_SECONDS = 0.01  # that an engine with nothing else to do waits for one of them before it looks around


class Need(Protocol):
    """One of them. It becomes ready, or is refused; ranks that are processes wait until it is so on each."""

    what: str  # as errors name it

    @property
    def future(self) -> "Future[Any]":
        """Its making."""

    @property
    def ready(self) -> bool:
        """True if it is there."""

    def refused(self) -> str:
        """Returns why it will not be there; empty if it is, or still may be."""

    def wait(self) -> str:
        """Waits until it is ready or refused, and returns refused()."""


def needs_of(request: Request) -> list[Need]:
    """Returns the grammar and the adapter of a request, where it has them."""
    found: tuple[Need | None, ...] = (request.grammar, request.lora)
    return [need for need in found if need is not None]


def wait_for_any(needs: Iterable[Need]) -> None:
    """Waits until one of them is ready or refused, at most WAIT_SECONDS seconds."""
    wait([need.future for need in needs], WAIT_SECONDS, FIRST_COMPLETED)


def refusal(needs: Iterable[Need]) -> str:
    """Returns why a request with these needs cannot be served; empty if it can, or still may be."""
    found = ((need.what, need.refused()) for need in needs)
    return next((f"{what} cannot be served: {why}" for what, why in found if why), "")
