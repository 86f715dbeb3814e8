"""Scans on the CPU: our kernel beside the specification in torch, which takes a prompt token by token.

They take turns within a round, and the best round of each counts: what else runs on the machine slows all.
"""

import argparse
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.cpu_small import alternate
from quintet.interface.types import Batch, Group, StepContext
from quintet.ops import Op
from quintet.ops.states import DeltaRuleInputs, ScanInputs, ScanWeights
from quintet.platforms.cpu.ops import states as native_states

Call = tuple[str, str, tuple[Any, ...]]  # of which model, op, arguments
MILLI = 1e-3


def context(requests: int, tokens: int) -> StepContext:
    """So many requests of so many tokens each, which go on from one state and write another."""
    starts = torch.arange(requests + 1, dtype=torch.int32) * tokens
    none = torch.zeros(requests * tokens, dtype=torch.int32)
    table = torch.stack([torch.arange(1, requests + 1), torch.arange(requests + 1, 2 * requests + 1)], 1).int()
    group = Group(none, table, torch.full((requests,), tokens, dtype=torch.int32))
    owners = torch.arange(requests, dtype=torch.int32).repeat_interleave(tokens)
    return StepContext(Batch(none, none, owners, starts, none, (group,)), group)


def selective(channels: int, width: int, requests: int, tokens: int) -> tuple[Any, ...]:
    total = requests * tokens
    rates = torch.log(torch.arange(1, width + 1).float()).repeat(channels, 1)
    into, out = (torch.randn(total, 1, width).bfloat16() for _ in range(2))
    moves = ScanInputs(torch.randn(total, channels, 1).bfloat16(), torch.randn(total, channels).bfloat16(), into, out)
    state = torch.zeros(2 * requests + 1, channels, width)
    return moves, ScanWeights(rates, torch.zeros(channels), torch.ones(channels)), state, context(requests, tokens)


def space(heads: int, dim: int, width: int, requests: int, tokens: int) -> tuple[Any, ...]:
    total = requests * tokens
    into, out = (torch.randn(total, 1, width).bfloat16() for _ in range(2))
    moves = ScanInputs(torch.randn(total, heads, dim).bfloat16(), torch.randn(total, heads).bfloat16(), into, out)
    state = torch.zeros(2 * requests + 1, heads, dim, width)
    return moves, ScanWeights(*(torch.zeros(heads) for _ in range(3))), state, context(requests, tokens), 0.0


def delta(heads: int, groups: int, dim: int, requests: int, tokens: int, by_channel: bool = False) -> tuple[Any, ...]:
    total, decays = requests * tokens, (heads, dim) if by_channel else (heads,)
    sizes = ((groups, dim), (groups, dim), (heads, dim), decays, (heads,))
    turns = DeltaRuleInputs(*(torch.randn(total, *size).bfloat16() for size in sizes))
    state = torch.zeros(2 * requests + 1, heads, dim, dim)
    scan = ScanWeights(torch.zeros(heads), torch.zeros(decays))
    return turns, scan, state, context(requests, tokens), 0.0 if by_channel else 1.0


def calls(requests: int, tokens: int) -> Iterator[Call]:
    yield "Mamba-130M", "selective_scan", selective(1536, 16, requests, tokens)
    yield "Jamba 1.5 Mini", "selective_scan", selective(8192, 16, requests, tokens)
    yield "Granite-4-H-1B", "state_space", space(48, 64, 128, requests, tokens)
    yield "Qwen3-Next-80B", "delta_rule", delta(32, 16, 128, requests, tokens)
    yield "Kimi-Linear-48B", "kimi_delta_rule", delta(32, 32, 128, requests, tokens, by_channel=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=0.3, help="for each call")
    args = parser.parse_args()
    if reason := native_states.probe():
        raise SystemExit(reason)
    from quintet import _cpu

    _cpu.set_threads(args.threads)
    torch.set_num_threads(args.threads)
    with torch.inference_mode():
        for requests, tokens in ((1, 1), (16, 1), (1, 512)):
            for model, op, given in calls(requests, tokens):
                ours, others = alternate([_bound(op, name, given) for name in ("native", "reference")], args.seconds)
                print(
                    f"{model:28} {requests:2} x {tokens:3} tokens: {ours * MILLI:9.3f} ms, "
                    f"the specification {others * MILLI:9.3f} ({others / ours:6.1f}x)",
                    flush=True,
                )


def _bound(op: str, provider: str, given: tuple[Any, ...]) -> Any:
    function = Op.registry[op].reference if provider == "reference" else Op.registry[op].providers[provider]

    def call() -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = function(*given)
        return found

    return call


if __name__ == "__main__":
    main()
