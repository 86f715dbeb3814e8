"""Our sampling beside its specification in torch on this processor, in microseconds of a row and in readings of it.

    python -m benchmarks.cpu_sampling --threads 2

151,936 tokens, as Qwen3 has. `flat`: nearly equal logits, as of random weights; `peaked`: a few tokens stand out, as of
a trained model. Each call takes other rows, and providers take turns; the median counts. Reading a row once takes its
bytes at the best rate at which this processor reads as many as all the tables have.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from quintet import _cpu
from quintet.ops import Op
from quintet.ops.sampling import Draw
from quintet.platforms.cpu.ops import sampling as native_sampling

VOCAB = 151_936
TABLES = 4  # that take turns
Call = Callable[[Callable[..., object]], object]  # of a provider, on the next logits
REGISTERED = native_sampling  # importing it did it
PROVIDERS = ("native", "reference")
CUTS: dict[str, tuple[float, int, float, float]] = {  # temperature, top_k, top_p, min_p
    "temperature 1": (1.0, 0, 1.0, 0.0),
    "top_k 20, top_p 0.95": (0.6, 20, 0.95, 0.0),
    "top_k 50, top_p 0.95": (0.6, 50, 0.95, 0.0),
    "top_p 0.95": (0.6, 0, 0.95, 0.0),
    "min_p 0.05": (0.6, 0, 1.0, 0.05),
}


@dataclass(frozen=True)
class Case:
    what: str
    op: str
    bytes: int  # of a logit
    call: Call


def flat(rows: int) -> Tensor:
    return torch.randn(rows, VOCAB) * 0.02


def peaked(rows: int) -> Tensor:
    logits = torch.randn(rows, VOCAB) * 2
    places = torch.randint(0, VOCAB, (rows, 30))
    return logits.scatter_add_(1, places, 16 * torch.rand(rows, 30) ** 0.5)


def draw_of(rows: int, cut: tuple[float, int, float, float]) -> Draw:
    temperature, top_k, top_p, min_p = (torch.full((rows,), value) for value in cut)
    keys = torch.randint(-(2**31), 2**31, (rows, 2)).int()
    return Draw(temperature, top_k.int(), top_p, min_p, keys, torch.arange(rows, dtype=torch.int32))


def width_of(cut: tuple[float, int, float, float]) -> int:
    return cut[1] or (VOCAB if cut[2] < 1 else 0)


class Turns:
    """A few tables of logits, one after the other."""

    def __init__(self, tables: Iterable[Tensor]) -> None:
        self.tables = list(tables)
        self.count = 0

    def __call__(self) -> Tensor:
        self.count += 1
        return self.tables[self.count % len(self.tables)]


def drawing(table: Turns, draw: Draw, width: int) -> Call:
    return lambda f: f(table(), draw, width)


def draws(name: str, table: Turns, rows: int) -> Iterator[Case]:
    for what, cut in CUTS.items():
        yield Case(f"{name} {what}", "sample", 4, drawing(table, draw_of(rows, cut), width_of(cut)))


def others(table: Turns, rows: int) -> Iterator[Case]:
    halves, ones = Turns(each.bfloat16() for each in table.tables), torch.ones(rows, dtype=torch.int32)
    draw = draw_of(rows, (1.0, 50, 0.95, 0.0))
    yield Case("bfloat16", "greedy", 2, lambda f: f(halves()))
    yield Case("float32", "greedy", 4, lambda f: f(table()))
    yield Case("5 of them", "top_logprobs", 4, lambda f: f(table(), ones, 5, True, ones))
    yield Case("top_k 50, top_p 0.95", "filter_logits", 4, lambda f: f(table(), draw, 50))


def cases(rows: int) -> Iterator[Case]:
    for shape in (flat, peaked):
        yield from draws(shape.__name__, Turns(shape(rows) for _ in range(TABLES)), rows)
    yield from others(Turns(peaked(rows) for _ in range(TABLES)), rows)


def medians(case: Case, seconds: float) -> dict[str, float]:
    """Seconds of a call by provider."""
    took: dict[str, list[float]] = {name: [] for name in PROVIDERS}
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or len(took["native"]) < 3:
        for name in PROVIDERS:
            start = time.perf_counter()
            case.call(Op.registry[case.op].providers[name])
            took[name].append(time.perf_counter() - start)
    return {name: statistics.median(times) for name, times in took.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--isa", default=_cpu.isa())
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    _cpu.set_threads(args.threads)
    _cpu.choose_isa(args.isa)
    table = TABLES * 4 * VOCAB * args.rows  # bytes
    rate = _cpu.read_bandwidth(max(table, 1 << 20), args.threads, 0.5)  # GB/s
    print(f"{args.isa}, {args.threads} threads, {args.rows} rows; reading {table >> 20} MiB: {rate:.1f} GB/s")
    for case in cases(args.rows):
        reading = case.bytes * VOCAB / rate / 1e3
        for name, took in medians(case, args.seconds).items():
            each = took / args.rows * 1e6
            what = f"{case.op} {case.what}"
            print(f"{what:38} {name:9} {each:8.1f} us a row, {each / reading:7.1f} readings", flush=True)


if __name__ == "__main__":
    main()
