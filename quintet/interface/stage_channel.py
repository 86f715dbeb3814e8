"""Part of the contract: messages between pipeline stages, on platforms with communicators that have a stage_channel."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor


class PreviousStageFailed(RuntimeError):
    """Raised in a stage by a step that failed in the one before."""


class StageChannel(ABC):
    """Connection of the pipeline stages of a model, where ranks are processes and stages share out its layers.

    Every rank numbers the same steps, one begin() each. As many steps as there are stages may be in flight: begun, and
    their reports not yet collected. Each call waits only for what it returns.
    """

    stage: int  # this rank's, from 0
    stages: int

    @abstractmethod
    def begin(self) -> None:
        """Begins the next step: the calls that follow belong to it."""

    @abstractmethod
    def receive(self) -> Tensor:
        """Returns the bytes that this rank's peer in the previous stage sent: uint8 [N], which hold until this step's
        report(). PreviousStageFailed where the step has failed there. In all stages but the first."""

    @abstractmethod
    def send(self, tensors: Sequence[Tensor] | None) -> None:
        """Sends tensors to this rank's peer in the next stage, one behind the other; None: the step has failed here.
        Calls after the first in a step are ignored. In all stages but the last."""

    @abstractmethod
    def report(self, message: bytes, result: bytes = b"") -> None:
        """Reports how the step ended here, in 1000 bytes at most; the last stage adds the result. This rank has left
        the step: ranks that wait for it in a collective of the step get an error, as after Channel.exchange()."""

    @abstractmethod
    def collect(self) -> tuple[list[bytes], bytes]:
        """Ends the oldest step in flight and returns its reports of all ranks, in rank order, and the result of the
        last stage's first rank. Waits for all."""

    @abstractmethod
    def restart(self) -> None:
        """Drops all steps in flight, on every rank: all call it at the same time, after a step that failed."""
