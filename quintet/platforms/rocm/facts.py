"""AMD GPUs of this machine, as their driver lists them in /sys/class/kfd: no library is asked, no device is woken."""

import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from quintet.config import Environment, read_environment
from quintet.interface.platform import Unavailable
from quintet.platforms.gpu import facts as gpu

GIB = 2**30
AMD = "0x1002"
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
INDEX = "pip install torch --index-url https://download.pytorch.org/whl/rocm7.2"
GROUPS = "add the user to the groups render and video (in a container, --group-add), and log in again"
# The FP8 type that a chip multiplies: MI300's has a bias of 8 and no -0, later chips have OCP's. None: widened.
FP8: Mapping[str, torch.dtype | None] = {
    **dict.fromkeys(("gfx90a", "gfx1100", "gfx1101", "gfx1102", "gfx1150", "gfx1151"), None),
    "gfx942": torch.float8_e4m3fnuz,
    **dict.fromkeys(("gfx950", "gfx1200", "gfx1201"), torch.float8_e4m3fn),
}
RDNA = ("gfx11", "gfx12")  # where graphs of Triton's kernels are reported to crash (vllm #34154)


@dataclass(frozen=True)
class RocmCard:
    """One GPU as the driver describes it."""

    name: str
    arch: str  # as compilers have it: gfx942
    memory: int  # bytes
    uuid: str  # as ROCR_VISIBLE_DEVICES has it
    node: str  # the render node's file name


@dataclass(frozen=True)
class RocmMachine:
    """Sources of the facts. The fields' defaults are this machine; a test gives others."""

    torch_hip: str | None = field(default_factory=lambda: torch.version.hip)
    torch_version: str = torch.__version__
    is_installed: Callable[[str], bool] = lambda name: importlib.util.find_spec(name) is not None
    usable: Callable[[Path], bool] = lambda path: os.access(path, os.R_OK | os.W_OK)
    environment: Callable[[], Environment] = read_environment
    sys: Path = Path("/sys")
    dev: Path = Path("/dev")
    compiler: Callable[[], str | None] = gpu.compiler
    header: Callable[[], Path] = gpu.header


def facts(machine: RocmMachine | None = None) -> gpu.GPUFacts | Unavailable:
    """The devices that torch would open, or every reason why it would not, each with what helps."""
    machine = machine or RocmMachine()
    cards = _cards(machine)
    ours = visible(cards, machine.environment())
    reasons = _of_driver(machine, cards, ours) + _of_packages(machine) + _of_archs(ours)
    if reasons:
        return gpu.combine_unavailable(reasons)
    return _facts(ours, machine)


def _facts(cards: Sequence[RocmCard], machine: RocmMachine) -> gpu.GPUFacts:
    kinds = {FP8[card.arch] for card in cards}
    shown, arches = (", ".join(dict.fromkeys(each)) for each in zip(*((c.name, c.arch) for c in cards), strict=True))
    memory = min(card.memory for card in cards)
    detail = f"{shown}; {memory / GIB:.0f} GiB, {arches}; torch {machine.torch_version} (HIP {machine.torch_hip})"
    names, fp8 = tuple(card.name for card in cards), kinds.pop() if len(kinds) == 1 else None
    unsound = next((card.arch for card in cards if card.arch.startswith(RDNA)), None)
    eager = f"graphs of Triton kernels are reported to crash on {unsound} (vllm #34154)" if unsound else ""
    lacking = gpu.missing_launcher(machine.compiler(), machine.header())
    return gpu.GPUFacts(names, DTYPES, fp8, memory, detail, lacking, eager)


