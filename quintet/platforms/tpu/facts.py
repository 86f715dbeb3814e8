"""TPU chips of this machine, read from its PCI bus: the runtime is not started, no chip is taken."""

import importlib.util
import re
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from quintet.common.distribution import install_hint
from quintet.config import Environment, read_environment
from quintet.interface.platform import Unavailable

GOOGLE = "0x1ae0"
CHIPS = {  # PCI device id -> name; v2 shows the id of v3
    "0x0027": "TPU v3",
    "0x005e": "TPU v4",
    "0x0062": "TPU v5p",
    "0x0063": "TPU v5e",
    "0x006f": "TPU v6e",
    "0x0076": "TPU7x",
}
NEEDED = ("jax", "torchax")
FORCED = re.compile(r"--xla_force_host_platform_device_count=(\d+)")


@dataclass(frozen=True)
class TPUFacts:
    """The devices that JAX would open."""

    chips: int  # 0: JAX's CPU devices stand in
    devices: int
    detail: str


def facts(pci: Path = Path("/sys/bus/pci/devices")) -> TPUFacts | Unavailable:
    """Returns the devices, or why there are none."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        return Unavailable(f"{' and '.join(missing)} not installed", install_hint("tpu"))
    environment, names = read_environment(), chips(pci)
    if names and (environment.jax_platforms or "tpu").startswith("tpu"):
        if importlib.util.find_spec("libtpu") is None:
            return Unavailable(f"{len(names)} x {names[0]} here, but libtpu is not installed", "pip install 'jax[tpu]'")
        return TPUFacts(len(names), len(names), f"{names[0]}; {versions()}")
    return TPUFacts(
        0, host_devices(environment), f"no TPU: JAX's CPU devices stand in, to try and to test; {versions()}"
    )


def chips(pci: Path) -> list[str]:
    """The name of each chip."""
    found = []
    for vendor in sorted(pci.glob("*/vendor")):
        if _read(vendor) == GOOGLE:
            name = CHIPS.get(_read(vendor.with_name("device")))
            found += [name] if name else []
    return found


def host_devices(environment: Environment) -> int:
    """Returns how many devices JAX makes of the host's processor: one, unless XLA_FLAGS sets another number."""
    match = FORCED.search(environment.xla_flags or "")
    return int(match[1]) if match else 1


def versions() -> str:
    """Returns the versions of the packages that matter."""
    return ", ".join(f"{name} {_version(name)}" for name in NEEDED)


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "unknown"


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
