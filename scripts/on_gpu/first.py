"""The first things to know of a device: what serves each op, what probing takes, whether a model's tokens are right.

python scripts/on_gpu/first.py ops|tokens|step --results FILE [--device cuda]
"""

import argparse
import gc
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from quintet import LLM, SamplingParams  # the path is set first, so that the script runs by itself
from quintet.config import EngineConfig
from quintet.ops import Op, bind
from quintet.platforms import choose
from scripts.on_gpu.jobs import note

PROMPTS = ["Once upon a time", "The capital of France is"]
TOKENS = 16
SETTINGS: dict[str, Any] = {"num_pages": 64, "max_model_len": 256, "max_num_seqs": 4, "use_tqdm": False}


def ops(device: str, results: Path) -> int:
    """Each op's provider, why the others do not serve, and the seconds of its probe -> 0."""
    chosen = choose(device)
    settled, reasons = chosen.platform.configure(EngineConfig(device=device))
    platform = chosen.platform(settled)
    platform.open(0)
    note(results, kind="device", detail=chosen.capabilities.detail, reasons=reasons)
    print(chosen.capabilities.detail, flush=True)
    bound = bind(platform.op_priority)
    for op in sorted(Op.registry):
        start = time.perf_counter()
        choice = bound.choice(op)
        seconds = round(time.perf_counter() - start, 2)
        print(
            f"{op:24} {choice.provider:12} {seconds:6.2f} s  {'; '.join(map(': '.join, choice.rejected))}", flush=True
        )
        note(results, kind="op", op=op, provider=choice.provider, rejected=choice.rejected, seconds=seconds)
    return 0


def generated(dtype: str, **settings: Any) -> tuple[list[list[int]], float]:
    """Greedy tokens of the bundled model, and the seconds from its start to the last of them."""
    start = time.perf_counter()
    llm = LLM(dtype=dtype, **SETTINGS, **settings)
    got = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=TOKENS), use_tqdm=False)
    tokens = [list(each.outputs[0].token_ids) for each in got]
    del llm
    gc.collect()
    return tokens, round(time.perf_counter() - start, 2)


def tokens(device: str, results: Path) -> int:
    """Eager, then captured, each against the CPU platform's in float32; captured once more in bfloat16 -> exit code."""
    wanted, seconds = generated("float32", device="cpu")
    note(results, kind="tokens", how="cpu", tokens=wanted, seconds=seconds)
    wrong = 0
    for how, dtype, eager in (("eager", "float32", True), ("captured", "float32", False), ("half", "bfloat16", False)):
        try:
            got, seconds = generated(dtype, device=device, enforce_eager=eager)
        except Exception as error:  # whatever a device does: the next way may tell more
            print(f"{how}: {type(error).__name__}: {error}", flush=True)
            note(results, kind="tokens", how=how, error=f"{type(error).__name__}: {error}")
            wrong += 1
            continue
        same = got == wanted
        wrong += not same and dtype == "float32"  # half precision may round to another token
        note(results, kind="tokens", how=how, tokens=got, same=same, seconds=seconds)
        print(f"{how}: {'the' if same else 'NOT the'} CPU platform's tokens, {seconds} s", flush=True)
    return int(wrong > 0)


def step(device: str, results: Path) -> int:
    """Two eager steps, for a tool that watches memory and takes its time."""
    llm = LLM(dtype="float32", device=device, enforce_eager=True, **SETTINGS)
    llm.generate(PROMPTS[:1], SamplingParams(temperature=0, max_tokens=2), use_tqdm=False)
    note(results, kind="step", device=device)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("ops", "tokens", "step"))
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    return {"ops": ops, "tokens": tokens, "step": step}[args.what](args.device, args.results)


if __name__ == "__main__":
    sys.exit(main())
