"""Builds quintet._cpu with a fault, from a copy of the sources; the developer's sources and build stay as they are."""

import os
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

from scripts.mutation.csrc_faults import Place
from scripts.mutation.trials import ROOT

HOME = ROOT / "build" / "mutants" / "csrc"  # two levels down: tests look for objects.txt in build/*
ISAS = ("baseline", "avx2", "avx2_vnni", "avx512", "avx512_bf16", "amx")


class Builder:
    """A build without a fault, and for each fault a copy of it in which only what changed is compiled."""

    def __init__(self) -> None:
        self.source, self.build = HOME / "source", HOME / "build"
        self._bin = Path(sys.executable).parent

    def prepare(self) -> None:
        """Copies the sources that have changed, and builds them."""
        for file in [ROOT / "CMakeLists.txt", *(f for f in (ROOT / "csrc").rglob("*") if f.is_file())]:
            copy = self.source / file.relative_to(ROOT)
            if not copy.exists() or copy.read_bytes() != file.read_bytes():
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(file, copy)
        for copy in (self.source / "csrc").rglob("*"):
            if copy.is_file() and not (ROOT / copy.relative_to(self.source)).exists():
                copy.unlink()
        if not (self.build / "build.ninja").exists():
            options = ["-DCMAKE_BUILD_TYPE=Release", "-DQUINTET_CUDA=OFF", f"-DPython_EXECUTABLE={sys.executable}"]
            command = [self._bin / "cmake", "-S", self.source, "-B", self.build, "-G", "Ninja", *options]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        subprocess.run([*self._ninja(self.build), "_cpu"], check=True, stdout=subprocess.DEVNULL)

    def _ninja(self, build: Path) -> list[str | Path]:
        return [self._bin / "ninja", "-C", build]

    def instruction_sets(self) -> dict[str, set[str]]:
        """The instruction sets that each file is compiled for, by ninja's list of what objects depend on."""
        lines = subprocess.run(
            [*self._ninja(self.build), "-t", "deps"], check=True, capture_output=True, text=True
        ).stdout.splitlines()
        found: dict[str, set[str]] = defaultdict(set)
        isa = ""
        for line in lines:
            if line and not line.startswith(" "):
                names = re.match(r"CMakeFiles/(?:quintet_)?(\w+)\.dir", line)
                isa = names.group(1) if names else ""
            elif (path := Path(line.strip())).is_relative_to(self.source):
                found[path.relative_to(self.source).as_posix()].add(isa if isa in ISAS else "baseline")
        return found

    def module(self, build: Path) -> Path:
        (file,) = build.glob("_cpu*.so")
        return file

    def with_fault(self, path: str, place: Place, name: str) -> Path | None:
        """The module with the fault; None if it does not compile, or is the same to the byte."""
        build, file = HOME / f"fault-{name}", self.source / path
        text, times = file.read_text(encoding="utf-8"), file.stat()
        shutil.rmtree(build, ignore_errors=True)
        shutil.copytree(self.build, build, symlinks=True)  # with the times, by which ninja decides
        try:
            file.write_text(place.applied(text), encoding="utf-8")
            run = subprocess.run([*self._ninja(build), "_cpu"], stdout=subprocess.DEVNULL)
        finally:
            file.write_text(text, encoding="utf-8")
            os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
        made = self.module(build)
        kept = HOME / f"fault-{name}.so"
        if run.returncode == 0 and made.read_bytes() != self.module(self.build).read_bytes():
            shutil.copy(made, kept)
        else:
            kept.unlink(missing_ok=True)
        shutil.rmtree(build)
        return kept if kept.exists() else None
