"""Measures what loading an adapter (LoRA) costs the streams that run: gaps between tokens, and the swap into a slot.

    python -m benchmarks.lora_loading [--model FOLDER] [--quantization int4] [--rank 16] [--out FILE.json]

One request streams with an adapter of its own. Windows take turns: nothing else happens; a short request with an
adapter that is in its slot; the same with one that is in host memory, whose swap into a slot is timed; and the same
with one that is read from its files. What loading adds to a gap is the difference to the window before it with an
adapter in its slot. Without a model: random weights of Qwen3-0.6B's shapes.
"""

import argparse
import json
import os
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.checkpoints import checkpoint
from benchmarks.lora import random_adapter
from quintet import LLM, LoRARequest, SamplingParams
from quintet.engine.engine import Engine
from quintet.lora.adapter import adapter_digest
from quintet.platforms.cpu.cpu_info import describe

MILLI = 1e3
KINDS = ("nothing", "in its slot", "in host memory", "in files")
IN_SLOT, IN_HOST, IN_FILES = 1, 2, 2 + 6  # adapters of each kind: one stays, two take turns, six are forgotten between
AFTER = 2  # gaps behind the end of a request that belong to its window


class Swaps:
    """Times of the calls that write adapters to the device."""

    def __init__(self, llm: LLM) -> None:
        engine = llm._client.engine
        assert isinstance(engine, Engine) and engine.lora is not None
        self.seconds: list[float] = []
        self.all_cpu: list[float] = []  # of the step's thread: what other processes do is no part of it
        self._manager, self._write = engine.lora, engine.lora.before_launch
        engine.lora.before_launch = self._timed  # type: ignore[method-assign]

    def _timed(self, plan: Any, fail: Any) -> None:
        before, start, cpu = dict(self._manager._written), time.perf_counter(), time.thread_time()
        self._write(plan, fail)
        if self._manager._written != before:
            self.seconds.append(time.perf_counter() - start)
            self.all_cpu.append(time.thread_time() - cpu)


class Stream:
    """The tokens of one request, and the gaps between them."""

    def __init__(self, llm: LLM, adapter: LoRARequest, tokens: int) -> None:
        params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, detokenize=False)
        self._outputs: Iterator[Any] = llm.stream([{"prompt_token_ids": [7, 11, 13]}], params, lora_request=adapter)
        next(self._outputs)
        self._last = time.perf_counter()

    def gap(self) -> float:
        """Waits for a token -> seconds since the one before."""
        output = next(self._outputs)
        assert output.outputs[0].error is None, output.outputs[0].error
        before, self._last = self._last, time.perf_counter()
        return self._last - before

    def window(self, request: "threading.Thread | None", quiet: int) -> list[float]:
        """Returns the gaps while the request is answered, or so many."""
        if request is None:
            return [self.gap() for _ in range(quiet)]
        request.start()
        gaps = []
        while request.is_alive():
            gaps.append(self.gap())
        return gaps + [self.gap() for _ in range(AFTER)]


