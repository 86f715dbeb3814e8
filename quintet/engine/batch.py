"""Turns a plan into the arrays of one step, padded to a bucket where the platform wants fixed shapes."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quintet.engine.request import Request
from quintet.engine.scheduler import Plan
from quintet.types import Array, Bucket, HostBatch


@dataclass(frozen=True)
class Rows:
    """Whose logits a step computes: first one row per request that samples, then the prompt rows that are asked for."""

    sampling: list[Request]
    prompts: list[tuple[Request, int, int]]  # (request, first position, number of positions)


class BatchBuilder:
    """Builds the steps of one engine. A step in which all decode, the usual one, takes a shorter way."""

    def __init__(self, page_size: int, buckets: Sequence[Bucket] = ()) -> None:
        self._page_size, self._buckets = page_size, buckets
        self._count = np.arange(256, dtype=np.int32)  # 0, 1, 2, ...; views of it are given out and never written to

    def build(self, plan: Plan) -> tuple[HostBatch, Rows]:
        """The step's arrays, and whose logits come out of it."""
        requests = list(plan.tokens)
        decoding = plan.num_tokens == len(requests) and not any(r.params.prompt_logprobs is not None for r in requests)
        if decoding and all(r.num_computed + 1 == len(r.token_ids) for r in requests):
            batch, rows = self._decode(requests)
        else:
            batch, rows = self._mixed(requests, plan)
        return (pad(batch, self._buckets) if self._buckets else batch), rows

    def _decode(self, requests: list[Request]) -> tuple[HostBatch, Rows]:
        """One token of each request, and it samples."""
        size, count = self._page_size, len(requests)
        rows = self._first(count)
        positions = [request.num_computed for request in requests]
        slots = [r.page_ids[at // size] * size + at % size for r, at in zip(requests, positions, strict=True)]
        at = np.array(positions, np.int32)
        batch = HostBatch(
            token_ids=np.array([request.token_ids[-1] for request in requests], np.int32),
            positions=at,
            slots=np.array(slots, np.int32),
            owners=rows,
            starts=self._first(count + 1),
            lengths=at + 1,
            page_table=_page_table(requests),
            logit_rows=rows,
        )
        return batch, Rows(requests, [])

    def _mixed(self, requests: list[Request], plan: Plan) -> tuple[HostBatch, Rows]:
        """Any stretch of each request."""
        counts = np.fromiter(plan.tokens.values(), np.int32, len(requests))
        computed = np.fromiter((request.num_computed for request in requests), np.int32, len(requests))
        starts = np.zeros(len(requests) + 1, np.int32)
        np.cumsum(counts, out=starts[1:])
        owners = np.repeat(self._first(len(requests)), counts)
        positions = np.arange(starts[-1], dtype=np.int32) + (computed - starts[:-1])[owners]
        table = _page_table(requests)
        slots = table[owners, positions // self._page_size] * self._page_size + positions % self._page_size
        logit_rows, rows = _logit_rows(requests, plan, starts)
        batch = HostBatch(
            token_ids=_token_ids(plan),
            positions=positions,
            slots=slots,
            owners=owners,
            starts=starts,
            lengths=computed + counts,
            page_table=table,
            logit_rows=logit_rows,
        )
        return batch, rows

    def _first(self, count: int) -> Array:
        """0, 1, ... count - 1."""
        if count > len(self._count):
            self._count = np.arange(2 * count, dtype=np.int32)
        return self._count[:count]


def _token_ids(plan: Plan) -> Array:
    ids: list[int] = []
    for request, count in plan.tokens.items():
        ids += request.token_ids[request.num_computed : request.num_computed + count]
    return np.array(ids, np.int32)


def _page_table(requests: Sequence[Request]) -> Array:
    rows = []
    for request in requests:
        if request.page_row is None:
            request.page_row = np.array(request.page_ids, np.int32)
        rows.append(request.page_row)
    if len(rows) == 1:
        return rows[0][None]
    table = np.zeros((len(rows), max(map(len, rows))), np.int32)
    for index, row in enumerate(rows):
        table[index, : len(row)] = row
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
        scored = request.scored(first, count)
        if scored:
            prompts.append((request, scored.start, len(scored)))
            prompt_rows += range(end - count + scored.start - first, end - count + scored.stop - first)
    return np.array(rows + prompt_rows, np.int32), Rows(sampling, prompts)


def pad(batch: HostBatch, buckets: Sequence[Bucket]) -> HostBatch:
    """Padded tokens write to the dump page and belong to the last row; padded requests have length 0."""
    bucket = next(each for each in buckets if each.tokens >= len(batch.token_ids))  # the smallest: they are in order
    tokens, requests, rows, pages = bucket
    table = np.zeros((requests, pages), np.int32)
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
        logit_rows=_fill(batch.logit_rows, rows),
    )


def _fill(array: Array, size: int, value: int = 0) -> Array:
    filled = np.full(size, value, np.int32)
    filled[: len(array)] = array
    return filled
