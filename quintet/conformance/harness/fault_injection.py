"""Makes one step of an engine fail, through the contract alone: the platform's own step and copies are wrapped."""

from collections.abc import Callable, Iterable
from typing import Literal

from torch import Tensor, nn

from quintet.interface.platform import Device, Platform, State, Step
from quintet.interface.types import Batch, Outputs, ShapeBucket

Where = Literal["before", "after", "waiting"]  # the step runs; it has run; the host waits for what came out of it


class Interruption(KeyboardInterrupt):
    """Ctrl-C, as the engine sees it; a person's own is not taken for it."""


class Trap:
    """Goes off once, when it was set and the place was passed so many times."""

    def __init__(self) -> None:
        self._error: BaseException | None = None
        self._where: Where = "before"
        self._left = 0
        self.sprung = 0  # how often it went off

    def set(self, error: BaseException, where: Where, passes: int = 0) -> None:
        self._error, self._where, self._left = error, where, passes

    def pass_through(self, where: Where) -> None:
        if self._error is None or where != self._where:
            return
        if self._left > 0:
            self._left -= 1
            return
        error, self._error = self._error, None
        self.sprung += 1
        raise error

    def wrap_platform(self, platform: type[Platform]) -> type[Platform]:
        """The platform with this trap in it."""

        def open(self: Platform, rank: int) -> Device:
            return trap._wrap_device(platform.open(self, rank))

        def compile(self: Platform, model: nn.Module, buckets: Iterable[ShapeBucket]) -> Step:
            return trap._wrap_step(platform.compile(self, model, buckets))

        trap = self
        return type(f"Trapped{platform.__name__}", (platform,), {"open": open, "compile": compile})

    def _wrap_step(self, step: Step) -> Step:
        def trapped(state: State, batch: Batch) -> tuple[Outputs, State]:
            self.pass_through("before")
            result = step(state, batch)
            self.pass_through("after")
            return result

        return trapped

    def _wrap_device(self, device: Device) -> Device:
        """The same device, which the platform may know by more than the contract says, with another to_host()."""
        to_host = device.to_host

        def trapped(x: Tensor) -> Callable[[], Tensor]:
            wait = to_host(x)

            def waiting() -> Tensor:
                self.pass_through("waiting")
                return wait()

            return waiting

        vars(device)["to_host"] = trapped
        return device
