"""Checks a device: which provider serves each op, a model's tokens, attention at real shapes.

python scripts/on_gpu/first.py ops|tokens|attention|step --results FILE [--device cuda]
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


WAYS: dict[str, dict[str, Any]] = {  # of generating on the device -> settings
    "eager": {"dtype": "float32", "enforce_eager": True},
    "captured": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "int4": {"dtype": "bfloat16", "quantization": "int4"},
    "fp8": {"dtype": "bfloat16", "quantization": "fp8"},
    "fp8a8": {"dtype": "bfloat16", "quantization": "fp8a8"},
    "w8a8": {"dtype": "bfloat16", "quantization": "w8a8"},
}


def tokens(device: str, results: Path) -> int:
    """Compares greedy tokens with the CPU platform's in float32, for each of WAYS -> exit code.

    In float32 they must be equal. Half precision may round to another token: there the first token of each prompt
    must be the CPU's, computed in float32 with weights of the same form.
    """
    wrong, known = 0, dict[str | None, list[list[int]]]()
    for way, settings in WAYS.items():
        fmt = settings.get("quantization")
        try:
            if fmt not in known:
                known[fmt], seconds = generated("float32", device="cpu", **({"quantization": fmt} if fmt else {}))
                note(results, kind="tokens", way=f"cpu {fmt or ''}".strip(), tokens=known[fmt], seconds=seconds)
            wanted = known[fmt]
            got, seconds = generated(device=device, **settings)
        except Exception as error:  # whatever a device does: the next way may tell more
            print(f"{way}: {type(error).__name__}: {error}", flush=True)
            note(results, kind="tokens", way=way, error=f"{type(error).__name__}: {error}")
            wrong += 1
            continue
        alike = [_alike(*pair) for pair in zip(got, wanted, strict=True)]
        same = got == wanted
        wrong += not (same if settings["dtype"] == "float32" else all(alike))
        note(results, kind="tokens", way=way, tokens=got, same=same, alike=alike, seconds=seconds)
        said = "the CPU platform's tokens" if same else f"NOT the CPU platform's tokens, but the first {alike}"
        print(f"{way}: {said}, {seconds} s", flush=True)
    return int(wrong > 0)


def _alike(got: list[int], wanted: list[int]) -> int:
    """Counts the tokens at the beginning that are the same."""
    return next((at for at, pair in enumerate(zip(got, wanted, strict=False)) if pair[0] != pair[1]), len(wanted))


LAYERS = ((32, 8, 128), (16, 8, 128), (32, 8, 64))  # heads, KV heads, head_dim
LOADS = ((4, 1, 3000), (4, 300, 0), (4, 200, 2000))  # requests, new tokens of each, tokens behind each
BOUND = 0.01  # of the largest result: bfloat16's rounding of it, and of the values


def attention(device: str, results: Path) -> int:
    """Compares paged attention in bfloat16 over random pages with torch's in float32, per layer and load."""
    import torch

    from benchmarks.tpu_step import batch
    from quintet.interface.types import AttentionSpec, StepContext
    from quintet.ops.attention import page_shape
    from quintet.platforms.gpu import providers
    from quintet.platforms.gpu.ops.probe import device_here

    providers.register()
    at, wrong = device_here(), 0
    if at is None:
        print("attention was not compared: torch finds no GPU")
        return 1
    triton = Op.registry["paged_attention"].providers["triton"]
    small = at.type == "cpu"  # a host stands in where this is tried
    for heads, kv_heads, dim in ((4, 2, 16),) if small else LAYERS:
        for requests, new, behind in ((2, 1, 70), (2, 20, 30)) if small else LOADS:
            spec = AttentionSpec(heads, kv_heads, dim, dim**-0.5, torch.bfloat16, 16)
            host = batch(requests, new, behind)
            there = host.on([torch.from_numpy(each).to(at) for each in host.leaves()])
            group = there.groups[0]
            kv = torch.randn(int(group.block_table.max()) + 1, *page_shape(spec), device=at).bfloat16()
            q = torch.randn(requests * new, heads, dim, device=at).bfloat16()
            got = triton(q, kv, StepContext(there, group), spec, None).float()
            k, v = (
                kv.float()[group.block_table.long()][:, :, part].transpose(1, 2).flatten(2, 3)[:, :, : new + behind]
                for part in (0, 1)
            )
            query = q.float().view(requests, new, heads, dim).transpose(1, 2)
            seen = torch.ones(new, new + behind, device=at).tril(behind).bool()
            k, v = (each.repeat_interleave(heads // kv_heads, 1) for each in (k, v))
            want = torch.nn.functional.scaled_dot_product_attention(query, k, v, seen).transpose(1, 2).flatten(0, 1)
            off, largest = float((got - want).abs().max()), float(want.abs().max())
            bad = not off < BOUND * largest
            wrong += bad
            load = f"{heads} heads, {kv_heads} KV heads of {dim}, {requests} x {new} new after {behind}"
            print(f"{load}: off by {off:.3g} of {largest:.3g}{': WRONG' if bad else ''}", flush=True)
            note(results, kind="attention", heads=heads, kv_heads=kv_heads, dim=dim, new=new, behind=behind, off=off,
                 largest=largest, wrong=bad)  # fmt: skip
    return int(wrong > 0)


def step(device: str, results: Path) -> int:
    """Two eager steps, for a tool that watches memory and takes its time."""
    llm = LLM(dtype="float32", device=device, enforce_eager=True, **SETTINGS)
    llm.generate(PROMPTS[:1], SamplingParams(temperature=0, max_tokens=2), use_tqdm=False)
    note(results, kind="step", device=device)
    return 0


CHECKS = {"ops": ops, "tokens": tokens, "attention": attention, "step": step}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=tuple(CHECKS))
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    return CHECKS[args.what](args.device, args.results)


if __name__ == "__main__":
    sys.exit(main())
