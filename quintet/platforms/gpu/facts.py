"""Facts about the devices of a GPU platform before one is opened, and messages about what is missing."""

import shutil
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from quintet.config import read_environment
from quintet.interface.platform import Unavailable

DISPLAY_CLASSES = ("0x03", "0x12")  # PCI classes: displays, and processing accelerators, as an MI300X is
OTHER_DEVICE = "use another device"  # the remedy where there is none


@dataclass(frozen=True)
class GPUFacts:
    """Devices that may be opened, in the order of their numbers."""

    names: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]  # that all of them multiply, best first
    fp8: torch.dtype | None  # the 8-bit type of their products
    memory: int  # bytes of the smallest; 0: not known before it is opened
    detail: str  # for a person
    warning: str = ""  # why it runs far slower than it could, and what helps
    eager_reason: str = ""  # why no step is captured unless it is asked for


def missing_launcher(compiler: str | None, header: Path) -> str:
    """Why Triton cannot build its launcher, a small C library, and what helps; "" if it can. An engine without Triton
    still runs, on torch. (A launcher that lies in Triton's cache needs no compiler, so this is no reason to refuse.)"""
    missing = [("no C compiler", "gcc")] * (compiler is None) + [(f"no {header}", "python3-dev")] * (
        not header.exists()
    )
    if not missing:
        return ""
    reasons, packages = zip(*missing, strict=True)
    return (
        f"Triton kernels cannot run here: {' and '.join(reasons)}; torch computes everything, uncaptured and about 10 "
        f"times slower; apt-get install {' '.join(packages)}"
    )


def compiler() -> str | None:
    """The C compiler that Triton would call, or None."""
    asked = read_environment().cc
    return next(filter(None, map(shutil.which, (asked,) if asked else ("gcc", "clang"))), None)


def header() -> Path:
    """Returns the path at which Triton expects Python.h."""
    scheme = sysconfig.get_default_scheme()
    scheme = "posix_prefix" if scheme == "posix_local" else scheme  # Debian's own, which Triton passes over, too
    return Path(sysconfig.get_paths(scheme)["include"]) / "Python.h"


def combine_unavailable(missing: Sequence[Unavailable]) -> Unavailable:
    """All of them in one; where there is no device, no other remedy would help."""
    remedies = list(dict.fromkeys(each.remedy for each in missing))
    remedies = [OTHER_DEVICE] if OTHER_DEVICE in remedies else remedies
    return Unavailable("; ".join(each.reason for each in missing), "; ".join(remedies))


def on_the_bus(devices: Path, vendor: str, classes: tuple[str, ...] = DISPLAY_CLASSES) -> bool:
    """True if sysfs lists a device of this vendor and of one of these classes there."""
    theirs = [each for each in devices.glob("*") if read_sysfs(each / "vendor") == vendor]
    return any(read_sysfs(each / "class").startswith(classes) for each in theirs)


def read_sysfs(path: Path) -> str:
    """A file of sysfs, "" if it is not there."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
