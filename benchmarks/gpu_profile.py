"""Profiles the steps of a GPU: back to back by the device's clock, kernel by kernel, and on the host.

python benchmarks/gpu_profile.py [--shape llama-3.1-8b] [--device cuda] [--results FILE]
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch  # the path is set first, so that the script runs by itself

from benchmarks.gpu import SHAPES, fits, padded, place_of, prepared, waiting
from benchmarks.tpu_step import batch
from quintet.engine.startup import EnginePlan
from quintet.interface.types import HostBatch
from scripts.on_gpu.jobs import note

STEPS = {  # requests, new tokens of each, tokens behind each
    "decode 1 x 512": (1, 1, 511), "decode 16 x 512": (16, 1, 511), "decode 64 x 512": (64, 1, 511),
    "decode 256 x 512": (256, 1, 511), "decode 64 x 4096": (64, 1, 4095), "prefill 512": (1, 512, 0),
    "prefill 2048": (1, 2048, 0),
}  # fmt: skip
REPLAYS, TRACED, LISTED = 50, 20, 40
ROWS = (1, 8, 64, 2048)  # tokens of a product


def clocked(call: Callable[[], object], device: torch.device, rounds: int = REPLAYS) -> float:
    """Seconds of each of so many calls that are queued without a wait between them, by the device's own clock."""
    call()
    if device.type != "cuda":
        start = time.perf_counter()
        for _ in range(rounds):
            call()
        return (time.perf_counter() - start) / rounds
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    first.record()
    for _ in range(rounds):
        call()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) / 1e3 / rounds


def kernels(call: Callable[[], object], device: torch.device, rounds: int = TRACED) -> list[dict[str, Any]]:
    """The kernels that took most of so many calls: name, calls and microseconds of each call of ours."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities = [torch.profiler.ProfilerActivity.CUDA]
    call()
    waiting(device)()
    with torch.profiler.profile(activities=activities) as trace:
        for _ in range(rounds):
            call()
        waiting(device)()
    events = trace.key_averages()
    took = {e.key: e.self_device_time_total if device.type == "cuda" else e.self_cpu_time_total for e in events}
    counts = {each.key: each.count for each in events}
    most = sorted(took, key=lambda name: -took[name])[:LISTED]
    return [
        {"name": name[:160], "each_step": round(counts[name] / rounds, 2), "us": round(took[name] / rounds, 2)}
        for name in most
    ]


def host_parts(made: EnginePlan, host: HostBatch, wait: Callable[[], object]) -> dict[str, float]:
    """Milliseconds of the host in one step, by its parts; medians."""
    worker, times = made.ranks.workers[0], dict[str, list[float]]()
    for _ in range(20 if place_of(made).type != "cpu" else 2):
        wait()
        marks = [time.perf_counter()]
        planned = worker.main.with_plans(host)
        marks.append(time.perf_counter())
        there = planned.on(worker.device.to_device(planned.leaves()))
        marks.append(time.perf_counter())
        _, worker._state = worker.main.step(worker._state, there)
        marks.append(time.perf_counter())
        for name, start, end in zip(("plan", "upload", "step"), marks, marks[1:], strict=False):
            times.setdefault(name, []).append((end - start) * 1e3)
    wait()
    return {name: round(statistics.median(each), 4) for name, each in times.items()}


def products(shape: str, device: torch.device) -> list[dict[str, Any]]:
    """The shape's four products and its head, by torch, for so many tokens."""
    of = SHAPES[shape]
    hidden, wide = of["hidden_size"], of["intermediate_size"]
    dim = of.get("head_dim", hidden // of["num_attention_heads"])
    heads, kept = of["num_attention_heads"] * dim, of["num_key_value_heads"] * dim
    sizes = {
        "qkv": (heads + 2 * kept, hidden), "out": (hidden, heads), "gate and up": (2 * wide, hidden),
        "down": (hidden, wide), "head": (of["vocab_size"], hidden),
    }  # fmt: skip
    found = []
    for name, (outputs, inputs) in sizes.items():
        weight = torch.randn(outputs, inputs, device=device, dtype=torch.bfloat16)
        for tokens in ROWS:
            x = torch.randn(tokens, inputs, device=device, dtype=torch.bfloat16)
            seconds = clocked(partial(torch.nn.functional.linear, x, weight), device, 20)
            gbs, tflops = weight.numel() * 2 / seconds / 1e9, 2 * tokens * weight.numel() / seconds / 1e12
            found.append(
                {
                    "product": name,
                    "tokens": tokens,
                    "us": round(seconds * 1e6, 1),
                    "gbs": round(gbs, 1),
                    "tflops": round(tflops, 2),
                }
            )
    return found


def measure(made: EnginePlan, shape: str, tell: Callable[..., None]) -> int:
    """Each step's time back to back, its kernels, and its parts on the host -> how many steps failed."""
    device, failed = place_of(made), 0
    worker, wait = made.ranks.workers[0], waiting(device)
    for name, (requests, new, behind) in STEPS.items():
        host = batch(requests, new, behind)
        if not fits(made, host) or new > made.config.step_tokens:
            continue
        rounds, host = REPLAYS if device.type != "cpu" else 1, padded(made, host)
        step = partial(worker.run, host)
        try:
            ms = round(clocked(step, device, rounds) * 1e3, 4)
            parts = host_parts(made, host, wait)
            print(f"{name}: {ms} ms each, back to back; on the host {parts}", flush=True)
            tell(kind="clocked", shape=shape, step=name, ms=ms, host_ms=parts)
            for each in kernels(step, device, min(rounds, TRACED)):
                print(f"  {each['us']:>10.1f} us  {each['each_step']:>6.1f}  {each['name'][:100]}", flush=True)
                tell(kind="kernel", shape=shape, step=name, **each)
        except Exception as error:
            failed += 1
            print(f"{name}: {type(error).__name__}: {error}", flush=True)
            tell(kind="failed", shape=shape, step=name, why=f"{type(error).__name__}: {error}")
    return failed


def main() -> int:
    """0 if all was measured; what fails is a line, and the rest goes on."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--results", type=Path, help="a file that gets a line for each figure")
    args = parser.parse_args()
    tell = partial(note, args.results) if args.results else lambda **values: None
    made = prepared(args.shape, args.device)
    failed = measure(made, args.shape, tell)
    for each in products(args.shape, place_of(made)):
        print(each, flush=True)
        tell(kind="product", shape=args.shape, **each)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
