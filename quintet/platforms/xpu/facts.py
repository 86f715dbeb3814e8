"""Intel GPUs of this machine, read from sysfs: no context is made, no device is woken. Unverified on a GPU.

Sysfs has no product name and no memory size: torch knows them in the process that uses the device.
"""

import ctypes
import importlib.util
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch

from quintet.config import Environment, read_environment
from quintet.interface.platform import Unavailable
from quintet.platforms.gpu.facts import OTHER_DEVICE, GPUFacts, combine_unavailable, on_the_bus, read_sysfs

INTEL, DISPLAY = "0x8086", ("0x03",)  # of its processing accelerators, none is a GPU
LOADER, DRIVER = "libze_loader.so.1", "libze_intel_gpu.so.1"  # of Level Zero: what finds drivers, and Intel's
WHEELS = "--index-url https://download.pytorch.org/whl/xpu"
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Family(NamedTuple):
    """GPUs with numbers of one range (include/drm/intel/pciids.h of Linux 6.17)."""

    name: str
    integrated: bool = False  # in a processor: its memory is the host's
    unsound: tuple[int, int] | None = None  # the first version of torch with graphs that are not trusted there
    dtypes: tuple[torch.dtype, ...] = DTYPES


# On Xe2 and later, waiting for the whole device after a replay crashes (pytorch #187277, in 2.13); the call that does
# it was taken back (#187306) and came again (#191900).
XE2, MAX = (2, 13), 0x0B
FAMILIES = {  # by the first byte of the device's number: those that torch.xpu is built for
    MAX: Family("Data Center GPU Max"),
    0x56: Family("Arc A or Flex"),
    0x64: Family("Lunar Lake", True, XE2),
    0x7D: Family(
        "Meteor or Arrow Lake", True, dtypes=(torch.float16, torch.bfloat16, torch.float32)
    ),  # no matrix units
    0xB0: Family("Panther Lake", True, XE2),
    0xE2: Family("Arc B (Battlemage)", False, XE2),
}
# before Xe-HPG: torch has no kernels for them
OLD = frozenset({0x19, 0x3E, 0x3F, 0x45, 0x46, 0x49, 0x4C, 0x4E, 0x59, 0x5A, 0x87, 0x8A, 0x9A, 0x9B, 0xA7})
UNKNOWN = Family("GPU of a family unknown here", False, (2, 11))


@dataclass(frozen=True)
class XpuCard:
    """One render node (renderD128), the number of its PCI device, and its tiles: each is a device to Level Zero."""

    node: str
    number: int
    tiles: int

    @property
    def family(self) -> Family:
        return FAMILIES.get(self.number >> 8, UNKNOWN)

    @property
    def name(self) -> str:
        return f"Intel {self.family.name} [{self.number:04x}]"


@dataclass(frozen=True)
class XpuMachine:
    """Sources of the facts: by default this machine."""

    torch_xpu: str | None = field(default_factory=lambda: getattr(torch.version, "xpu", None))
    torch_version: str = torch.__version__
    triton: Callable[[], str | None] = lambda: triton()
    loads: Callable[[str], bool] = lambda library: loads(library)
    opens: Callable[[Path], bool] = lambda node: os.access(node, os.R_OK | os.W_OK)
    is_installed: Callable[[str], bool] = lambda name: importlib.util.find_spec(name) is not None
    environment: Callable[[], Environment] = read_environment
    sys: Path = Path("/sys")
    dev: Path = Path("/dev")


def facts(machine: XpuMachine | None = None) -> GPUFacts | Unavailable:
    """The devices that torch would open, or every reason why it would not, each with what helps."""
    machine = machine or XpuMachine()
    cards = _cards(machine.sys / "class" / "drm")
    served = [card for card in cards if card.number >> 8 not in OLD]
    served = [card for card in served if (machine.dev / "dri" / card.node).exists()] or served  # a container's share
    missing = [*_of_devices(machine, cards, served), *_of_software(machine, bool(cards))]
    if missing:
        return combine_unavailable(missing)
    if not (ours := _visible(served, machine.environment())):
        return Unavailable(f"{served[0].name} here, hidden by ZE_AFFINITY_MASK", "unset ZE_AFFINITY_MASK")
    dtypes = next((card.family.dtypes for card in ours if card.family.dtypes != DTYPES), DTYPES)
    detail = f"{', '.join(dict.fromkeys(card.name for card in ours))}; torch {machine.torch_version}"
    if machine.is_installed("intel_extension_for_pytorch"):  # of no version that fits a torch which serves here
        detail += "; intel-extension-for-pytorch is not used: it ended with torch 2.8"
    # no matrix unit of these multiplies 8-bit floats: activations in them would gain nothing
    return GPUFacts(tuple(card.name for card in ours), dtypes, None, 0, detail)


