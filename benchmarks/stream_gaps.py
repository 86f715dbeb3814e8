"""Measures the longest gap of a stream while another request's prompt is computed, and how long that one waits.

    python -m benchmarks.stream_gaps [--model FOLDER|FILE.gguf] [--quantization w4a8] [--isa avx2] [--out FILE.json]

One request decodes in this process, step by step. In turn, for each length of prompt and each limit of prompt tokens
beside it (prefill_tokens_beside_decode), another request of two tokens comes. Without a model: random weights of
Qwen3-0.6B's shapes.
"""

import argparse
import datetime
import itertools
import json
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.checkpoints import checkpoint
from quintet import SamplingParams
from quintet.chat.prompts import Prompt
from quintet.config import EngineConfig
from quintet.engine.client import EngineClient
from quintet.engine.engine import Engine
from quintet.outputs import RequestOutput
from quintet.platforms.cpu.cpu_info import describe

MILLI = 1e3
QUIET = 8  # steps of the stream alone, before each request


@dataclass(frozen=True)
class Gaps:
    """Milliseconds: medians of the rounds, and the most."""

    prompt: int
    limit: int
    alone: float  # a step of the stream
    longest: float
    most: float
    first_token: float  # of the other request


def params(tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, detokenize=False)


def measure(client: EngineClient, prompts: Sequence[int], asked: Sequence[int], rounds: int) -> list[Gaps]:
    assert isinstance(client.engine, Engine)
    scheduler, number = client.engine.scheduler, itertools.count()
    client.add(client.next_id(), Prompt([7, 11, 13]), params(100_000))
    client.step()
    found: dict[tuple[int, int], list[tuple[float, float, float]]] = {}
    for turn in range(-2, rounds):  # the first rounds record steps
        for prompt, limit in itertools.product(prompts, asked):
            limits = replace(scheduler.limits, prefill_tokens_beside_decode=limit)
            scheduler.limits = limits  # type: ignore[misc]
            first = next(number)  # another prompt each time
            tokens = [5 + (first + at) % 200 for at in range(prompt)]
            row = one_request(client, tokens)
            if turn >= 0:
                found.setdefault((prompt, limit), []).append(row)
    rows = []
    for (prompt, limit), each in found.items():
        alone, longest, waits = (list(column) for column in zip(*each, strict=True))
        values = statistics.median(alone), statistics.median(longest), max(longest), statistics.median(waits)
        rows.append(Gaps(prompt, limit, *(round(value * MILLI, 1) for value in values)))
        print(rows[-1], flush=True)
    return rows


def one_request(client: EngineClient, tokens: list[int]) -> tuple[float, float, float]:
    """Returns seconds: a step before it, the longest step until it has ended, and its first token."""
    quiet = [_timed(client)[0] for _ in range(QUIET)]
    own, start, first, gaps = client.next_id(), time.perf_counter(), 0.0, []
    client.add(own, Prompt(tokens), params(2))
    ended = False
    while not ended:
        seconds, outputs = _timed(client)
        gaps.append(seconds)
        mine = [output for output in outputs if output.request_id == own]
        if mine and not first:
            first = time.perf_counter() - start
        ended = any(output.finished for output in mine)
    return statistics.median(quiet), max(gaps), first


def _timed(client: EngineClient) -> tuple[float, list[RequestOutput]]:
    start = time.perf_counter()
    outputs = client.step()
    return time.perf_counter() - start, outputs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="by default random weights of --shapes")
    parser.add_argument("--shapes", default="qwen3-0.6b")
    parser.add_argument("--quantization")
    parser.add_argument("--isa", help="QUINTET_CPU_ISA")
    parser.add_argument("--prompts", nargs="+", type=int, default=[1, 32, 128, 512])
    parser.add_argument("--limits", nargs="+", type=int, default=[0, 16], help="0: none")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--label", default="", help="name of these rows in the file")
    parser.add_argument("--out", type=Path, help="file for the results; the rows of an earlier run stay in it")
    args = parser.parse_args()
    if args.isa:
        os.environ["QUINTET_CPU_ISA"] = args.isa
    config = EngineConfig(
        model=args.model or str(checkpoint(args.shapes)), device="cpu", skip_tokenizer_init=True,
        quantization=args.quantization, max_model_len=16384, num_pages=2500, enable_prefix_caching=False,
    )  # fmt: skip
    rows = measure(EngineClient(config, progress=False), args.prompts, args.limits, args.rounds)
    if args.out:
        runs = json.loads(args.out.read_text()) if args.out.exists() else []
        runs.append({
            "label": args.label, "date": str(datetime.date.today()), "cpu": describe(), "isa": args.isa,
            "model": Path(args.model).name if args.model else args.shapes, "quantization": args.quantization,
            "load": [round(x, 1) for x in os.getloadavg()], "rows": [asdict(row) for row in rows],
        })  # fmt: skip
        args.out.write_text(json.dumps(runs, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
