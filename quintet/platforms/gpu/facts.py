"""What a GPU platform knows of its devices before it opens one, and how it says what is missing."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from quintet.platforms.interface import Unavailable

DISPLAYS = ("0x03", "0x12")  # PCI classes: displays, and processing accelerators, as an MI300X is
ELSEWHERE = "use another device"  # the remedy where there is none


@dataclass(frozen=True)
class Facts:
    """Devices that may be opened, in the order of their numbers."""

    names: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]  # that all of them multiply, best first
    fp8: torch.dtype | None  # the 8-bit type of their products
    memory: int  # bytes of the smallest; 0: not known before it is opened
    detail: str  # for a person


def together(missing: Sequence[Unavailable]) -> Unavailable:
    """All of them in one; where there is no device, no other remedy would help."""
    remedies = list(dict.fromkeys(each.remedy for each in missing))
    remedies = [ELSEWHERE] if ELSEWHERE in remedies else remedies
    return Unavailable("; ".join(each.reason for each in missing), "; ".join(remedies))


def on_the_bus(devices: Path, vendor: str, classes: tuple[str, ...] = DISPLAYS) -> bool:
    """Whether a device of the vendor's and of one of these classes is among those that sysfs lists there."""
    theirs = [each for each in devices.glob("*") if read(each / "vendor") == vendor]
    return any(read(each / "class").startswith(classes) for each in theirs)


def read(path: Path) -> str:
    """A file of sysfs, "" if it is not there."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
