"""Times the first token after a prompt with its KV pages in host memory or on a disk, beside computing them.

python benchmarks/kv_offload.py [--model qwen3-0.6b] [--tokens 4096] [--out benchmarks/results/kv-offload.json]

One engine; its prefix cache is emptied before each run; a round has each way in turn, so that a busy machine slows
all, and a figure is the median of the rounds. The first tokens must be equal. From the disk twice: with the files in
the system's page cache, as they are soon after they were written, and after the system has dropped them on request.
"""

import argparse
import json
import logging
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.checkpoints import checkpoint  # the path is set first, so that the script runs by itself
from quintet import LLM, SamplingParams
from quintet.conformance.harness.worker_runner import random_prompts
from quintet.engine.kv_transfer.offload.tiers import TieredConnector
from quintet.platforms.host import threads

GIB = 2**30


def dropped(folder: Path) -> None:
    """Asks the system to forget what it holds of the files."""
    for path in folder.rglob("*.page"):
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


class Ways:
    """One engine, and how its next prompt comes by its pages."""

    def __init__(self, model: str, tokens: int, folder: Path, device: str) -> None:
        self.folder, self.tokens = folder, tokens
        self.llm = LLM(
            str(checkpoint(model)), device=device, dtype="bfloat16", max_model_len=tokens + 64, use_tqdm=False,
            num_pages=tokens // 16 + 16, skip_tokenizer_init=True, kv_offloading_size=4,
            kv_offloading_folder=str(folder),
        )  # fmt: skip
        self.scheduler = self.llm._client.engine.scheduler
        assert self.scheduler.kv_transfer is not None
        self.kv_transfer, tiers = self.scheduler.kv_transfer, self.scheduler.kv_transfer.connector
        assert isinstance(tiers, TieredConnector) and tiers.disk is not None
        self.tiers, self.disk = tiers, tiers.disk
        (self.prompt,) = random_prompts(1, (tokens,), 1000)

    def first_token(self) -> tuple[float, int]:
        """Seconds, and the token."""
        params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
        start = time.perf_counter()
        (output,) = self.llm.generate([{"prompt_token_ids": self.prompt}], params, use_tqdm=False)
        return time.perf_counter() - start, output.outputs[0].token_ids[0]

    def computed(self) -> None:
        self.scheduler.kv_transfer = None

    def from_host(self) -> None:
        self.scheduler.kv_transfer = self.kv_transfer

    def from_disk(self) -> None:
        self.from_host()
        self.tiers.clear()

    def from_device(self) -> None:
        self.from_disk()
        dropped(self.folder)

    def run(self, prepare: Callable[[], None]) -> tuple[float, int]:
        self.scheduler.pool.reset_cache()
        prepare()
        return self.first_token()

    def fill(self) -> None:
        """Computes the prompt once, and waits until all of it is on the disk."""
        self.first_token()
        while len(self.disk) < self.tokens // 16:
            time.sleep(0.1)


def measured(ways: Ways, rounds: int) -> dict[str, Any]:
    kinds = {
        "computed": ways.computed, "host memory": ways.from_host, "disk, in the page cache": ways.from_disk,
        "disk": ways.from_device,
    }  # fmt: skip
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    tokens = set()
    for _ in range(rounds):
        for kind, prepare in kinds.items():
            took, token = ways.run(prepare)
            seconds[kind].append(took)
            tokens.add(token)
            print(f"{kind}: {took:.3f} s", flush=True)
    assert len(tokens) == 1, "the ways say different tokens"
    medians = {kind: statistics.median(took) for kind, took in seconds.items()}
    return {
        "page_mib": ways.kv_transfer.page_copier.nbytes / 2**20,
        "prompt_gib": ways.kv_transfer.page_copier.nbytes * (ways.tokens // 16) / GIB,
        "seconds": {kind: [round(each, 4) for each in took] for kind, took in seconds.items()},
        "times_as_fast": {kind: round(medians["computed"] / each, 1) for kind, each in medians.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-0.6b", help="shapes of benchmarks/checkpoints.py, random weights")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--folder", help="where pages are written; a temporary one if not given")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        ways = Ways(given.model, given.tokens, Path(folder) / "pages", given.device)
        ways.fill()
        found = measured(ways, given.rounds)
        detail = ways.llm._client.engine_plan.capabilities.detail
        ways.llm.close()
    result = {"model": given.model, "tokens": given.tokens, "device": detail, "threads": threads(), **found}
    print(json.dumps(result, indent=2))
    if given.out:
        given.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
