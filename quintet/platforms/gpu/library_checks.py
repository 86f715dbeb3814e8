"""Trials of a vendor's library before it serves: compares its results on a device with the specification's."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from quintet.interface.types import AttentionSpec, Batch, Group, StepContext
from quintet.ops.attention import page_shape, paged_attention
from quintet.ops.moe import experts
from quintet.ops.norm import add_rms_norm, rms_norm
from quintet.platforms.gpu.attention import SINGLE

WIDE = 1024  # slots of a table wide enough that kernels split its requests: more than 512
STEPS = 4  # of the type's precision, by which a trial may be off at the largest result
STEPS_BY_ROW = {torch.float32: 256}  # scores are sums in another order, and go through exp
TOKENS, INTERPRETED = 700, 40  # of a request: several splits, tiles and pages
GATHERED_SLOTS = 8 * TOKENS  # slots of contexts that the specification gathers at once: 0.2 GB with 32 KV heads of 128
SCORE_DEVIATION = 4.0  # of scores: their standard deviation
Pair = tuple[Tensor, Tensor]  # what a library gave, and the specification


def differ(got: Tensor, want: Tensor, whose: str) -> str | None:
    """Returns what is wrong with a library's result."""
    off, most = (float(x.float().abs().max()) for x in (got.float() - want.float(), want))
    good = got.shape == want.shape and off <= STEPS * torch.finfo(got.dtype).eps * max(1.0, most)
    return None if good else f"{whose}'s result is off by {off:.3g} of {most:.3g}"


def test_numbers(device: torch.device, *shape: int) -> Tensor:
    """The same numbers in bfloat16 each time."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(7)).bfloat16().to(device)


def of_norm(device: torch.device, norm: Callable[..., Tensor]) -> Pair:
    x, weight = test_numbers(device, 5, 512), test_numbers(device, 512)
    return norm(x, weight, 1e-6, 0.0), rms_norm.reference(x, weight, 1e-6, 0.0)


def of_add_norm(device: torch.device, norm: Callable[..., Pair]) -> Pair:
    x, weight = test_numbers(device, 2, 5, 512), test_numbers(device, 512)
    got, want = (torch.stack(each(x[0], x[1], weight, 1e-6, 0.0)) for each in (norm, add_rms_norm.reference))
    return got, want


def of_experts(device: torch.device, mixed: Callable[..., Tensor]) -> Pair:
    """Two of four for each token; one entry has no expert."""
    ids = torch.tensor([[0, 3], [2, 1], [3, -1]], dtype=torch.int32, device=device)
    stacks = test_numbers(device, 4, 512, 256) / 16, test_numbers(device, 4, 256, 256) / 16
    args = test_numbers(device, 3, 256), *stacks, torch.full((3, 2), 0.5, device=device), ids, "silu"
    return mixed(*args), experts.reference(*args)


def of_attention(spec: AttentionSpec, device: torch.device, attend: Callable[..., Any], whose: str) -> str | None:
    """A prompt of 3 tokens and the second half of one of TOKENS, then single tokens in a table so wide that a request
    is shared out, by another kernel; against the specification. Says what was wrong."""
    try:
        most = tokens_for(device)
        kv = test_numbers(device, 2 + -(-most // spec.page_size), *page_shape(spec)).to(spec.dtype)
        sinks = sinks_for(spec, device)
        for context in (_step(spec, device, [3, most // 2], most), _step(spec, device, [1, 1], WIDE, SINGLE)):
            q = queries(spec, device, len(context.batch.positions))
            got = attend(q, kv, context, spec, sinks)
            if wrong := differ_by_row(got, specified(q, kv, context, spec, sinks), whose):
                return wrong
        return None
    except Exception as error:  # it compiles and launches: whatever goes wrong is a reason not to serve
        return f"{whose} fails on a small step: {type(error).__name__}: {error}"


def _step(spec: AttentionSpec, device: torch.device, brought: list[int], slots: int, kind: int = 0) -> StepContext:
    """Requests of 3 and of TOKENS tokens, which bring so many, in a table of so many slots; with a plan of the kind."""
    lengths, starts = [3, tokens_for(device)], [0, brought[0], sum(brought)]
    positions = [length - count + i for length, count in zip(lengths, brought, strict=True) for i in range(count)]
    pages = -(-lengths[1] // spec.page_size)
    rows = [[1] + [0] * (pages - 1), list(range(pages + 1, 1, -1))]  # page 1; the others, last to first
    numbers = (positions, [0] * brought[0] + [1] * brought[1], starts, rows, lengths)
    place, owners, begin, table, kept = (torch.tensor(x, dtype=torch.int32, device=device) for x in numbers)
    table = torch.nn.functional.pad(table, (0, max(0, -(-slots // spec.page_size) - pages)))
    plan = (torch.zeros(0, kind, 2, dtype=torch.int32),) if kind else ()
    group = Group(place, table, kept, plan)
    return StepContext(Batch(place, place, owners, begin, begin[1:] - 1, (group,)), group)


def tokens_for(device: torch.device) -> int:
    """Returns the tokens of the longest request of a trial: several splits and tiles; fewer if interpreted."""
    return INTERPRETED if device.type == "cpu" else TOKENS


def queries(spec: AttentionSpec, device: torch.device, count: int) -> Tensor:
    """[count, H, D] for keys of size 1, with scores that let a few keys outweigh the others: each is some token's."""
    size = SCORE_DEVIATION / (spec.scale * spec.head_dim**0.5)
    return (test_numbers(device, count, spec.heads, spec.head_dim).float() * size).to(spec.dtype)


def sinks_for(spec: AttentionSpec, device: torch.device) -> Tensor | None:
    return torch.linspace(-1, 1, spec.heads, device=device).to(spec.dtype) if spec.sinks else None


def specified(q: Tensor, kv: Tensor, context: StepContext, spec: AttentionSpec, sinks: Tensor | None) -> Tensor:
    """The specification of paged attention, which gathers a context for each token, a few tokens at a time."""
    found, count = [], max(1, GATHERED_SLOTS // (context.group.block_table.shape[1] * spec.page_size))
    for first in range(0, len(q), count):
        some = slice(first, first + count)
        batch = context.batch._replace(
            positions=context.batch.positions[some], token_to_seq=context.batch.token_to_seq[some]
        )
        found.append(paged_attention.reference(q[some], kv, context._replace(batch=batch), spec, sinks))
    return torch.cat(found)


def differ_by_row(got: Tensor, want: Tensor, whose: str) -> str | None:
    """Describes what is wrong with rows [T, H, D], each measured by its own largest number: most keys weigh little."""
    if got.shape != want.shape:
        return f"{whose}'s result has shape {tuple(got.shape)}, not {tuple(want.shape)}"
    most = want.float().abs().amax(-1)
    off = (got.float() - want.float()).abs().amax(-1) / most.clamp(min=1e-6)
    worst = float(off.max())  # NaN where there is one
    if worst <= STEPS_BY_ROW.get(got.dtype, STEPS) * torch.finfo(got.dtype).eps:
        return None
    return f"{whose}'s result is off by {worst:.3g} of a row's largest number"
