"""Everything that a machine with an NVIDIA GPU can prove, part by part, without a network.

python scripts/gpu.py [--only probe kernels ...] [--out build/gpu/out] [--wheels wheelhouse/gpu] [--shapes NAME ...]

It uses the torch and the Triton that are installed. What else the engine and its tests need is taken from the folder
that `make gpu-wheels` fills where there is a network. Each part stays under nine minutes and writes PART.log and
PART.jsonl as results come; one that fails or is cut off leaves those of the others, and its own up to there.

--rehearse runs all of it without a GPU: a device of host memory and Triton's interpreter stand in, so nothing that is
written says anything of a GPU. `make gpu ARGS=--list` says what there is.
"""

import argparse
import importlib.util
import os
import resource
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts.on_gpu import jobs, parts, wheels  # noqa: E402  the path is set first, so that the script runs by itself

PLACE = ROOT / "build" / "gpu"
PACKAGES = {  # module -> what to install
    "torch": "torch (built for CUDA)", "triton": "triton", "numpy": "numpy", "pynvml": "nvidia-ml-py",
    "transformers": "transformers", "safetensors": "safetensors", "tokenizers": "tokenizers", "jinja2": "jinja2",
    "msgspec": "msgspec", "psutil": "psutil", "cpuinfo": "py-cpuinfo", "tqdm": "tqdm", "gguf": "gguf",
    "huggingface_hub": "huggingface_hub", "yaml": "pyyaml", "pytest": "pytest", "pytest_timeout": "pytest-timeout",
    "pytest_asyncio": "pytest-asyncio", "xdist": "pytest-xdist", "hypothesis": "hypothesis",
}  # fmt: skip
REHEARSAL = ROOT / "scripts" / "on_gpu" / "rehearsal"  # brings a platform that takes the place of cuda


def missing(path: Sequence[str]) -> list[str]:
    """Of PACKAGES, what this interpreter lacks with these folders besides."""
    before = list(sys.path)
    sys.path[:0] = path
    importlib.invalidate_caches()
    try:
        return [package for name, package in PACKAGES.items() if importlib.util.find_spec(name) is None]
    finally:
        sys.path[:] = before


def set_up(folder: Path) -> Path | None:
    """Where the packages lie that are not this interpreter's own; None, with the reason printed, if one is missing."""
    site = PLACE / "site"
    why = wheels.place(folder, site) if folder.exists() else f"{folder} is not there"
    if lacking := missing([] if why else [str(site)]):
        print(f"missing: {', '.join(lacking)}; {why or f'nor are they in {folder}'}")
        print(f"where there is a network: make gpu-wheels, which fills {wheels.PLACE.relative_to(ROOT)}; bring it here")
        return None
    return site


def environment(site: Path, rehearse: bool) -> dict[str, str]:
    """Of every job. What PYTHONPATH was given stays, behind ours."""
    path = [
        str(ROOT),
        str(ROOT / "tools"),
        *([str(REHEARSAL)] if rehearse else []),
        str(site),
        *filter(None, [os.environ.get("PYTHONPATH")]),
    ]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path),
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        "HF_HUB_OFFLINE": "1",
        "TRITON_INTERPRET": "1" if rehearse else "0",
        "TRITON_CACHE_DIR": str(PLACE / "triton"),  # what one job has compiled, the next finds
        "XDG_CACHE_HOME": str(PLACE / "cache"),
    }


def available(given: dict[str, str]) -> bool:
    """Whether the platform can run; it prints why not."""
    code = (
        "import sys; from quintet.platforms import choose\n"
        "try: print(choose('cuda').capabilities.detail)\n"
        "except ValueError as error: sys.exit(str(error))"
    )
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=given, check=False).returncode == 0


def summary(ended: dict[str, list[jobs.Ended]], out: Path) -> str:
    """What a person reads last."""
    lines = [""]
    for part, each in ended.items():
        lines += [f"{part:12} {job.job:22} {job.how}, {job.seconds} s" for job in each]
    failed = sum(not job.passed for each in ended.values() for job in each)
    return "\n".join([*lines, "", f"{failed or 'none'} of the jobs did not pass; everything is in {out}"])


def main() -> int:
    """0 if everything ran and passed."""
    every = {each.name: each for each in parts.parts(os.cpu_count() or 2)}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=every, metavar="PART", help=", ".join(every))
    parser.add_argument("--out", type=Path, default=PLACE / "out", help="where results go")
    parser.add_argument("--wheels", type=Path, default=wheels.PLACE, help="folder of what `make gpu-wheels` fetched")
    parser.add_argument("--shapes", nargs="+", help="of speed and profile, instead of their own")
    parser.add_argument("--seconds", type=float, help="of each part, at most")
    parser.add_argument("--rehearse", action="store_true", help="without a GPU: a stand-in of host memory")
    parser.add_argument("--list", action="store_true", help="print the parts and run nothing")
    args = parser.parse_args()
    if args.list:
        print("\n".join(f"{each.name:12} at most {each.seconds:.0f} s: {each.about}" for each in every.values()))
        return 0
    site = set_up(args.wheels)
    if not available(environment(site or PLACE / "site", args.rehearse)) or site is None:
        print("\nnothing was run: this command needs an NVIDIA GPU and what is named above, or --rehearse")
        return 1
    return run(args, [every[name] for name in args.only or every], site)


def run(args: argparse.Namespace, wanted: Sequence[jobs.Part], site: Path) -> int:
    """The parts, one after the other; what one does stops none."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))  # a cut-off job aborts
    given = parts.Settings(args.out.resolve(), processors=min(12, os.cpu_count() or 2))
    shapes = args.shapes or (["tiny"] if args.rehearse else given.shapes)
    given = parts.Settings(given.out, given.device, given.processors, tuple(shapes))
    ended = {}
    for part in wanted:
        if args.seconds:
            part = jobs.Part(part.name, part.about, part.jobs, part.together, args.seconds)
        ended[part.name] = jobs.run(part, part.jobs(given), given.out, environment(site, args.rehearse))
    print(summary(ended, given.out))
    return int(any(not job.passed for each in ended.values() for job in each))


if __name__ == "__main__":
    sys.exit(main())