def ungraphed(names: Iterable[str], version: str) -> str | None:
    """Why steps are not captured on these devices by this torch; None if they are."""
    now = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    families = {name: next((each for each in FAMILIES.values() if each.name in name), UNKNOWN) for name in names}
    unsound = [name for name, family in families.items() if family.unsound is not None and now >= family.unsound]
    return f"graphs of torch {version} are not sound on {unsound[0]} (pytorch #187277)" if unsound else None


def _of_devices(machine: XpuMachine, cards: Sequence[XpuCard], served: Sequence[XpuCard]) -> list[Unavailable]:
    """Returns what is wrong with the devices that the kernel shows."""
    if not cards:
        if on_the_bus(machine.sys / "bus" / "pci" / "devices", INTEL, DISPLAY):
            return [Unavailable("an Intel GPU is here, and no driver (i915 or xe) has it", "install a newer kernel")]
        return [Unavailable("no Intel GPU here", OTHER_DEVICE)]
    if not served:
        return [Unavailable(f"{cards[0].number:04x} is an Intel GPU that torch has no kernels for", OTHER_DEVICE)]
    missing = []
    for node in (machine.dev / "dri" / card.node for card in served):
        if not node.exists():
            missing.append(Unavailable(f"{node} is not there", "give the container its GPUs (--device /dev/dri)"))
        elif not machine.opens(node):
            group = "join the group render (in a container, --group-add), and log in again"
            missing.append(Unavailable(f"no permission to open {node}", group))
    return missing


def _of_software(machine: XpuMachine, driven: bool) -> list[Unavailable]:
    """Returns the software that is missing between the kernel and ours."""
    needed = [
        (not driven or machine.loads(LOADER), f"Level Zero's loader ({LOADER}) is missing", "install libze1"),
        (not driven or machine.loads(DRIVER), f"Intel's driver ({DRIVER}) is missing", "install libze-intel-gpu1"),
        (machine.torch_xpu, f"torch {machine.torch_version} was built without XPU", f"pip install torch {WHEELS}"),
        (machine.triton() is None, machine.triton() or "", f"pip install triton-xpu {WHEELS}"),
    ]
    return [Unavailable(reason, remedy) for there, reason, remedy in needed if not there]


def _cards(drm: Path) -> list[XpuCard]:
    """In Level Zero's order: those in a processor last, each sort as it stands on the bus."""
    found = []
    for node in sorted(drm.glob("renderD*"), key=lambda each: (os.path.realpath(each / "device"), each.name)):
        if read_sysfs(node / "device" / "vendor") == INTEL:
            number = int(read_sysfs(node / "device" / "device"), 16)
            found.append(XpuCard(node.name, number, _tiles(node / "device", number)))
    return sorted(found, key=lambda card: card.family.integrated)


def _tiles(device: Path, number: int) -> int:
    """As xe shows them; i915 shows groups of engines, of which a Max GPU has one for each tile."""
    shown = len(list(device.glob("tile[0-9]*"))) or len(list(device.glob("drm/card*/gt/gt[0-9]*"))) * (
        number >> 8 == MAX
    )
    return max(1, shown)


def _visible(cards: Sequence[XpuCard], environment: Environment) -> list[XpuCard]:
    """A device for each tile, unless they are asked for as one; what ZE_AFFINITY_MASK leaves of them, where it names
    whole ones. Where any stands by itself, torch shows none of a processor's."""
    composite = environment.ze_flat_device_hierarchy == "COMPOSITE"
    seen = [card for card in cards for _ in range(1 if composite else card.tiles)]
    wanted = [part.strip() for part in (environment.ze_affinity_mask or "").split(",")]
    if all(part.isdecimal() for part in wanted):
        seen = [seen[int(part)] for part in dict.fromkeys(wanted) if int(part) < len(seen)]
    return [card for card in seen if not card.family.integrated] or seen


def triton() -> str | None:
    """Returns what is missing of Triton, without importing it."""
    found = importlib.util.find_spec("triton")
    if found is None or found.origin is None:
        return "triton is not installed"
    there = (Path(found.origin).parent / "backends" / "intel").is_dir()
    return None if there else "triton is installed without Intel's backend"


def loads(library: str) -> bool:
    """True if the linker finds the library. Loaded, it does nothing yet."""
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True
