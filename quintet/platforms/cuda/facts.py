"""NVIDIA GPUs of this machine, from the driver's management library (NVML): no context is made, no device is woken."""

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from quintet.interface.platform import Unavailable
from quintet.platforms.gpu.facts import (
    OTHER_DEVICE,
    GPUFacts,
    combine_unavailable,
    compiler,
    header,
    missing_launcher,
    on_the_bus,
)

GIB = 2**30
MIN_CAPABILITY = (7, 5)  # compute capability: tensor cores that Triton and torch's builds for CUDA 12.8 and later serve
BF16, FP8 = (8, 0), (8, 9)  # the first to multiply in them
DRIVER = Path("/proc/driver/nvidia/version")
NVIDIA = "0x10de"
INDEX = "--index-url https://download.pytorch.org/whl/cu"


@dataclass(frozen=True)
class CudaCard:
    """One GPU as the driver describes it."""

    name: str
    capability: tuple[int, int]
    memory: int  # bytes


@dataclass(frozen=True)
class CudaMachine:
    """Sources of the facts. The fields' defaults are this machine; a test gives others."""

    torch_cuda: str | None = field(default_factory=lambda: torch.version.cuda)
    torch_version: str = torch.__version__
    is_installed: Callable[[str], bool] = lambda name: importlib.util.find_spec(name) is not None
    nvml: Callable[[], Any] = lambda: importlib.import_module("pynvml")
    visible: Callable[[int], list[int]] = lambda count: visible(count)
    driver: Path = DRIVER
    pci: Path = Path("/sys/bus/pci/devices")
    compiler: Callable[[], str | None] = compiler
    header: Callable[[], Path] = header


@dataclass(frozen=True)
class CudaDriver:
    """Driver and GPUs as the management library reports them."""

    version: str
    cuda: tuple[int, int]  # the newest that it serves
    cards: tuple[CudaCard, ...]


def facts(machine: CudaMachine | None = None) -> GPUFacts | Unavailable:
    """The devices that torch would open, or every reason why it would not, each with what helps."""
    machine = machine or CudaMachine()
    reasons: list[Unavailable] = []
    driver = _driver(machine)
    if isinstance(driver, Unavailable):
        reasons.append(driver)
    reasons += _of_torch(machine, None if isinstance(driver, Unavailable) else driver)
    if not machine.is_installed("triton"):
        reasons.append(Unavailable("triton is not installed", "pip install triton"))
    if reasons or isinstance(driver, Unavailable):
        return combine_unavailable(reasons)
    ours = machine.visible(len(driver.cards))
    cards = [driver.cards[index] for index in ours if index < len(driver.cards)]
    if not cards:
        found = f"{len(driver.cards)} x {driver.cards[0].name}" if driver.cards else "the driver"
        return Unavailable(
            f"{found} here, and no device is visible to this process",
            "unset CUDA_VISIBLE_DEVICES, or give the container its GPUs (docker run --gpus all)",
        )
    return _facts(cards, driver, machine)


def _facts(cards: Sequence[CudaCard], driver: CudaDriver, machine: CudaMachine) -> GPUFacts | Unavailable:
    least = min(card.capability for card in cards)
    if least < MIN_CAPABILITY:
        old = next(card for card in cards if card.capability == least)
        return Unavailable(
            f"{old.name} has compute capability {_dotted(least)}, and {_dotted(MIN_CAPABILITY)} is the least that "
            "kernels are "
            "compiled for",
            "hide it with CUDA_VISIBLE_DEVICES, or use another device",
        )
    dtypes = (torch.bfloat16, torch.float16, torch.float32) if least >= BF16 else (torch.float16, torch.float32)
    memory = min(card.memory for card in cards)
    shown = ", ".join(dict.fromkeys(card.name for card in cards))
    detail = (
        f"{shown}; {memory / GIB:.0f} GiB, compute capability {_dotted(least)}; driver {driver.version} "
        f"(CUDA {_dotted(driver.cuda)}), torch {machine.torch_version} (CUDA {machine.torch_cuda})"
    )
    names = tuple(card.name for card in cards)
    fp8 = torch.float8_e4m3fn if least >= FP8 else None
    return GPUFacts(names, dtypes, fp8, memory, detail, missing_launcher(machine.compiler(), machine.header()))


