"""Turns a plan into the arrays of one step, padded to one of the sizes that the platform runs."""

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

from quintet.engine.executor.output_rows import OutputRows, rows_of
from quintet.engine.request import Request
from quintet.engine.scheduler import StepPlan
from quintet.interface.types import Array, HostBatch, HostGroup, HostInputs, Variant


class BatchBuilder:
    """Builds the steps of one engine. A step in which all decode, the usual one, takes a shorter way."""

    def __init__(
        self,
        page_size: int,
        fixed: Sequence[Variant] = (),
        groups: int = 1,
        states: bool = False,
        captured: Sequence[Variant] = (),
        types: bool = False,
    ) -> None:
        """`fixed`: the sizes of all steps, where shapes are fixed; `captured`: those worth padding to, where they are
        free. `groups`: of pages. With `states`, one more is of layers that keep a state per request. With `types`,
        tokens have segments."""
        self._types = types
        self._page_size, self._groups, self._states = page_size, range(groups), states
        self.fixed, self._captured = fixed, CaptureSizes(captured)
        self._count = np.arange(256, dtype=np.int32)  # 0, 1, 2, ...; views of it are given out and never written to

    def build(self, plan: StepPlan) -> tuple[HostBatch, OutputRows]:
        """Builds the step's arrays, and the rows of its logits."""
        requests = list(plan.tokens)
        decoding = plan.num_tokens == len(requests) == plan.num_rows  # a row for each, and none is scored
        if (
            decoding
            and requests[0].admitted.pooling is None  # one runner's requests are all of its kind
            and all(r.num_computed + 1 == len(r.token_ids) and not _embedded(r) for r in requests)
        ):
            batch, rows = self._decode(requests)
        else:
            batch, rows = self._mixed(requests, plan)
        if self.fixed:
            return pad(batch, self.fixed), rows
        return self._captured.pad(batch), rows

    def _decode(self, requests: list[Request]) -> tuple[HostBatch, OutputRows]:
        """One token of each request, and it samples."""
        size, count = self._page_size, len(requests)
        rows = self._first(count)
        positions = [request.num_computed for request in requests]
        at = np.array(positions, np.int32)
        lengths, groups = at + 1, []
        for index in self._groups:
            slots = [r.pages[index][p // size] * size + p % size for r, p in zip(requests, positions, strict=True)]
            groups.append(HostGroup(np.array(slots, np.int32), _table(requests, index), lengths))
        if self._states:
            groups.append(state_group([(r.slots.state, r.slots.following) for r in requests], count, lengths))
        batch = HostBatch(
            token_ids=np.array([request.token_ids[-1] for request in requests], np.int32),
            positions=at,
            owners=rows,
            starts=self._first(count + 1),
            rows=rows,
            groups=tuple(groups),
        )
        return batch, OutputRows(requests)

    def _mixed(self, requests: list[Request], plan: StepPlan) -> tuple[HostBatch, OutputRows]:
        """Any stretch of each request."""
        counts = np.fromiter(plan.tokens.values(), np.int32, len(requests))
        computed = np.fromiter((request.num_computed for request in requests), np.int32, len(requests))
        starts = np.zeros(len(requests) + 1, np.int32)
        np.cumsum(counts, out=starts[1:])
        owners = np.repeat(self._first(len(requests)), counts)
        positions = np.arange(starts[-1], dtype=np.int32) + (computed - starts[:-1])[owners]
        places, offsets = positions // self._page_size, positions % self._page_size
        lengths, groups = computed + counts, []
        for index in self._groups:
            table = _table(requests, index)
            groups.append(HostGroup(table[owners, places] * self._page_size + offsets, table, lengths))
        if self._states:
            slots = [(request.slots.state, request.slots.following) for request in requests]
            groups.append(state_group(slots, len(positions), lengths))
        wanted, rows = rows_of(requests, list(plan.tokens.values()), starts)
        batch = HostBatch(
            token_ids=_token_ids(plan),
            positions=positions,
            owners=owners,
            starts=starts,
            rows=wanted,
            groups=tuple(groups),
        )
        if any(_embedded(request) for request in requests):
            batch = batch._replace(inputs=_inputs(plan))
        elif self._types:
            batch = batch._replace(inputs=HostInputs(types=_types(plan)))
        return batch, rows

    def _first(self, count: int) -> Array:
        """0, 1, ... count - 1."""
        if count > len(self._count):
            self._count = np.arange(2 * count, dtype=np.int32)
        return self._count[:count]


def state_group(slots: Sequence[tuple[int, int]], tokens: int, lengths: Array) -> HostGroup:
    """Returns the group of layers that keep a state per request; each request reads and writes these slots."""
    return HostGroup(np.zeros(tokens, np.int32), np.array(slots, np.int32).reshape(-1, 2), lengths)


def _token_ids(plan: StepPlan) -> Array:
    ids: list[int] = []
    for request, count in plan.tokens.items():
        ids += request.token_ids[request.num_computed : request.num_computed + count]
    return np.array(ids, np.int32)


def _embedded(request: Request) -> bool:
    """True if embeddings stand in the places of the tokens that it computes next."""
    return request.num_computed < request.num_prompt and bool(request.admitted.embeds)


def _inputs(plan: StepPlan) -> HostInputs:
    """The embeddings of a step's prompts, and where they stand among its tokens."""
    rows, places = [], np.full(plan.num_tokens, -1, np.int32)
    at = found = 0
    for request, count in plan.tokens.items():
        if _embedded(request):
            start, stop = request.num_computed, min(request.num_computed + count, request.num_prompt)
            given = stop - start
            rows.append(np.frombuffer(request.admitted.embeds_of(start, stop), np.float32).reshape(given, -1))
            places[at : at + given] = np.arange(found, found + given)
            found += given
        at += count
    return HostInputs(embeds=np.concatenate(rows), places=places)


def _types(plan: StepPlan) -> Array:
    """The segments of a step's tokens."""
    found = np.zeros(plan.num_tokens, np.int32)
    at = 0
    for request, count in plan.tokens.items():
        if request.admitted.types:
            start = request.num_computed
            found[at : at + count] = np.frombuffer(request.admitted.types, np.int32)[start : start + count]
        at += count
    return found


def _table(requests: Sequence[Request], group: int) -> Array:
    rows = []
    for request in requests:
        row = request.rows[group]
        if row is None:
            row = request.rows[group] = np.array(request.pages[group], np.int32)
        rows.append(row)
    if len(rows) == 1:
        return rows[0][None]
    table = np.zeros((len(rows), max(map(len, rows))), np.int32)
    for index, row in enumerate(rows):
        table[index, : len(row)] = row
    return table


def pad(batch: HostBatch, variants: Sequence[Variant]) -> HostBatch:
    """Padded tokens write to page 0 and belong to the last row; padded requests have length 0."""
    count, inputs = (
        len(batch.token_ids),
        tuple(name for name in ("embeds", "types") if getattr(batch.inputs, name) is not None),
    )
    # the smallest: they are in order
    variant = next(each for each in variants if each.tokens >= count and each.inputs == inputs)
    starts = np.full(variant.requests + 1, batch.starts[-1], np.int32)
    starts[: len(batch.starts)] = batch.starts
    groups = []
    for group, pages in zip(batch.groups, variant.pages, strict=True):
        table = np.zeros((variant.requests, pages), np.int32)
        table[: group.table.shape[0], : group.table.shape[1]] = group.table
        groups.append(HostGroup(_fill(group.slots, variant.tokens), table, _fill(group.lengths, variant.requests)))
    return HostBatch(
        token_ids=_fill(batch.token_ids, variant.tokens),
        positions=_fill(batch.positions, variant.tokens),
        owners=_fill(batch.owners, variant.tokens, variant.requests - 1),
        starts=starts,
        rows=_fill(batch.rows, variant.rows),
        groups=tuple(groups),
        inputs=_pad_inputs(batch.inputs, variant),
    )


def _pad_inputs(inputs: HostInputs, variant: Variant) -> HostInputs:
    if inputs.types is not None:
        inputs = inputs._replace(types=_fill(inputs.types, variant.tokens))
    if inputs.embeds is None or inputs.places is None:
        return inputs
    embeds = np.zeros((variant.tokens, variant.width), np.float32)
    embeds[: len(inputs.embeds)] = inputs.embeds
    return inputs._replace(embeds=embeds, places=_fill(inputs.places, variant.tokens, -1))


class CaptureSizes:
    """The sizes of the steps that are captured, where shapes are free: what is near one is padded to it."""

    def __init__(self, variants: Sequence[Variant]) -> None:
        self._decodes = sorted({each.tokens for each in variants if each.decode})
        self._mixed = sorted({(each.tokens, each.requests, each.rows) for each in variants if not each.decode})

    def pad(self, batch: HostBatch) -> HostBatch:
        """The step in the next size; as it is where none holds it, or where it brings more than ids. Rows stay, and
        tables are as wide as they were."""
        tokens, requests, rows = len(batch.token_ids), len(batch.starts) - 1, len(batch.rows)
        if batch.inputs.embeds is not None or batch.inputs.types is not None:
            return batch
        if tokens == requests and rows <= tokens:
            place = bisect_left(self._decodes, tokens)
            return _pad_decode(batch, self._decodes[place]) if place < len(self._decodes) else batch
        for size, most, wanted in self._mixed[bisect_left(self._mixed, (tokens, 0, 0)) :]:
            if requests <= most and rows <= wanted:
                return _pad_mixed(batch, size, most)
        return batch


def _pad_mixed(batch: HostBatch, tokens: int, requests: int) -> HostBatch:
    """With tokens on page 0, which belong to the last row and to no request's stretch, and with requests of none."""
    groups = []
    for group in batch.groups:
        table = np.zeros((requests, group.table.shape[1]), np.int32)
        table[: len(group.table)] = group.table
        groups.append(
            group._replace(slots=_fill(group.slots, tokens), table=table, lengths=_fill(group.lengths, requests))
        )
    return batch._replace(
        token_ids=_fill(batch.token_ids, tokens),
        positions=_fill(batch.positions, tokens),
        owners=_fill(batch.owners, tokens, requests - 1),
        starts=_fill(batch.starts, requests + 1, batch.starts[-1]),
        groups=tuple(groups),
    )


def _pad_decode(batch: HostBatch, size: int) -> HostBatch:
    """With requests of one token on page 0."""
    count = len(batch.token_ids)
    if size == count:
        return batch
    at, groups = np.arange(size + 1, dtype=np.int32), []
    rows = at[:count] if batch.rows is batch.owners else batch.rows  # the beginning of what it is the whole of here
    for group in batch.groups:
        table = np.zeros((size, group.table.shape[1]), np.int32)
        table[:count] = group.table
        groups.append(HostGroup(_fill(group.slots, size), table, _fill(group.lengths, size, 1)))
    return batch._replace(
        token_ids=_fill(batch.token_ids, size),
        positions=_fill(batch.positions, size),
        owners=at[:-1],
        starts=at,
        rows=rows,
        groups=tuple(groups),
    )


def _fill(array: Array, size: int, value: int = 0) -> Array:
    filled = np.full(size, value, np.int32)
    filled[: len(array)] = array
    return filled