def ask(llm: LLM, adapter: LoRARequest) -> None:
    """A request of two tokens."""
    params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True, detokenize=False)
    output = llm.generate([{"prompt_token_ids": [5]}], params, lora_request=adapter, use_tqdm=False)[0]
    assert output.outputs[0].error is None, output.outputs[0].error


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Rounds of all kinds of windows in turn."""
    load = os.getloadavg()[0]
    llm = LLM(
        arguments.model or str(checkpoint(arguments.shapes)), device="cpu", skip_tokenizer_init=True,
        quantization=arguments.quantization, max_model_len=16384, num_pages=1100, use_tqdm=False, weights_cache="none",
        enable_prefix_caching=False, enable_lora=True, max_loras=3, max_cpu_loras=5, max_lora_rank=arguments.rank,
    )  # fmt: skip
    gaps: dict[str, list[float]] = {kind: [] for kind in KINDS}
    longest: dict[str, list[float]] = {kind: [] for kind in KINDS}
    swaps: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        config = llm._client.engine_plan.hf_config
        made = [random_adapter(Path(folder), config, arguments.rank, number) for number in range(1, IN_FILES + 3)]
        own, resident, known, unread = made[0], made[1], made[2:4], made[4:]
        for request in (own, resident, *known):
            ask(llm, request)
        llm.pin_lora(own.lora_int_id)
        llm.pin_lora(resident.lora_int_id)  # the third slot is the others'
        watch, stream = Swaps(llm), Stream(llm, own, 16000)
        for number in range(-2, arguments.rounds):
            chosen: tuple[LoRARequest | None, ...] = (None, resident, known[number % 2], unread[number % len(unread)])
            touch(Path(unread[number % len(unread)].lora_path))
            for kind, asked in zip(KINDS, chosen, strict=True):
                if asked is not None and kind == "in host memory":
                    llm.add_lora(asked)  # where the window before has put it out
                    stream.gap()  # this thread takes the stream's tokens: reading is no part of the window
                watch.seconds.clear()
                thread = None if asked is None else threading.Thread(target=ask, args=(llm, asked))
                found = stream.window(thread, arguments.quiet)
                if number >= 0:  # the first rounds record steps
                    gaps[kind] += found
                    longest[kind].append(max(found))
                    swaps.setdefault(kind, []).extend(watch.seconds)
        nbytes = sum(each.stat().st_size for each in Path(own.lora_path).iterdir())
    llm.close()
    found = report(arguments, load, nbytes, (gaps, longest, swaps))
    return found | {"swap_cpu_ms": spread(watch.all_cpu)}


def touch(folder: Path) -> None:
    """Has the files read and hashed again: they look new."""
    for file in folder.iterdir():
        file.touch()
    adapter_digest.__globals__["_digest_of"].cache_clear()


def report(arguments: argparse.Namespace, load: float, nbytes: int, found: tuple[Any, Any, Any]) -> dict[str, Any]:
    """Milliseconds."""
    gaps, longest, swaps = found
    added = [b - a for a, b in zip(longest["in its slot"], longest["in files"], strict=True)]
    return {
        "processor": describe(), "model": arguments.model or arguments.shapes, "quantization": arguments.quantization,
        "rank": arguments.rank, "adapter_mb": round(nbytes / 1e6, 1), "rounds": arguments.rounds,
        "load_average": [round(load, 1), round(os.getloadavg()[0], 1)], "beside": arguments.beside,
        "swap_ms": {kind: spread(each) for kind, each in swaps.items() if each},
        "gap_ms": {kind: spread(each) for kind, each in gaps.items()},
        "longest_gap_ms": {kind: spread(each) for kind, each in longest.items()},
        "added_to_the_longest_gap_ms": spread(added),
        "added_at_p99_ms": round(quantile(gaps["in files"], 0.99) - quantile(gaps["in its slot"], 0.99), 2),
    }  # fmt: skip


def quantile(seconds: Sequence[float], share: float) -> float:
    """Milliseconds."""
    ordered = sorted(seconds)
    return MILLI * ordered[min(len(ordered) - 1, round(share * (len(ordered) - 1)))]


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Milliseconds."""
    shares = {"median": 0.5, "p90": 0.9, "p99": 0.99, "most": 1.0}
    return {"count": len(seconds), **{name: round(quantile(seconds, share), 2) for name, share in shares.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a Llama-like model; by default random weights of --shapes")
    parser.add_argument("--shapes", default="qwen3-0.6b")
    parser.add_argument("--quantization")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--quiet", type=int, default=8, help="tokens of a window without a request")
    parser.add_argument("--beside", default="", help="what else the machine ran, for the report")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    found = measure(arguments)
    print(json.dumps(found, indent=2))
    if arguments.out is not None:
        rows = json.loads(arguments.out.read_text()) if arguments.out.exists() else []
        arguments.out.write_text(json.dumps([*rows, found], indent=2) + "\n")


if __name__ == "__main__":
    main()
