"""Measures a start: reading the files, packing the weights, or loading a weights cache; and the peak memory.

python -m benchmarks.loading MODEL [MODEL ...] --out benchmarks/results/loading.json

Each start is a process of its own. Files are read once before, so that they lie in the system's cache: a disk's speed
is not measured.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
AT_A_TIME = 1 << 26  # bytes


def files_of(model: Path) -> list[Path]:
    return [model] if model.is_file() else sorted(model.glob("*.safetensors"))


def read_seconds(files: list[Path]) -> float:
    start, buffer = time.perf_counter(), bytearray(AT_A_TIME)
    for file in files:
        with file.open("rb", buffering=0) as stream:
            while stream.readinto(buffer):
                pass
    return time.perf_counter() - start


def start(model: str, cache: str | None) -> dict[str, Any]:
    """In a fresh process: seconds of its stages, and bytes."""
    begin = time.perf_counter()
    import torch

    from quintet.config import EngineConfig
    from quintet.engine.startup import launch, prepare

    imported = time.perf_counter()
    settings: dict[str, Any] = {"max_model_len": 2304, "num_pages": 160, "weights_cache": cache}
    prepared = prepare(EngineConfig(model=model, device="cpu", dtype="bfloat16", **settings))
    decided = time.perf_counter()
    launch(prepared, progress=False)
    done = time.perf_counter()
    worker = prepared.ranks.workers[0]
    held = {each.data_ptr(): each.nbytes for each in worker.model.parameters()}  # a tied table once
    return {
        "import_s": imported - begin,
        "prepare_s": decided - imported,
        "load_s": done - decided,
        "weight_bytes": sum(held.values()),
        "kv_bytes": worker.kv_cache_layout.page_bytes * 160,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "torch": torch.__version__,
    }


def fresh(model: str, cache: str | None) -> dict[str, Any]:
    words = [sys.executable, "-m", "benchmarks.loading", model, "--one", *(["--cache", cache] if cache else [])]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def baseline() -> int:
    """Bytes of a process that has imported what every start does."""
    code = "import resource, torch, quintet, quintet.engine.startup; print(resource.getrusage(0).ru_maxrss * 1024)"
    return int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


def measured(model: Path, rounds: int) -> dict[str, Any]:
    files, found = files_of(model), []
    read_seconds(files)
    with tempfile.TemporaryDirectory() as folder:
        for index in range(rounds):
            cache = f"{folder}/{index}"
            found.append(
                {
                    "read_s": read_seconds(files),
                    "plain": fresh(str(model), None),
                    "kept": fresh(str(model), cache),
                    "cached": fresh(str(model), cache),
                }
            )
    bare, plain = baseline(), [each["plain"] for each in found]
    most = statistics.median(each["peak_rss_bytes"] for each in plain) - bare
    return {
        "model": model.name,
        "file_bytes": sum(each.stat().st_size for each in files),
        "read_s": statistics.median(each["read_s"] for each in found),
        "load_beyond_reading_s": statistics.median(each["plain"]["load_s"] - each["read_s"] for each in found),
        "load_cached_s": statistics.median(each["cached"]["load_s"] for each in found),
        "prepare_s": statistics.median(each["prepare_s"] for each in plain),
        "peak_beyond_imports_to_weights_and_cache": most / (plain[0]["weight_bytes"] + plain[0]["kv_bytes"]),
        "rounds": found,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--cache", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(start(args.models[0], args.cache)))
        return
    results = [measured(Path(model).resolve(), args.rounds) for model in args.models]
    for each in results:
        print({name: value for name, value in each.items() if name != "rounds"})
    if args.out:
        args.out.write_text(json.dumps({"date": time.strftime("%Y-%m-%d"), "models": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
