"""What `make gpu` runs: parts under nine minutes each, the cheapest and most telling first."""

import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.on_gpu.jobs import ROOT, Job, Part, results_of

TESTS = "tests/platforms/gpu"
# of the host alone: they compile for other devices, or try these scripts
HOSTS = (f"{TESTS}/test_aot.py", f"{TESTS}/test_scripts.py", f"{TESTS}/test_make_gpu.py")
SECTIONS = {  # of the conformance kit -> shares; those that compile most first
    "attention": 4, "ops": 2, "models": 2, "numbers": 1, "oracle": 1, "sampling": 1, "faults": 1, "graphs": 1,
    "cache": 1, "device": 1, "communicator": 1, "probe": 1, "memory": 1,
}  # fmt: skip
ALONE = ("memory",)  # it counts what is free, which others change


@dataclass(frozen=True)
class Settings:
    """Of a run."""

    out: Path
    device: str = "cuda"
    processors: int = 4
    shapes: Sequence[str] = ("llama-3.2-1b", "llama-3.1-8b")

    def own(self, part: str, *command: str) -> tuple[str, ...]:
        """A script of ours that adds to the part's results."""
        results = results_of(self.out, part)
        return (sys.executable, *command, "--device", self.device, "--results", str(results))


def probe(given: Settings) -> list[Job]:
    first = "scripts/on_gpu/first.py"
    jobs = [
        Job("machine", (sys.executable, "-c", MACHINE), 30),
        Job("platforms", (sys.executable, "-m", "quintet", "platforms"), 60),
        Job("ops", given.own("probe", first, "ops"), 180),
        Job("tokens", given.own("probe", first, "tokens"), 240),
    ]
    if (nvcc := shutil.which("nvcc")) and (cmake := shutil.which("cmake")):
        jobs.append(Job("csrc/cuda", build(nvcc, cmake), 120))
    if sanitizer := shutil.which("compute-sanitizer"):
        command = (sanitizer, "--tool", "memcheck", "--error-exitcode", "9", *given.own("probe", first, "step"))
        jobs.append(Job("memcheck", command, 150))
    return jobs


def build(nvcc: str, cmake: str) -> tuple[str, ...]:
    """quintet/_cuda_comm.so, as an installation makes it."""
    source = ROOT / "csrc" / "cuda"
    values = {"NVCC": nvcc, "SOURCE": source / "all_reduce.cu", "OUT": ROOT / "quintet" / "_cuda_comm.so"}
    values["STAMP"] = ROOT / "build" / "cuda.stamp"
    return (cmake, *(f"-D{name}={value}" for name, value in values.items()), "-P", str(source / "build.cmake"))


def kernels(given: Settings) -> list[Job]:
    """Test by test in the log, which is what a run that is cut off leaves."""
    pytest = (sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "--tb=short", "--maxfail=60")
    pytest += ("--timeout=150", "-o", "faulthandler_timeout=140", "-n", str(given.processors))
    left_out = [word for each in HOSTS for word in ("--ignore", each)]
    return [
        Job("kernels", (*pytest, "-m", "not slow and not sweep", TESTS, *left_out), 330),
        Job("engines", (*pytest, "tests/platforms/cuda"), 300),
    ]


def conformance(given: Settings) -> list[Job]:
    script, jobs = "scripts/on_gpu/sections.py", []
    for section, count in SECTIONS.items():
        for share in range(count):
            command = given.own("conformance", script, "--section", section, "--share", f"{share}/{count}")
            name = f"{section} {share + 1} of {count}" if count > 1 else section
            jobs.append(Job(name, command, 420, section in ALONE))
    report = str(given.out / "conformance-report.json")
    return [*jobs, Job("report", given.own("conformance", script, "--join", report), 60, alone=True)]


def speed(given: Settings) -> list[Job]:
    script = "benchmarks/gpu.py"
    jobs = []
    for shape in given.shapes:
        kept = str(given.out / f"speed-{shape}.json")
        jobs.append(Job(shape, given.own("speed", script, "--shape", shape, "--out", kept), 220))
    return [*jobs, Job("first token", given.own("speed", script, "--first-token"), 120)]


def profile(given: Settings) -> list[Job]:
    script = "benchmarks/gpu_profile.py"
    return [Job(shape, given.own("profile", script, "--shape", shape), 250) for shape in given.shapes]


def sweep(given: Settings) -> list[Job]:
    return [Job("sweep", given.own("sweep", "benchmarks/gpu_sweep.py"), 500)]


def parts(processors: int) -> list[Part]:
    """All of them, in order, on so many processors."""
    return [
        Part("probe", "each op's provider and probe; a model's tokens eagerly and captured, against the CPU's", probe),
        Part("kernels", "every kernel's tests on the device, and engines on it", kernels),
        Part("conformance", "the conformance kit, its sections beside each other", conformance, max(2, processors)),
        Part("speed", "steps as shares of what a copy and a product reach here", speed),
        Part("profile", "where the time of a step goes, kernel by kernel", profile),
        Part("sweep", "what other tiles, splits and stages would give", sweep),
    ]


MACHINE = """
import importlib.metadata, platform, shutil, subprocess, sys, torch
print(f"python {platform.python_version()} at {sys.executable}, torch {torch.__version__}, CUDA {torch.version.cuda}")
for name in ("triton", "transformers", "tokenizers", "flashinfer-python", "pytest", "pytest-xdist"):
    try: print(name, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError: print(name, "is not here")
for tool in ("nvidia-smi", "nvcc", "cmake", "ninja", "gcc", "compute-sanitizer", "ncu"): print(tool, shutil.which(tool))
if shutil.which("nvidia-smi"): subprocess.run(["nvidia-smi"])
"""
