"""The fake device as a platform that a process of its own finds by an entry point."""

from pathlib import Path

from quintet.platforms import GROUP
from tests.platforms.gpu.fake_torch import FakeGPU, FakeRuntime


class Apart(FakeGPU):
    """Each process has a device memory of its own; sums go over gloo."""

    name = "apart"
    contract = 3
    _mp = True
    _fake = FakeRuntime()


def install(folder: Path) -> None:
    """Writes what pip would, for processes with the folder on their path."""
    info = folder / "apart-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: apart\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\napart = {__name__}:Apart\n")
