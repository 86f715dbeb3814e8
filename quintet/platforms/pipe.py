"""Part of the contract: what stages of a model hand on to one another, on platforms whose communicator has a pipe."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor


class HandedNothing(RuntimeError):
    """Raised in a stage by a step that failed in the one before."""


class Pipe(ABC):
    """What the stages of a model hand on, where ranks are processes and layers are shared out over stages of them.

    Every rank numbers the same steps, one begin() each. As many as there are stages may be under way: begun, and not
    heard of by said(). None of these calls waits but for what it returns.
    """

    stage: int  # this rank's, from 0
    stages: int

    @abstractmethod
    def begin(self) -> None:
        """The next step: what follows is of it."""

    @abstractmethod
    def take_over(self) -> Tensor:
        """What this rank's like in the stage before has handed on, as bytes: uint8 [N], which hold until this step's
        say(). HandedNothing where the step has failed there. In all stages but the first."""

    @abstractmethod
    def hand_on(self, tensors: Sequence[Tensor] | None) -> None:
        """To this rank's like in the next stage, one tensor behind the other; None: the step has failed here. What
        follows the first call in a step is passed over. In all stages but the last."""

    @abstractmethod
    def say(self, note: bytes, result: bytes = b"") -> None:
        """How the step ended here, in 1000 bytes at most; the last stage adds what came out. This rank has left the
        step: who waits for it in a collective of the step gets an error, as after Channel.exchange()."""

    @abstractmethod
    def said(self) -> tuple[list[bytes], bytes]:
        """Of the first step that is under way, which is no more: what every rank has said, in rank order, and the
        result of the last stage's first rank. Waits for all."""

    @abstractmethod
    def begin_again(self) -> None:
        """Nothing is under way, on any rank: all call it at the same time, after a step that failed."""
