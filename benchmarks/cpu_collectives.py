"""Sums over ranks that are processes of this host: ours, called from Python and in a recorded step, beside gloo's.

All run in the same processes, one after the other within a round, and the best round of each counts: what else runs on
the machine slows all. A rank's core must be its own: with fewer cores than ranks these are times of the scheduler.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from quintet.common.subprocess_python import python_command
from quintet.interface.types import RankInfo
from quintet.platforms.cpu.shared_memory import SharedFiles, SharedMemory, connect_ranks
from quintet.platforms.host import nameless_file

SIZES = (1 << 10, 8 << 10, 64 << 10, 1 << 20, 16 << 20)  # bytes
RECORDED = 50  # collectives of a step
MICRO = 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", help="file to write the figures to")
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--descriptor", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.descriptor is None:
        return start(arguments)
    figures = measure(arguments)
    if arguments.rank == 0:
        show(figures, arguments)


def start(arguments: argparse.Namespace) -> None:
    with nameless_file() as file, tempfile.TemporaryDirectory() as folder:
        shared = ["--descriptor", str(file.fileno()), "--store", os.path.join(folder, "store")]
        ranks = [
            subprocess.Popen(
                [*python_command("benchmarks.cpu_collectives"), *sys.argv[1:], *shared, "--rank", str(rank)],
                pass_fds=(file.fileno(),),
            )
            for rank in range(arguments.ranks)
        ]
        codes = [each.wait() for each in ranks]
    sys.exit(max(codes))


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """By one rank; all do the same at the same time."""
    torch.set_num_threads(1)
    place = RankInfo(arguments.rank, arguments.ranks, f"shared://{arguments.descriptor}")
    comm, gloo = connect_ranks(place, SharedFiles(), 60.0), gloo_of(arguments)
    assert isinstance(comm, SharedMemory)
    found = []
    for size in SIZES:
        dtype = getattr(torch, arguments.dtype)
        x = torch.ones(size // dtype.itemsize, dtype=dtype)
        ways: dict[str, tuple[Callable[[], object], int]] = {
            "ours": (lambda x=x: comm.all_reduce(x), 1),
            "recorded": (recorded(comm, x), RECORDED),
            "gloo": (lambda x=x: gloo.allreduce([x]).wait(), 1),
        }
        best = {name: best_of(call, each, size, arguments.rounds, comm) for name, (call, each) in ways.items()}
        found.append({"bytes": size, **best})
    return found


def recorded(comm: SharedMemory, x: torch.Tensor) -> Callable[[], object]:
    """So many sums, one after the other, without Python between."""
    from quintet import _cpu

    graph, kept = _cpu.Graph(), []
    graph.begin()
    for _ in range(RECORDED):
        kept.append(comm.all_reduce(x))
    graph.end()
    return lambda: (graph.run(), kept)


def best_of(call: Callable[[], object], each: int, size: int, rounds: int, comm: SharedMemory) -> float:
    """Microseconds of one sum, in the best round."""
    times = max(1, min(200, (4 << 20) // size) // each)
    best = float("inf")
    for _ in range(rounds):
        comm.all_agree(True)  # all begin together
        began = time.perf_counter()
        for _ in range(times):
            call()
        best = min(best, (time.perf_counter() - began) / times / each)
    return best * MICRO


def gloo_of(arguments: argparse.Namespace) -> Any:
    import torch.distributed as dist

    store = dist.FileStore(arguments.store, arguments.ranks)
    return dist.ProcessGroupGloo(store, arguments.rank, arguments.ranks, timedelta(seconds=60))


def show(figures: list[dict[str, Any]], arguments: argparse.Namespace) -> None:
    print(f"all-reduce of {arguments.ranks} processes, {arguments.dtype}, microseconds; {os.cpu_count()} processors")
    print(f"{'bytes':>10}  {'ours':>9}  {'recorded':>9}  {'gloo':>9}")
    for row in figures:
        print(f"{row['bytes']:>10}  {row['ours']:>9.1f}  {row['recorded']:>9.1f}  {row['gloo']:>9.1f}")
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump({"ranks": arguments.ranks, "dtype": arguments.dtype, "rows": figures}, file, indent=1)


if __name__ == "__main__":
    main()
