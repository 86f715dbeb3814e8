"""How a kernel is started: put on the queue, or, while a step is captured, written down for later."""

import threading
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from acme.tensor import AcmeTensor, Buffer, leaves, mapped, meta, tensors

if TYPE_CHECKING:
    from acme.device import AcmeDevice
    from acme.program import Recording

Kernel = Callable[..., Any]  # host tensors in the place of the device's -> a host tensor, or a tuple of them


class _Capturing(threading.local):
    recording: "Recording | None" = None


CAPTURING = _Capturing()  # of this thread


def launch(kernel: Kernel, shape: Kernel, *args: Any) -> Any:
    """Starts kernel(*args) -> its results, which are not there yet. `shape` is called with meta tensors and says what
    the results look like: torch's own functions do, and so does the specification of an op."""
    if CAPTURING.recording is not None:
        return CAPTURING.recording.kernel(kernel, shape, args)
    given = tensors(args)
    if not given or any(isinstance(each, Tensor) and not isinstance(each, AcmeTensor) for each in leaves(args)):
        raise TypeError(f"{kernel.__name__} takes tensors that are on the device; bring them with Device.to_device()")
    device = given[0].buffer.device
    made = mapped(device.shapes.find(shape, args), device.empty)
    enqueue(device, kernel, args, [each.buffer for each in tensors(made)])
    return made


def enqueue(device: "AcmeDevice", kernel: Kernel, args: tuple[Any, ...], results: list[Buffer]) -> None:
    """The kernel's results go to these buffers; if it raises, they remember the error for whoever reads them."""

    def work() -> None:
        try:
            found = list(leaves(kernel(*mapped(args, read))))
        except BaseException as error:  # the queue goes on; the error surfaces where somebody waits
            for buffer in results:
                buffer.error = error.with_traceback(None)  # whose frames hold these very buffers
        else:
            for buffer, value in zip(results, found, strict=True):
                buffer.value = value

    ticket = device.queue.put(work)
    for buffer in results:
        buffer.ticket = ticket


def read(x: Any) -> Any:
    return x.buffer.read() if isinstance(x, AcmeTensor) else x


class Shapes:
    """What results look like, by the kernel and what it was given: found once each."""

    def __init__(self) -> None:
        self._found: dict[Hashable, Any] = {}

    def find(self, shape: Kernel, args: tuple[Any, ...]) -> Any:
        """A meta tensor for each result."""
        key = shape, mapped(args, _signature)
        if key not in self._found:
            self._found[key] = shape(*mapped(args, meta))
        return self._found[key]


def _signature(x: Any) -> Hashable:
    return (x.shape, x.dtype) if isinstance(x, Tensor) else (type(x), x)
