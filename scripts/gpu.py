"""Everything that a machine with an NVIDIA GPU can prove, in one command, without a network.

python scripts/gpu.py [--wheels FOLDER] [--only tests|benchmarks] [--shape llama-3.1-8b]

It uses the torch that is installed, which must be built for CUDA. Packages that are missing are taken from FOLDER, into
build/gpu; without one it says what to bring. Then it builds csrc/cuda where there is nvcc, runs the contract and kernel
tests on the device and the oracle against the CPU platform, and measures: benchmarks/results/<gpu>.json.
"""

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PLACE = ROOT / "build" / "gpu"
PACKAGES = {  # module -> what to install
    "torch": "torch (built for CUDA)", "triton": "triton", "pynvml": "nvidia-ml-py", "numpy": "numpy",
    "transformers": "transformers", "safetensors": "safetensors", "tokenizers": "tokenizers", "jinja2": "jinja2",
    "msgspec": "msgspec", "psutil": "psutil", "cpuinfo": "py-cpuinfo", "tqdm": "tqdm",
    "huggingface_hub": "huggingface_hub", "yaml": "pyyaml", "pytest": "pytest", "pytest_timeout": "pytest-timeout",
    "pytest_asyncio": "pytest-asyncio",
}  # fmt: skip
TESTS = ("tests/contract", "tests/platforms/gpu", "tests/platforms/cuda")
NEVER = ("torch", "triton")  # no other build of these takes the place of the installed one


def missing() -> dict[str, str]:
    """Of PACKAGES, what this interpreter lacks."""
    return {name: package for name, package in PACKAGES.items() if importlib.util.find_spec(name) is None}


def set_up(wheels: Path | None) -> str | None:
    """An interpreter that has all, or None with the reason printed."""
    lacking = missing()
    if not lacking:
        return sys.executable
    names = [package for module, package in lacking.items() if module not in NEVER]
    hard = [package for module, package in lacking.items() if module in NEVER]
    if hard or wheels is None:
        print(f"missing: {', '.join([*hard, *names])}")
        if names:
            print(f"where there is a network: pip download --no-deps -d wheels {' '.join(names)}")
            print("and here: python scripts/gpu.py --wheels wheels")
        return None
    venv.create(PLACE, system_site_packages=True, with_pip=True)
    python = str(PLACE / "bin" / "python")
    site = f"import sysconfig; print(sysconfig.get_paths(vars={{'base': {sys.prefix!r}}})['purelib'])"
    base = subprocess.run([python, "-c", site], capture_output=True, text=True, check=True).stdout.strip()
    own = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"],
        capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip
    Path(own, "outer.pth").write_text(base + "\n")  # where this was started from a virtual environment
    command = [
        python,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-index",
        "--no-deps",
        "--find-links",
        str(wheels),
        *names,
    ]
    return python if subprocess.run(command, check=False).returncode == 0 else None


def build_cuda() -> str:
    """quintet/_cuda_comm.so, as an installation makes it -> what was done."""
    nvcc, cmake = shutil.which("nvcc"), shutil.which("cmake")
    if nvcc is None or cmake is None:
        return f"csrc/cuda is not built: no {'nvcc' if nvcc is None else 'cmake'} here; NCCL does without it"
    made, source = ROOT / "quintet" / "_cuda_comm.so", ROOT / "csrc" / "cuda"
    given = {"NVCC": nvcc, "SOURCE": source / "all_reduce.cu", "OUT": made, "STAMP": ROOT / "build" / "cuda.stamp"}
    command = [cmake, *(f"-D{name}={value}" for name, value in given.items()), "-P", str(source / "build.cmake")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return f"{made.relative_to(ROOT)} built" if made.exists() else f"csrc/cuda is not built:\n{done.stderr}"


def available(python: str) -> bool:
    """Whether the platform can run; it prints why not."""
    code = (
        "import sys; from quintet.platforms import choose\n"
        "try: print(choose('cuda').capabilities.detail)\n"
        "except ValueError as error: sys.exit(str(error))"
    )
    return run([python, "-c", code]) == 0


def run(command: Sequence[str], more: Mapping[str, str] = {}) -> int:
    """In the repository's root -> exit code. Kernels are compiled, not interpreted."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "0", "HF_HUB_OFFLINE": "1", **more}
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def main() -> int:
    """0 if everything ran and passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheels", type=Path, help="folder of wheels for what is missing")
    parser.add_argument("--only", choices=("tests", "benchmarks"))
    parser.add_argument("--shape", default="llama-3.1-8b", help="of the benchmarks")
    args = parser.parse_args()
    python = set_up(args.wheels)
    if not available(python or sys.executable) or python is None:
        print("\nnothing was run: this command needs an NVIDIA GPU and what is named above")
        return 1
    print(build_cuda())
    failed = 0
    if args.only != "benchmarks":
        failed |= run([python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS])
    if args.only != "tests":
        failed |= run([python, "benchmarks/gpu.py", "--shape", args.shape])
    print("all passed" if not failed else "something failed: see above")
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
