"""Trials of a vendor's library before it serves: what it gives on a device beside what the specification says."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from quintet.ops.attention import page_shape, paged_attention
from quintet.ops.moe import experts
from quintet.ops.norm import add_rms_norm, rms_norm
from quintet.platforms.gpu.attention import SINGLE
from quintet.types import AttentionSpec, Batch, Books, Group

WIDE = 1024  # slots of a table whose requests kernels share out: more than 512
STEPS = 4  # of the type's precision, by which a trial may be off at the largest result
Pair = tuple[Tensor, Tensor]  # what a library gave, and the specification


def differ(got: Tensor, want: Tensor, whose: str) -> str | None:
    """What is wrong with a library's result."""
    off, most = (float(x.float().abs().max()) for x in (got.float() - want.float(), want))
    good = got.shape == want.shape and off <= STEPS * torch.finfo(got.dtype).eps * max(1.0, most)
    return None if good else f"{whose}'s result is off by {off:.3g} of {most:.3g}"


def drawn(device: torch.device, *shape: int) -> Tensor:
    """The same numbers in bfloat16 each time."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(7)).bfloat16().to(device)


def of_norm(device: torch.device, norm: Callable[..., Tensor]) -> Pair:
    x, weight = drawn(device, 5, 512), drawn(device, 512)
    return norm(x, weight, 1e-6, 0.0), rms_norm.reference(x, weight, 1e-6, 0.0)


def of_add_norm(device: torch.device, norm: Callable[..., Pair]) -> Pair:
    x, weight = drawn(device, 2, 5, 512), drawn(device, 512)
    got, want = (torch.stack(each(x[0], x[1], weight, 1e-6, 0.0)) for each in (norm, add_rms_norm.reference))
    return got, want


def of_experts(device: torch.device, mixed: Callable[..., Tensor]) -> Pair:
    """Two of four for each token; one entry is nobody's."""
    ids = torch.tensor([[0, 3], [2, 1], [3, -1]], dtype=torch.int32, device=device)
    stacks = drawn(device, 4, 512, 256) / 16, drawn(device, 4, 256, 256) / 16
    args = drawn(device, 3, 256), *stacks, torch.full((3, 2), 0.5, device=device), ids, "silu"
    return mixed(*args), experts.reference(*args)


def of_attention(spec: AttentionSpec, device: torch.device, attend: Callable[..., Any], whose: str) -> str | None:
    """A prompt of 3 tokens and a token behind 20 others, then single tokens in a table so wide that a request is shared
    out, by another kernel; against the specification. Says what was wrong."""
    try:
        kv = drawn(device, 3, *page_shape(spec)).to(spec.dtype)
        sinks = torch.linspace(-1, 1, spec.heads, device=device).to(spec.dtype) if spec.sinks else None
        for books in (_step(spec, device, [3, 1], 21), _step(spec, device, [1, 1], WIDE, SINGLE)):
            q = drawn(device, len(books.batch.positions), spec.heads, spec.head_dim).to(spec.dtype)
            got = attend(q, kv, books, spec, sinks)
            if wrong := differ(got, paged_attention.reference(q, kv, books, spec, sinks), whose):
                return wrong
        return None
    except Exception as error:  # it compiles and launches: whatever goes wrong is a reason not to serve
        return f"{whose} fails on a small step: {type(error).__name__}: {error}"


def _step(spec: AttentionSpec, device: torch.device, brought: list[int], slots: int, kind: int = 0) -> Books:
    """Requests of 3 and of 21 tokens, which bring so many, in a table of so many slots; with a plan of the kind."""
    lengths, starts = [3, 21], [0, brought[0], sum(brought)]
    positions = [length - count + i for length, count in zip(lengths, brought, strict=True) for i in range(count)]
    numbers = (positions, [0] * brought[0] + [1] * brought[1], starts, [[1, 0], [2, 1]], lengths)
    place, owners, begin, table, kept = (torch.tensor(x, dtype=torch.int32, device=device) for x in numbers)
    table = table.repeat(1, -(-slots // (2 * spec.page_size)))
    plan = (torch.zeros(0, kind, 2, dtype=torch.int32),) if kind else ()
    group = Group(place, table, kept, plan)
    return Books(Batch(place, place, owners, begin, begin[1:] - 1, (group,)), group)