def _of_torch(machine: CudaMachine, driver: CudaDriver | None) -> list[Unavailable]:
    """Returns what torch's build lacks, or that the driver is too old for it."""
    if machine.torch_cuda is None:
        index = "https://download.pytorch.org/whl/cu" + ("130" if driver is None else _build(driver.cuda))
        return [
            Unavailable(
                f"torch {machine.torch_version} was built without CUDA", f"pip install torch --index-url {index}"
            )
        ]
    wanted = int(machine.torch_cuda.split(".")[0])
    if driver is None or driver.cuda[0] >= wanted:  # within a major version, an older driver serves
        return []
    return [
        Unavailable(
            f"driver {driver.version} serves CUDA up to {_dotted(driver.cuda)}, too old for torch "
            f"{machine.torch_version} (CUDA {machine.torch_cuda})",
            f"update the driver, or pip install torch {INDEX}{_build(driver.cuda)}",
        )
    ]


def _build(cuda: tuple[int, int]) -> str:
    """torch's build for a driver of this CUDA version."""
    return "130" if cuda >= (13, 0) else "128" if cuda >= (12, 8) else "126"


def _driver(machine: CudaMachine) -> CudaDriver | Unavailable:
    """By nvidia-ml-py; without it, what the file system says of a driver."""
    if not machine.is_installed("pynvml"):
        if machine.driver.exists():
            return Unavailable("nvidia-ml-py is not installed, so the GPUs cannot be asked", "pip install nvidia-ml-py")
        return _no_driver(machine, "nvidia-ml-py is not installed", "pip install nvidia-ml-py")
    nvml = machine.nvml()
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        if machine.driver.exists():
            return Unavailable(f"the NVIDIA driver does not answer: {error}", "look at nvidia-smi; restart the machine")
        return _no_driver(machine)
    try:
        cuda = int(nvml.nvmlSystemGetCudaDriverVersion())
        count = nvml.nvmlDeviceGetCount()
        cards = tuple(_card(nvml, nvml.nvmlDeviceGetHandleByIndex(index)) for index in range(count))
        return CudaDriver(_text(nvml.nvmlSystemGetDriverVersion()), (cuda // 1000, cuda % 1000 // 10), cards)
    except nvml.NVMLError as error:
        return Unavailable(f"the NVIDIA driver does not say what GPUs there are: {error}", "look at nvidia-smi")
    finally:
        nvml.nvmlShutdown()


def _card(nvml: Any, handle: Any) -> CudaCard:
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    memory = int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
    return CudaCard(_text(nvml.nvmlDeviceGetName(handle)), (int(major), int(minor)), memory)


def _no_driver(machine: CudaMachine, also: str = "", remedy: str = "") -> Unavailable:
    """There is none; whether there is a card to drive decides what helps."""
    if not on_the_bus(machine.pci, NVIDIA):
        return Unavailable("; ".join(filter(None, ("no NVIDIA driver and no NVIDIA GPU here", also))), OTHER_DEVICE)
    reasons, remedies = ("an NVIDIA GPU is here, and no driver for it", also), ("install the NVIDIA driver", remedy)
    return Unavailable("; ".join(filter(None, reasons)), "; ".join(filter(None, remedies)))


def visible(count: int) -> list[int]:
    """The driver's numbers of the devices that this process may see, in torch's order. Makes no context."""
    seen = torch.cuda.device_count()  # by CUDA_VISIBLE_DEVICES, asked of the management library
    if seen >= count:
        return list(range(count))
    translate = getattr(torch.cuda, "_get_nvml_device_index", None)
    return [translate(index) if translate else index for index in range(seen)]


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
