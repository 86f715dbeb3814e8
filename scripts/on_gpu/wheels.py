"""The folder of wheels that goes to a machine with a GPU and no network: all but what an image of torch has.

python scripts/on_gpu/wheels.py [--out wheelhouse/gpu] [--python 3.12] [NAME==VERSION ...]

Versions are those of constraints-dev.txt, which the tests run with. Names that are given are taken besides, without
what they need in turn: flashinfer-python==0.6.4 apache-tvm-ffi==0.1.9, to try FlashInfer where there is nvcc.
"""

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PLACE = ROOT / "wheelhouse" / "gpu"
SERVER = ("fastapi", "httptools", "prometheus-client", "pyzmq", "uvicorn", "uvloop")  # nothing serves there
TESTED = ("hypothesis", "nvidia-ml-py", "pytest", "pytest-asyncio", "pytest-timeout", "pytest-xdist")
# of torch's image: torch with what it requires, and numpy; another build of these would take the place of theirs
THERE = (
    "torch", "triton", "numpy", "filelock", "fsspec", "jinja2", "markupsafe", "mpmath", "networkx", "pip", "setuptools",
    "sympy", "typing-extensions",
)  # fmt: skip
IDLE = ("hf-xet", "markdown-it-py", "mdurl", "rich")  # for downloads, and for a command line that nobody calls there
MOST = 64 * 2**20  # bytes, with the source tree
GLIBC = (34, 28, 27, 26, 17, 12, 5)  # minor versions of manylinux_2_N; an image of today has 2.34 at least


def roots() -> list[str]:
    """What the engine and its tests on a GPU ask for by themselves."""
    asked = [re.split(r"[><=;\s]", each)[0].lower() for each in _project()["dependencies"]]
    return sorted({each for each in asked if each not in (*SERVER, "torch")} | set(TESTED))


def _project() -> Any:
    import tomllib

    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def fetch(out: Path, python: str, more: Sequence[str]) -> int:
    """Fills the folder anew -> pip's exit code."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    abi = "cp" + python.replace(".", "")
    legacy = ("manylinux2014", "manylinux2010", "manylinux1")
    places = [f"manylinux_2_{n}" for n in GLIBC] + list(legacy)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--dest", str(out)]
    pip += ["--only-binary=:all:", "--implementation", "cp", "--python-version", python]
    pip += [word for each in (abi, "abi3", "none") for word in ("--abi", each)]
    pip += [word for each in places for word in ("--platform", f"{each}_x86_64")]
    constraints = ["--constraint", str(ROOT / "constraints-dev.txt")]
    failed = subprocess.run([*pip, *constraints, *roots()], check=False).returncode
    for wheel in out.glob("*.whl"):
        if name_of(wheel) in (*THERE, *IDLE):
            wheel.unlink()
    if more and not failed:
        failed = subprocess.run([*pip, "--no-deps", *more], check=False).returncode
    return failed


def name_of(wheel: Path) -> str:
    """The distribution's, as an index spells it."""
    return re.sub(r"[-_.]+", "-", wheel.name.split("-")[0]).lower()


def source_bytes() -> int:
    """Of all that git would carry."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    return sum((ROOT / name).stat().st_size for name in listed.split("\0") if name and (ROOT / name).is_file())


def place(wheels: Path, site: Path) -> str | None:
    """Puts the wheels into a folder for PYTHONPATH -> None, or why not. It needs neither a network nor ensurepip."""
    found = sorted(wheels.glob("*.whl"))
    if not found:
        return f"no wheels in {wheels}"
    listed = site / "wheels.txt"
    names = "\n".join(each.name for each in found)
    if listed.exists() and listed.read_text() == names:
        return None  # of an earlier call
    if importlib.util.find_spec("pip") is None:
        return f"{sys.executable} has no pip to unpack {wheels} with"
    shutil.rmtree(site, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
    command += ["--disable-pip-version-check", "--target", str(site), *map(str, found)]
    clean = {name: value for name, value in os.environ.items() if name != "PIP_TARGET"}
    done = subprocess.run(command, env=clean, capture_output=True, text=True, check=False)
    if done.returncode:
        return f"pip could not unpack {wheels}: {done.stderr.strip()[-600:]}"
    listed.write_text(names)
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=PLACE)
    parser.add_argument("--python", default="3.12", help="of the machine with the GPU")
    parser.add_argument("more", nargs="*", metavar="NAME==VERSION")
    args = parser.parse_args()
    failed = fetch(args.out, args.python, args.more)
    if failed:
        print("the wheels could not be had: see above", file=sys.stderr)
        return failed
    wheels = [*args.out.glob("*.whl")]
    took, source = sum(each.stat().st_size for each in wheels), source_bytes()
    print(
        f"{len(wheels)} wheels, {took / 2**20:.1f} MiB in {args.out}; the sources beside them {source / 2**20:.1f} MiB"
    )
    if took + source > MOST:
        print(f"together more than the {MOST >> 20} MiB that fit", file=sys.stderr)
    return int(took + source > MOST)


if __name__ == "__main__":
    sys.exit(main())
