"""Probe of Triton providers: the device that kernels run on here, or why they do not run."""

import importlib.util
from collections.abc import Callable

import torch

Check = Callable[[torch.device], str | None]  # runs a kernel on something small; says what was wrong with the result


def probing(check: Check) -> Callable[[], str | None]:
    """A provider's probe: runs `check` on this process's device, if Triton and a device are there."""

    def probe() -> str | None:
        if importlib.util.find_spec("triton") is None:
            return "Triton is not installed; `pip install triton`, or the wheel that belongs to your torch"
        device = device_here()
        if device is None:
            return "torch finds no GPU; Triton compiles for GPUs alone"
        try:
            return check(device)
        except Exception as error:  # compilers and drivers fail in many ways; each is a reason not to serve
            first = str(error).strip().splitlines()
            return f"its kernel fails on {device.type}: {type(error).__name__}: {first[0] if first else 'no message'}"

    return probe


def device_here() -> torch.device | None:
    """The accelerator of this process; the host where Triton interprets its kernels; None without either."""
    from triton import knobs

    if knobs.runtime.interpret:
        return torch.device("cpu")
    return torch.accelerator.current_accelerator(check_available=True)  # a build for GPUs may find none
