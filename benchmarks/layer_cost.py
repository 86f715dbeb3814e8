"""Measures what a decode step of one request costs per layer beside the reading of weights, on the CPU platform.

All layers use the first layer's quantized weights, which then stay in the caches. A step is recorded and replayed as in
the engine. From a layer's time the script subtracts that of its products on one thread, divided by the number of
threads: the rest is norms, rotary, KV cache, attention, and what threads wait for each other (the fixed cost).
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch

from quintet import SamplingParams, _cpu
from quintet.chat.prompts import Prompt
from quintet.config import EngineConfig
from quintet.engine.client import EngineClient
from quintet.platforms.cpu import graph
from quintet.platforms.cpu.cpu_info import describe

SIZES = {"vocab_size": 256, "max_position_embeddings": 4096, "tie_word_embeddings": True}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma-3-270m": (
        "gemma3_text",
        {
            "hidden_size": 640, "intermediate_size": 2048, "num_hidden_layers": 18, "num_attention_heads": 4,
            "num_key_value_heads": 1, "head_dim": 256,
        },
    ),
    "qwen2.5-0.5b": (
        "qwen2",
        {
            "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
            "num_key_value_heads": 2,
        },
    ),
    "qwen3-0.6b": (
        "qwen3",
        {
            "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
            "num_key_value_heads": 8, "head_dim": 128,
        },
    ),
}  # fmt: skip
WEIGHTS = (5, 6, 12, 13)  # arguments of _cpu.quantized: weight, scales, zeros, mins
SHAPE = (0, 9, 10, 11)  # scheme, inputs, outputs, groups
MICRO = 1e6


@dataclass(frozen=True)
class LayerCost:
    """Microseconds per layer, the least of all steps and the median."""

    shape: str
    quantization: str
    context: int
    kernels: float  # per layer, as the next
    barriers: float | None  # None: the extension does not count them
    step: float
    step_median: float
    products: float  # on one thread, divided by the number of threads
    fixed: float
    fixed_median: float


class ProductCalls:
    """Calls of `_cpu.quantized`, each with the weight of the first call of its shape."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self._first: dict[tuple[Any, ...], tuple[Any, ...]] = {}
        self._quantized = _cpu.quantized

    def __call__(self, *args: Any) -> None:
        first = self._first.setdefault(tuple(args[i] for i in SHAPE), args)
        shared = tuple(first[i] if i in WEIGHTS else value for i, value in enumerate(args))
        self.calls.append(shared)
        self._quantized(*shared)

    def recorded(self, count: int) -> Any:
        """Returns a graph of the last `count` calls but the head's, on memory of their own."""
        rows = [torch.zeros(max(SIZES["vocab_size"], *(max(args[9:11]) for args in self.calls))) for _ in range(2)]
        x, out = (row.data_ptr() for row in rows)
        of_layers = [args for args in self.calls if args[10] != SIZES["vocab_size"]]
        calls = _cpu.Graph()
        calls.begin()
        for args in of_layers[-count:]:
            self._quantized(*args[:2], out, x, *args[4:])
        calls.end()
        self._memory = rows
        return calls


@contextmanager
def _recorded_steps() -> Iterator[tuple[ProductCalls, list[graph.Replay]]]:
    products, steps, init = ProductCalls(), [], graph.Replay.__init__

    def kept(self: graph.Replay, *args: Any, **named: Any) -> None:
        init(self, *args, **named)
        steps.append(self)

    quantized, _cpu.quantized, graph.Replay.__init__ = _cpu.quantized, products, kept  # type: ignore[method-assign]
    try:
        yield products, steps
    finally:
        _cpu.quantized, graph.Replay.__init__ = quantized, init  # type: ignore[method-assign]


def _times(run: Callable[[], None], seconds: float) -> list[float]:
    times, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        run()
        times.append((time.perf_counter() - start) * MICRO)
    return sorted(times)


def measure(shape: str, quantization: str, context: int, seconds: float) -> LayerCost:
    """Replays the step of a request with so many tokens of context for so many seconds."""
    from transformers import AutoConfig

    kind, sizes = SHAPES[shape]
    layers = sizes["num_hidden_layers"]
    with tempfile.TemporaryDirectory() as folder, _recorded_steps() as (products, steps):
        AutoConfig.for_model(kind, **SIZES, **sizes).save_pretrained(folder)
        config = EngineConfig(
            model=folder, device="cpu", load_format="dummy", skip_tokenizer_init=True, quantization=quantization,
            max_num_seqs=1, max_model_len=context + 64,
        )  # fmt: skip
        client = EngineClient(config, progress=False)
        params = SamplingParams(max_tokens=32, ignore_eos=True, detokenize=False, temperature=0.0)
        client.add(client.next_id(), Prompt([i % 200 for i in range(context)]), params)
        for _ in range(8):
            client.engine.step()
        step = next(each for each in steps[-1]._graphs.values() if each.proven and each.inputs[0].shape[0] == 1)
        count = getattr(_cpu, "shared_jobs", None)
        before = count() if count else 0
        step.calls.run()
        barriers = (count() - before) / layers if count else None
        times = _times(step.calls.run, seconds)
        alone, threads = products.recorded(4 * layers), _cpu.threads()
        _cpu.limit_threads(1)
        arithmetic = _times(alone.run, seconds / 2)[0] / threads / layers
        _cpu.limit_threads(0)
    least, median = times[0] / layers, times[len(times) // 2] / layers
    counts = round(len(step.calls) / layers, 1), barriers and round(barriers, 1)
    rest = (least, median, arithmetic, least - arithmetic, median - arithmetic)
    return LayerCost(shape, quantization, context, *counts, *(round(x, 2) for x in rest))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--quantization", nargs="+", default=["w4a8", "w8a8"])
    parser.add_argument("--contexts", nargs="+", type=int, default=[32])
    parser.add_argument("--seconds", type=float, default=2)
    parser.add_argument("--json", type=Path, help="file for the results; the rows of an earlier run stay in it")
    parser.add_argument("--label", default="", help="name of these rows in the file")
    args = parser.parse_args()
    rows = []
    for shape in args.shapes:
        for quantization in args.quantization:
            for context in args.contexts:
                rows.append(measure(shape, quantization, context, args.seconds))
                print(rows[-1], flush=True)
    if args.json:
        runs = json.loads(args.json.read_text()) if args.json.exists() else []
        machine = {"date": str(date.today()), "cpu": describe(), "load": [round(x, 1) for x in os.getloadavg()]}
        runs.append({"label": args.label, **machine, "rows": [asdict(row) for row in rows]})
        args.json.write_text(json.dumps(runs, indent=2) + "\n")


if __name__ == "__main__":
    main()
