"""Lists the parts of `make gpu`, each under nine minutes, the cheapest and most telling first."""

import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.on_gpu.jobs import ROOT, Job, Part, results_of

TESTS = "tests/platforms/gpu"
# Tests of the host alone: they compile for other devices, run on a device of host memory, or try these scripts.
HOSTS = tuple(
    f"{TESTS}/{name}"
    for name in (
        "kernels/test_aot.py", "kernels/test_jit.py", "scripts", "test_platform.py", "test_graphs.py", "test_start.py",
        "test_facts.py", "test_device.py", "test_comm.py", "test_sleep.py",
    )
)  # fmt: skip
SECTIONS = {  # of the conformance kit -> shares; those that compile most first
    "attention": 4, "ops": 2, "models": 2, "numbers": 1, "oracle": 1, "sampling": 1, "faults": 1, "graphs": 1,
    "cache": 1, "device": 1, "communicator": 1, "probe": 1, "memory": 1, "adapters": 1,
}  # fmt: skip
ALONE = ("memory",)  # it counts what is free, which others change
SHARED = {  # section -> of how many shares `sample` runs one: on 16 cores beside an H100, what compiles in 120 s
    "oracle": 6, "graphs": 6, "cache": 6, "sampling": 6, "faults": 6, "attention": 9, "ops": 12, "models": 9,
    "numbers": 6,
}  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """Of a run."""

    out: Path
    device: str = "cuda"
    processors: int = 4
    shapes: Sequence[str] = ("llama-3.1-8b", "llama-3.2-1b", "qwen3-0.6b")

    def own(self, part: str, *command: str) -> tuple[str, ...]:
        """A script of ours that adds to the part's results."""
        results = results_of(self.out, part)
        return (sys.executable, *command, "--device", self.device, "--results", str(results))


def correct(given: Settings) -> list[Job]:
    """Side by side: what they take is compiling."""
    first = "scripts/on_gpu/first.py"
    left_out = [word for each in HOSTS for word in ("--ignore", each)]
    pytest = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=line", "--maxfail=40")
    pytest += ("--timeout=100", "-n", str(max(1, given.processors - 3)), "-m", "not slow and not sweep")
    return [
        Job("machine", (sys.executable, "-c", MACHINE), 60),
        Job("platforms", (sys.executable, "-m", "quintet", "platforms"), 60),
        Job("tokens", given.own("correct", first, "tokens"), 170),
        Job("ops", given.own("correct", first, "ops"), 170),
        Job("attention", given.own("correct", first, "attention"), 120),
        Job("kernels", (*pytest, TESTS, *left_out), 170),
    ]


def speed(given: Settings) -> list[Job]:
    script, jobs = "benchmarks/gpu.py", []
    for shape in given.shapes:
        kept = str(given.out / f"speed-{shape}.json")
        more = ("--profile",) if shape == given.shapes[0] else ()
        jobs.append(Job(shape, given.own("speed", script, "--shape", shape, *more, "--out", kept), 120))
    return jobs


def forms(given: Settings) -> list[Job]:
    script, shape, jobs = "benchmarks/gpu.py", given.shapes[0], []
    for fmt in ("fp8a8", "int4"):
        kept = str(given.out / f"speed-{shape}-{fmt}.json")
        command = given.own("forms", script, "--shape", shape, "--quantization", fmt, "--out", kept)
        jobs.append(Job(f"{shape} {fmt}", command, 120))
    mixture = "qwen3-30b-a3b-12-layers"
    command = given.own("forms", script, "--shape", mixture, "--out", str(given.out / f"speed-{mixture}.json"))
    first = Job("first token", given.own("forms", script, "--first-token"), 120)
    generate = Job("generate", given.own("forms", "benchmarks/gpu_generate.py", "--shape", given.shapes[-1]), 120)
    return [first, generate, *jobs, *([Job(mixture, command, 120)] if shape in Settings.shapes else [])]


def alternatives(given: Settings) -> list[Job]:
    return [Job("alternatives", given.own("alternatives", "scripts/on_gpu/alternatives.py"), 90)]


def sample(given: Settings) -> list[Job]:
    script, jobs = "scripts/on_gpu/sections.py", []
    for section, shares in SHARED.items():
        command = given.own("sample", script, "--section", section, "--share", f"0/{shares}")
        jobs.append(Job(section, command, 120))
    return jobs


def sanitizer(given: Settings) -> list[Job]:
    jobs = []
    if (nvcc := shutil.which("nvcc")) and (cmake := shutil.which("cmake")):
        jobs.append(Job("csrc/cuda", build(nvcc, cmake), 120))
    if tool := shutil.which("compute-sanitizer"):
        step = given.own("sanitizer", "scripts/on_gpu/first.py", "step")
        jobs.append(Job("memcheck", (tool, "--tool", "memcheck", "--error-exitcode", "9", *step), 400))
    return jobs


def build(nvcc: str, cmake: str) -> tuple[str, ...]:
    """quintet/_cuda_comm.so, as an installation makes it."""
    source = ROOT / "csrc" / "cuda"
    values = {"NVCC": nvcc, "SOURCE": source / "all_reduce.cu", "OUT": ROOT / "quintet" / "_cuda_comm.so"}
    values["STAMP"] = ROOT / "build" / "cuda.stamp"
    return (cmake, *(f"-D{name}={value}" for name, value in values.items()), "-P", str(source / "build.cmake"))


def engines(given: Settings) -> list[Job]:
    """Test by test in the log, which is what a run that is cut off leaves."""
    pytest = (sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "--tb=short", "--maxfail=60")
    pytest += ("--timeout=150", "-o", "faulthandler_timeout=140", "-n", str(given.processors))
    return [Job("engines", (*pytest, "tests/platforms/cuda"), 300)]


def conformance(given: Settings) -> list[Job]:
    script, jobs = "scripts/on_gpu/sections.py", []
    for section, count in SECTIONS.items():
        for share in range(count):
            command = given.own("conformance", script, "--section", section, "--share", f"{share}/{count}")
            name = f"{section} {share + 1} of {count}" if count > 1 else section
            jobs.append(Job(name, command, 420, section in ALONE))
    report = str(given.out / "conformance-report.json")
    return [*jobs, Job("report", given.own("conformance", script, "--join", report), 60, alone=True)]


def sweep(given: Settings) -> list[Job]:
    return [Job("sweep", given.own("sweep", "benchmarks/gpu_sweep.py"), 500)]


def parts(processors: int) -> list[Part]:
    """All of them, in order, on so many processors."""
    return [
        Part("correct", "tokens beside the CPU's, each op's provider, kernel tests, attention", correct, 6, 190),
        Part("speed", "steps as shares of a copy and a product; one shape kernel by kernel", speed, 1, 330),
        Part("alternatives", "kernels beside what could take their place", alternatives, 1, 90),
        Part("sample", "a sixth to a twelfth of each section of the conformance kit", sample, len(SHARED), 130),
        Part("forms", "seconds to the first token; steps of quantized weights and of a mixture", forms),
        Part("engines", "engines on the device against the CPU platform", engines),
        Part("conformance", "the conformance kit, its sections side by side", conformance, max(2, processors)),
        Part("sanitizer", "csrc/cuda where there is nvcc; a step under compute-sanitizer where that is", sanitizer, 2),
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
