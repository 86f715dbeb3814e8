"""Measures how far a model's next-token distributions are from another's, and how well both predict a text."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quintet.config import EngineConfig
from quintet.conformance.harness.manual_steps import Stretch, host_batch
from quintet.engine.startup import prepare

ROWS = 256  # of logits that are compared at a time


@dataclass(frozen=True)
class Divergence:
    """Over all positions of all sequences; Kullback-Leibler, of the second model from the first, in nats."""

    mean: float
    p99: float
    worst: float
    same: float  # share of positions with the same likeliest token
    positions: int
    perplexity_before: float
    perplexity_after: float

    def __str__(self) -> str:
        return (
            f"KL mean {self.mean:.5f}  p99 {self.p99:.4f}  worst {self.worst:.3f} nats, "
            f"same top-1 {self.same:.2%} of {self.positions} positions, "
            f"perplexity {self.perplexity_before:.4f} -> {self.perplexity_after:.4f}"
        )


def divergence(before: EngineConfig, after: EngineConfig, rows: Sequence[Sequence[int]]) -> Divergence:
    """Compares two models of one vocabulary, over sequences of at least 2 tokens that both can take."""
    length = max(map(len, rows))
    each, agreed, surprise = [], [], torch.zeros(2, dtype=torch.float64)
    pairs = zip(logits(before, rows, length), logits(after, rows, length), strict=True)
    for ids, (want, got) in zip(rows, pairs, strict=True):
        for first in range(0, len(ids), ROWS):
            p, q = (x[first : first + ROWS].double().log_softmax(-1) for x in (want, got))
            each.append((p.exp() * (p - q)).sum(-1))
            agreed.append(p.argmax(-1) == q.argmax(-1))
            following = torch.tensor(ids[first + 1 : first + 1 + len(p)])[:, None]
            surprise -= torch.stack([x[: len(following)].gather(1, following).sum() for x in (p, q)])
    kl, same = torch.cat(each), torch.cat(agreed)
    counted = sum(len(ids) - 1 for ids in rows)
    old, new = (math.exp(total / counted) for total in surprise.tolist())
    p99 = kl.sort().values[int(0.99 * (len(kl) - 1))].item()
    return Divergence(kl.mean().item(), p99, kl.max().item(), same.double().mean().item(), len(kl), old, new)


def logits(config: EngineConfig, rows: Sequence[Sequence[int]], length: int) -> Iterator[Tensor]:
    """[T, V] float32 for each sequence of up to `length` tokens, straight from the step."""
    prepared = prepare(config)
    worker, size = prepared.ranks.workers[0], prepared.config.page_size
    pages, groups = -(-length // size), worker.kv_cache_layout.groups
    worker.load(prepared.folder, pages * len(groups) + 1, (), progress=False)
    own = [range(1 + pages * index, 1 + pages * (index + 1)) for index in range(len(groups))]
    slots = (0, 1) if worker.kv_cache_layout.states else None
    for ids in rows:
        logits = worker.run(host_batch([Stretch(ids, 0, own, slots)], size, groups)).logits
        assert logits is not None
        yield worker.device.to_host(logits)().float().clone()
