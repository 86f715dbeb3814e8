"""Turns a plan into the arrays of one step, padded to a bucket where the platform wants fixed shapes."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quintet.engine.request import Request
from quintet.engine.scheduler import Plan
from quintet.types import Array, HostBatch


@dataclass(frozen=True)
class Buckets:
    """Sizes that a step is padded to; empty where shapes are free."""

    tokens: tuple[int, ...] = ()
    requests: tuple[int, ...] = ()
    pages: int = 0  # of the page table's rows


@dataclass(frozen=True)
class Rows:
    """Whose logits a step computes: first one row per request that samples, then the prompt rows that are asked for."""

    sampling: list[Request]
    prompts: list[tuple[Request, int, int]]  # (request, first position, number of positions)


def build(plan: Plan, page_size: int, buckets: Buckets) -> tuple[HostBatch, Rows]:
    """The step's arrays, and whose logits come out of it."""
    requests = list(plan.tokens)
    counts = np.fromiter(plan.tokens.values(), np.int32, len(requests))
    computed = np.fromiter((request.num_computed for request in requests), np.int32, len(requests))
    starts = np.zeros(len(requests) + 1, np.int32)
    np.cumsum(counts, out=starts[1:])
    owners = np.repeat(np.arange(len(requests), dtype=np.int32), counts)
    positions = np.arange(starts[-1], dtype=np.int32) + (computed - starts[:-1])[owners]
    table = _page_table(requests)
    slots = table[owners, positions // page_size] * page_size + positions % page_size
    logit_rows, rows = _logit_rows(requests, plan, starts)
    batch = HostBatch(
        token_ids=_token_ids(requests, plan),
        positions=positions,
        slots=slots,
        owners=owners,
        starts=starts,
        lengths=computed + counts,
        page_table=table,
        logit_rows=logit_rows,
    )
    return (_pad(batch, buckets) if buckets.tokens else batch), rows


def _token_ids(requests: Sequence[Request], plan: Plan) -> Array:
    ids: list[int] = []
    for request, count in plan.tokens.items():
        first = request.num_computed
        if count == 1:
            ids.append(request.token_ids[first])
        else:
            ids += request.token_ids[first : first + count]
    return np.array(ids, np.int32)


def _page_table(requests: Sequence[Request]) -> Array:
    table = np.zeros((len(requests), max(len(request.page_ids) for request in requests)), np.int32)
    for row, request in enumerate(requests):
        table[row, : len(request.page_ids)] = request.page_ids
    return table


def _logit_rows(requests: Sequence[Request], plan: Plan, starts: Array) -> tuple[Array, Rows]:
    """The last token of each request that has no more to compute; for prompt logprobs, every token but the last."""
    sampling: list[Request] = []
    rows: list[int] = []
    prompts: list[tuple[Request, int, int]] = []
    prompt_rows: list[int] = []
    ends = starts[1:].tolist()
    for request, count, end in zip(requests, plan.tokens.values(), ends, strict=True):
        first = request.num_computed
        if first + count == len(request.token_ids):
            sampling.append(request)
            rows.append(end - 1)
        if request.params.prompt_logprobs is not None and first < request.num_prompt - 1:
            wanted = min(count, request.num_prompt - 1 - first)
            prompts.append((request, first, wanted))
            prompt_rows += range(end - count, end - count + wanted)
    return np.array(rows + prompt_rows, np.int32), Rows(sampling, prompts)


def _pad(batch: HostBatch, buckets: Buckets) -> HostBatch:
    """Padded tokens write to the dump page and belong to the last row; padded requests have length 0."""
    tokens = _bucket(len(batch.token_ids), buckets.tokens)
    requests = _bucket(len(batch.lengths), buckets.requests)
    logits = _bucket(len(batch.logit_rows), (*buckets.requests, *buckets.tokens))
    table = np.zeros((requests, buckets.pages), np.int32)
    table[: batch.page_table.shape[0], : batch.page_table.shape[1]] = batch.page_table
    starts = np.full(requests + 1, batch.starts[-1], np.int32)
    starts[: len(batch.starts)] = batch.starts
    return HostBatch(
        token_ids=_fill(batch.token_ids, tokens),
        positions=_fill(batch.positions, tokens),
        slots=_fill(batch.slots, tokens),
        owners=_fill(batch.owners, tokens, requests - 1),
        starts=starts,
        lengths=_fill(batch.lengths, requests),
        page_table=table,
        logit_rows=_fill(batch.logit_rows, logits),
    )


def _bucket(size: int, buckets: Sequence[int]) -> int:
    fitting = [bucket for bucket in buckets if bucket >= size]
    assert fitting, f"{size} is over the largest bucket of {list(buckets)}"
    return min(fitting)


def _fill(array: Array, size: int, value: int = 0) -> Array:
    filled = np.full(size, value, np.int32)
    filled[: len(array)] = array
    return filled


def plan_buckets(limit: int) -> tuple[int, ...]:
    """1, 2, 4, ... up to the limit, the limit itself last: each step wastes less than half."""
    sizes = [1 << power for power in range(limit.bit_length()) if 1 << power < limit]
    return (*sizes, limit)
