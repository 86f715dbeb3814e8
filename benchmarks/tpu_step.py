"""Measures a step of the TPU platform on JAX's CPU devices, against the CPU platform.

python benchmarks/tpu_step.py [MODEL] [--dtype float32] [--out benchmarks/results/tpu-on-host.json]

Both platforms run the same steps in turn, in one process, so that a busy machine slows both; a share is of the medians.
"""

import argparse
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np  # the path is set first, so that the script runs by itself

from benchmarks.checkpoints import SHAPES, checkpoint
from quintet.config import EngineConfig
from quintet.engine.executor.batch_builder import pad
from quintet.engine.startup import EnginePlan, prepare
from quintet.interface.types import HostBatch, HostGroup
from quintet.platforms.cpu.cpu_info import describe
from quintet.platforms.host import threads

RESULTS = Path(__file__).parent / "results"
ROUNDS = 20
CONTEXT = 200  # tokens that each decoding request has behind it


@dataclass(frozen=True)
class StepCost:
    """Milliseconds of one step, from the host's arrays to logits on the host."""

    step: str
    tokens: int
    requests: int
    bucket: int
    torch_ms: float
    jax_ms: float
    jax_of_torch: float  # below 1, the compiled step is faster


def measure(model: str, dtype: str) -> dict[str, Any]:
    """Costs of decode and prefill steps, and what starting took."""
    folder = str(checkpoint(model)) if model in SHAPES else model
    limits = {"max_model_len": 512, "max_num_seqs": 64, "max_num_batched_tokens": 512, "compilation_cache_dir": "none"}
    prepared: dict[str, EnginePlan] = {}
    seconds = 0.0
    for device in ("cpu", "tpu"):
        prepared[device] = prepare(EngineConfig.from_kwargs(model=folder, dtype=dtype, device=device, **limits))
        start = time.perf_counter()
        loaded(prepared[device])
        seconds = round(time.perf_counter() - start, 1)
    steps = [("decode", requests, 1) for requests in (1, 16, 64)] + [("prefill", 1, 128), ("prefill", 1, 512)]
    return {
        "model": model,
        "dtype": dtype,
        "tpu_load_and_compile_s": seconds,
        "steps": [asdict(cost(prepared, *step)) for step in steps],
    }


def loaded(prepared: EnginePlan) -> None:
    """With its weights and its cache, and every step compiled."""
    prepared.ranks.workers[0].load(prepared.folder, prepared.memory_plan.num_pages, prepared.fixed_shapes, False)


def cost(prepared: dict[str, EnginePlan], name: str, requests: int, new: int) -> StepCost:
    """Both platforms on the same batch, in turn."""
    groups = len(prepared["tpu"].ranks.workers[0].kv_cache_layout.groups)
    host = batch(requests, new, 0 if new > 1 else CONTEXT, groups)
    times: dict[str, list[float]] = {device: [] for device in prepared}
    bucket = len(host.token_ids)
    for _ in range(ROUNDS + 3):
        for device, each in prepared.items():
            worker = each.ranks.workers[0]
            start = time.perf_counter()
            padded = pad(host, each.fixed_shapes) if each.fixed_shapes else host
            worker.device.to_host(worker.run(padded).logits)()
            times[device].append((time.perf_counter() - start) * 1e3)
            bucket = max(bucket, len(padded.token_ids))
    torch_ms, jax_ms = (statistics.median(times[device][3:]) for device in ("cpu", "tpu"))
    return StepCost(
        name, requests * new, requests, bucket, round(torch_ms, 2), round(jax_ms, 2), round(jax_ms / torch_ms, 2)
    )


def batch(requests: int, new: int, cached: int, groups: int = 1, page_size: int = 16) -> HostBatch:
    """Requests alike: `new` tokens after `cached` ones, the last of each wants its logits."""
    pages = -(-(cached + new) // page_size)
    tables = 1 + np.arange(groups * requests * pages, dtype=np.int32).reshape(groups, requests, pages)
    positions = np.tile(np.arange(cached, cached + new, dtype=np.int32), requests)
    owners = np.repeat(np.arange(requests, dtype=np.int32), new)
    starts = np.arange(requests + 1, dtype=np.int32) * new
    return HostBatch(
        token_ids=(positions * 7 + owners) % 500,
        positions=positions,
        token_to_seq=owners,
        query_start_loc=starts,
        logits_indices=starts[1:] - 1,
        groups=tuple(
            HostGroup(
                slot_mapping=table[owners, positions // page_size] * page_size + positions % page_size,
                block_table=table,
                seq_lens=np.full(requests, cached + new, np.int32),
            )
            for table in tables
        ),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=["bundled"])
    parser.add_argument("--dtype", nargs="*", default=["float32", "bfloat16"])
    parser.add_argument("--out", type=Path, default=RESULTS / "tpu-on-host.json")
    args = parser.parse_args()
    runs = [measure(model, dtype) for model in args.models for dtype in args.dtype]
    facts = {"date": time.strftime("%Y-%m-%d"), "cpu": describe(), "cores": threads()}
    args.out.write_text(json.dumps({**facts, "runs": runs}, indent=2) + "\n")
    print(args.out.read_text())


if __name__ == "__main__":
    main()
