"""Measures the server's overhead: time to ready, tokens where no model computes, share of the offline rate.

python benchmarks/serving.py [--only ready null share] [--out benchmarks/results/serving.json]

The share is of quintet's own offline throughput, on as many prompts, in alternation: offline, server, server, offline.
The load generator runs on the same cores as the server.
"""

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.checkpoints import checkpoint, with_tokenizer  # noqa: E402  the path is set first

STREAMS = 16
INPUT, OUTPUT = 128, 128
NULL_OUTPUT = 512
QUINTET = (sys.executable, "-m", "quintet.cli.main")


@contextmanager
def server(*flags: str) -> Iterator[tuple[str, float]]:
    """A server on a free port -> its URL, and the seconds until it was ready."""
    with tempfile.NamedTemporaryFile("w+") as log:
        began = time.perf_counter()
        process = subprocess.Popen(
            [*QUINTET, "serve", *flags, "--port", "0", "--no-access-log"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
        try:
            url = _url(process, Path(log.name))
            while not _ready(url):
                time.sleep(0.005)
            yield url, time.perf_counter() - began
        finally:
            process.terminate()
            process.wait(30)


def _url(process: "subprocess.Popen[bytes]", log: Path) -> str:
    """Returns the server's URL once its log has the ready line."""
    while True:
        for line in log.read_text().splitlines():
            if "ready: " in line:
                return line.rsplit(" ", 1)[1]
        if process.poll() is not None:
            raise RuntimeError(log.read_text())
        time.sleep(0.005)


def _ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(url + "/ready", timeout=5) as answer:
            return bool(answer.status == 200)
    except urllib.error.HTTPError:
        return False


def load(url: str, *flags: str) -> dict[str, Any]:
    """The figures of one `quintet bench serve`."""
    with tempfile.NamedTemporaryFile("r", suffix=".json") as file:
        command = [*QUINTET, "bench", "serve", "--url", url, "--ignore-eos", "--json", file.name, *flags]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            raise RuntimeError(done.stdout)
        return dict(json.loads(file.read()))


def ready(times: int = 5) -> dict[str, Any]:
    seconds = []
    for _ in range(times):
        with server() as (_, taken):
            seconds.append(taken)
    return {"bundled_s": {"median": statistics.median(seconds), "all": seconds}}


def null() -> dict[str, Any]:
    """Scheduling, the wire, text, JSON and HTTP: all but arithmetic."""
    flags = ("--input-len", "32", "--output-len", str(NULL_OUTPUT), "--vocab-size", "2000")
    found: dict[str, Any] = {}
    with server("--device", "null", "--load-format", "dummy", "--max-model-len", "1024") as (url, _):
        for streams in (1, STREAMS, 64):
            figures = load(url, *flags, "--max-concurrency", str(streams), "--num-prompts", str(max(4, streams * 2)))
            found[f"{streams} streams"] = _short(figures)
    return found


def _short(figures: dict[str, Any]) -> dict[str, Any]:
    names = ("output_throughput", "median_ttft_ms", "median_itl_ms", "p99_itl_ms", "client_cpu_us_per_chunk", "failed")
    return {name: figures[name] for name in names}


def share(quantization: str | None, rounds: int = 5) -> dict[str, Any]:
    """Output tokens per second of 16 requests at once, over HTTP and in Python."""
    from quintet import LLM, SamplingParams

    folder = with_tokenizer(checkpoint("qwen3-0.6b"))
    settings: dict[str, Any] = {"max_model_len": 1024, "num_pages": 512, "enable_prefix_caching": False}
    flags = ["--max-model-len", "1024", "--num-pages", "512", "--no-enable-prefix-caching"]
    if quantization:
        settings["quantization"] = quantization
        flags += ["--quantization", quantization]
    llm = LLM(str(folder), use_tqdm=False, **settings)
    params = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True)

    def offline(seed: int) -> float:
        draw = random.Random(seed)
        prompts = [[draw.randrange(1000) for _ in range(INPUT)] for _ in range(STREAMS)]
        began = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        return STREAMS * OUTPUT / (time.perf_counter() - began)

    def served(url: str, seed: int) -> float:
        numbers = {"--num-prompts": STREAMS, "--max-concurrency": STREAMS, "--input-len": INPUT, "--output-len": OUTPUT}
        words = [str(word) for item in {**numbers, "--seed": seed}.items() for word in item]
        return float(load(url, *words)["output_throughput"])

    pairs = []
    with server(str(folder), *flags) as (url, _):
        offline(0), served(url, 0)  # every size is compiled once
        for number in range(1, rounds + 1):
            if number % 2:
                first = offline(number)
                pairs.append((first, served(url, number)))
            else:
                second = served(url, number)
                pairs.append((offline(number), second))
    llm.close()
    ratios = [over / plain for plain, over in pairs]
    return {"pairs_offline_served": pairs, "median_share": statistics.median(ratios), "shares": ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=("ready", "null", "share"), default=("ready", "null", "share"))
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "serving.json")
    arguments = parser.parse_args()
    results: dict[str, Any] = {
        "machine": {"processor": platform.processor() or platform.machine(), "cores": len(os.sched_getaffinity(0))}
    }
    if "ready" in arguments.only:
        results["ready"] = ready()
    if "null" in arguments.only:
        results["null"] = null()
    if "share" in arguments.only:
        results["share_of_offline"] = {name: share(None if name == "bf16" else name) for name in ("bf16", "w8a8")}
    print(json.dumps(results, indent=2))
    arguments.out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