def _of_driver(machine: RocmMachine, cards: Sequence[RocmCard], ours: Sequence[RocmCard]) -> list[Unavailable]:
    """Returns what is wrong with the driver: it is missing, or this process may not use it."""
    kfd = machine.dev / "kfd"
    if not (machine.sys / "class" / "kfd").exists():
        if not gpu.on_the_bus(machine.sys / "bus" / "pci" / "devices", AMD):
            return [Unavailable("no AMD GPU driver and no AMD GPU here", gpu.OTHER_DEVICE)]
        return [Unavailable("an AMD GPU is here, and no driver for it", "install the driver amdgpu (amdgpu-dkms)")]
    if not cards:
        return [Unavailable("the driver amdgpu is loaded and shows no GPU that computes", "look at dmesg and rocminfo")]
    if not kfd.exists():
        need = "give the container its devices: docker run --device /dev/kfd --device /dev/dri"
        return [Unavailable(f"{len(cards)} x {cards[0].name} here, and no {kfd}", need)]
    if not ours:
        hidden = f"{len(cards)} x {cards[0].name} here, and no device is visible to this process"
        return [Unavailable(hidden, "unset ROCR_VISIBLE_DEVICES, HIP_VISIBLE_DEVICES and CUDA_VISIBLE_DEVICES")]
    shut = [path for path in (kfd, *(machine.dev / "dri" / card.node for card in ours)) if not machine.usable(path)]
    return [Unavailable(f"no permission to open {' and '.join(map(str, shut))}", GROUPS)] if shut else []


def _of_packages(machine: RocmMachine) -> list[Unavailable]:
    built = Unavailable(f"torch {machine.torch_version} was built without HIP", INDEX)
    compiler = Unavailable("triton is not installed", f"it comes with torch's build for ROCm: {INDEX}")
    return [built] * (machine.torch_hip is None) + [compiler] * (not machine.is_installed("triton"))


def _of_archs(ours: Sequence[RocmCard]) -> list[Unavailable]:
    unknown = dict.fromkeys(f"{card.name} is {card.arch}" for card in ours if card.arch not in FP8)
    known, hide = ", ".join(FP8), "hide it with ROCR_VISIBLE_DEVICES, or use another device"
    return [Unavailable(f"{reason}, and kernels are compiled for {known}", hide) for reason in unknown]


def _cards(machine: RocmMachine) -> list[RocmCard]:
    """The driver's GPUs, in its order, which is the runtime's; without what it hides from this container."""
    nodes = (machine.sys / "class" / "kfd" / "kfd" / "topology" / "nodes").glob("*/properties")
    found = []
    for path in sorted(nodes, key=lambda path: int(path.parent.name)):
        properties = _properties(path)
        version = int(properties.get("gfx_target_version", 0))
        if not version or not int(properties.get("simd_count", 0)):
            continue  # a processor's node
        arch = f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"
        banks = [_properties(bank) for bank in path.parent.glob("mem_banks/*/properties")]
        memory = sum(int(bank.get("size_in_bytes", 0)) for bank in banks if bank.get("heap_type") in ("1", "2"))
        node = f"renderD{properties.get('drm_render_minor', 0)}"
        name = gpu.read_sysfs(machine.sys / "class" / "drm" / node / "device" / "product_name") or f"AMD {arch}"
        found.append(RocmCard(name, arch, memory, f"GPU-{int(properties.get('unique_id', 0)):016x}", node))
    return found


def visible(cards: Sequence[RocmCard], environment: Environment) -> list[RocmCard]:
    """In torch's order: ROCR_VISIBLE_DEVICES chooses of all, HIP_VISIBLE_DEVICES (or CUDA's) of those.

    A list ends at its first entry that names none (docs.amd.com, "GPU isolation techniques", ROCm 7.1).
    """
    ours = list(cards)
    for chosen in (
        environment.rocr_visible_devices,
        environment.cuda_visible_devices
        if environment.hip_visible_devices is None
        else environment.hip_visible_devices,
    ):
        if chosen is None:
            continue
        order: list[RocmCard] = []
        for word in map(str.strip, chosen.split(",")):
            named = [card for place, card in enumerate(ours) if word.lower() in (str(place), card.uuid.lower())]
            if not named:
                break
            order += named
        ours = order
    return ours


def _properties(path: Path) -> dict[str, str]:
    """Lines of a name and a number each; nothing where the kernel does not let this process read them."""
    lines = (line.split() for line in gpu.read_sysfs(path).splitlines())
    return {words[0]: words[1] for words in lines if len(words) == 2}
