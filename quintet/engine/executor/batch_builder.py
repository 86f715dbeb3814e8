"""Turns a plan into the arrays of one step, padded to one of the sizes that the platform runs."""

from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from quintet.engine.executor.output_rows import OutputRows, output_rows_of
from quintet.engine.request import Request
from quintet.engine.step_plan import StepPlan
from quintet.interface.types import TOKEN_INPUTS, HostBatch, HostGroup, HostInputs, IntArray, ShapeBucket
from quintet.media.spans import overlaps


class BatchBuilder:
    """Builds the steps of one engine. A step in which all decode, the usual one, takes a shorter way."""

    def __init__(  # noqa: PLR0913  # facts about the model's groups, and about shapes
        self,
        page_size: int,
        fixed: Sequence[ShapeBucket] = (),
        groups: int = 1,
        state_columns: int = 0,
        captured: Sequence[ShapeBucket] = (),
        inputs: Collection[str] = (),
        cross: bool = False,
    ) -> None:
        """`fixed`: the sizes of all steps, where shapes are fixed; `captured`: those worth padding to, where they are
        free. `groups`: of pages. With `state_columns`, one more is of layers that keep a state per request, whose table
        has so many. `inputs`: fields of Inputs that a model takes: token_type_ids, embed_indices and adapters, which
        steps of fixed shapes always have then. `cross`: one more group, behind those of tokens, is of layers that read
        an encoder's rows."""
        self._types, self._adapters = "token_type_ids" in inputs, "adapters" in inputs
        self._ahead = "until" in inputs
        self._always_embeds = bool(fixed) and "embed_indices" in inputs
        self._page_size, self._groups, self._state_columns = page_size, range(groups), state_columns
        self._cross = cross
        self.fixed, self._captured = fixed, CaptureSizes(captured)
        self._always_adapters = False
        self._count = np.arange(256, dtype=np.int32)  # 0, 1, 2, ...; views of it are given out and never written to

    def build(self, plan: StepPlan) -> tuple[HostBatch, OutputRows]:
        """Builds the step's arrays, and the rows of its logits."""
        requests = list(plan.tokens)
        decoding = plan.num_tokens == len(requests) == plan.num_rows  # a row for each, and none is scored
        if (
            decoding
            and requests[0].core_request.pooling is None  # one runner's requests are all of its kind
            and all(r.num_computed + 1 == len(r.token_ids) and not _has_embeds(r) for r in requests)
        ):
            batch, rows = self._decode(requests)
        else:
            batch, rows = self._mixed(requests, plan)
        if self.fixed:
            return pad(batch, self.fixed), rows
        return self._captured.pad(batch), rows

    @contextmanager
    def with_adapters_always(self) -> Iterator[None]:
        """Steps have `adapters` though no request has one: kernels for these are compiled by a step that has them."""
        self._always_adapters = True
        try:
            yield
        finally:
            self._always_adapters = False

    def _decode(self, requests: list[Request]) -> tuple[HostBatch, OutputRows]:
        """One token of each request, and it samples."""
        size, count = self._page_size, len(requests)
        rows = self._first(count)
        positions = [request.num_computed for request in requests]
        at = np.array(positions, np.int32)
        lengths, groups = at + 1, []
        for index in self._groups:
            slots = [r.pages[index][p // size] * size + p % size for r, p in zip(requests, positions, strict=True)]
            groups.append(HostGroup(np.array(slots, np.int32), _block_table(requests, index), lengths))
        if self._cross:
            groups.append(cross_group(requests, count))
        if self._state_columns:
            groups.append(state_group([self._state_row(request) for request in requests], count, lengths))
        batch = HostBatch(
            token_ids=np.array([request.token_ids[-1] for request in requests], np.int32),
            positions=at,
            token_to_seq=rows,
            query_start_loc=self._first(count + 1),
            logits_indices=rows,
            groups=tuple(groups),
        )
        if self._always_embeds:
            batch = batch._replace(inputs=HostInputs(embed_indices=np.full(count, -1, np.int32)))
        if self._adapters:
            batch = self._with_adapters(batch, requests)
        return _with_rotary(batch, requests), OutputRows(requests)

    def build_draft(
        self,
        requests: list[Request],
        starts: Sequence[int],
        tokens: Sequence[Sequence[int]],
        rows: Sequence[int] = (),
        places: Sequence[int] = (),
    ) -> HostBatch:
        """Builds a step of a drafter: the tokens of each request from a position on, with a row of logits after the
        last of each, or after so many of the last. Layers that keep states have none here. `places` [T]: embed_indices,
        which a head that drafts a block reads."""
        counts = np.fromiter(map(len, tokens), np.int32, len(requests))
        ids = np.array([each for row in tokens for each in row], np.int32)
        batch = self._stretches(requests, np.array(starts, np.int32), counts, ids, states=False)
        if places:
            last = [np.arange(end - count, end) for end, count in zip(batch.query_start_loc[1:], rows, strict=True)]
            inputs = HostInputs(embed_indices=np.array(places, np.int32))
            batch = batch._replace(logits_indices=np.concatenate(last).astype(np.int32), inputs=inputs)
            return pad(batch, self.fixed) if self.fixed else self._captured.pad(batch)
        alone = len(ids) == len(requests)
        batch = batch._replace(logits_indices=batch.token_to_seq if alone else batch.query_start_loc[1:] - 1)
        return pad(batch, self.fixed) if self.fixed else self._captured.pad(batch)

    def _stretches(
        self, requests: list[Request], computed: IntArray, counts: IntArray, token_ids: IntArray, states: bool = True
    ) -> HostBatch:
        """Builds a step of `counts` tokens of each request after those `computed`; no row of logits is settled yet."""
        starts = np.zeros(len(requests) + 1, np.int32)
        np.cumsum(counts, out=starts[1:])
        owners = np.repeat(self._first(len(requests)), counts)
        positions = np.arange(starts[-1], dtype=np.int32) + (computed - starts[:-1])[owners]
        places, offsets = positions // self._page_size, positions % self._page_size
        lengths, groups = computed + counts, []
        for index in self._groups:
            table = _block_table(requests, index)
            groups.append(HostGroup(table[owners, places] * self._page_size + offsets, table, lengths))
        if self._cross:
            groups.append(cross_group(requests, len(positions)))
        if self._state_columns:
            slots = [self._state_row(each) if states else (0,) * self._state_columns for each in requests]
            groups.append(state_group(slots, len(positions), lengths))
        return HostBatch(
            token_ids=token_ids,
            positions=positions,
            token_to_seq=owners,
            query_start_loc=starts,
            logits_indices=owners,
            groups=tuple(groups),
        )

    def _state_row(self, request: Request) -> tuple[int, ...]:
        """Returns the row of the table of states for the next step of a request."""
        slots = request.state_slots
        row = slots.state, slots.next_state, request.num_computed - slots.num_state, request.num_drafts
        return row[: self._state_columns]

    def _mixed(self, requests: list[Request], plan: StepPlan) -> tuple[HostBatch, OutputRows]:
        """Any stretch of each request."""
        counts = np.fromiter(plan.tokens.values(), np.int32, len(requests))
        computed = np.fromiter((request.num_computed for request in requests), np.int32, len(requests))
        batch = self._stretches(requests, computed, counts, _token_ids(plan))
        wanted, rows = output_rows_of(requests, list(plan.tokens.values()), batch.query_start_loc)
        batch = batch._replace(logits_indices=wanted)
        if self._always_embeds or any(_has_embeds(request) or _sees_ahead(request) for request in requests):
            batch = batch._replace(inputs=HostInputs(embed_indices=_embed_indices(plan), until=self._until(plan)))
        elif self._types:
            batch = batch._replace(inputs=HostInputs(token_type_ids=_token_types(plan)))
        if self._adapters:
            batch = self._with_adapters(batch, requests)
        return _with_rotary(batch, requests), rows

    def _until(self, plan: StepPlan) -> IntArray | None:
        """The last position that each token sees, where tokens of a picture or of a prompt see one another; None: none
        does here."""
        if not self._ahead:
            return None
        found, at = np.full(plan.num_tokens, -1, np.int32), 0
        for request, count in plan.tokens.items():
            start = request.num_computed
            if _sees_ahead(request):
                found[at : at + min(count, request.num_prompt - start)] = request.num_prompt - 1
            for media in () if request.core_request.sees_prompt else request.core_request.media:
                if not media.attends_ahead:
                    continue
                for place, size, _ in overlaps(media, start, start + count):
                    found[at + place - start : at + place - start + size] = place + size - 1
            at += count
        return found if (found >= 0).any() else None

    def _with_adapters(self, batch: HostBatch, requests: Sequence[Request]) -> HostBatch:
        """The batch with the adapter of each token, where a request has one."""
        slots = [request.lora_slot for request in requests]
        always = bool(self.fixed) or self._always_adapters
        if not (any(slots) or always):
            return batch
        inputs = batch.inputs._replace(adapters=np.array(slots, np.int32)[batch.token_to_seq])
        extras = [request.lora_slot * (request.lora is not None and request.lora.has_extras) for request in requests]
        if any(extras) or self.fixed:
            inputs = inputs._replace(adapter_extras=np.array(extras, np.int32)[batch.token_to_seq])
        return batch._replace(inputs=inputs)

    def _first(self, count: int) -> IntArray:
        """0, 1, ... count - 1."""
        if count > len(self._count):
            self._count = np.arange(2 * count, dtype=np.int32)
        return self._count[:count]


def cross_group(requests: Sequence[Request], tokens: int) -> HostGroup:
    """Returns the group of layers that read an encoder's rows: those of each request's media. Nothing is written."""
    held = [request.encoded for request in requests if request.encoded is not None]
    assert len(held) == len(requests), "a running request holds the pages of its media"
    lengths = np.array([each.item.count for each in held], np.int32)
    table = np.zeros((len(held), max(len(each.table) for each in held)), np.int32)
    for row, each in enumerate(held):
        table[row, : len(each.table)] = each.table
    return HostGroup(np.zeros(tokens, np.int32), table, lengths)


def state_group(slots: Sequence[tuple[int, ...]], tokens: int, lengths: IntArray) -> HostGroup:
    """Returns the group of layers that keep a state per request, with these rows of its table."""
    return HostGroup(np.zeros(tokens, np.int32), np.array(slots, np.int32), lengths)


def _token_ids(plan: StepPlan) -> IntArray:
    ids: list[int] = []
    for request, count in plan.tokens.items():
        ids += request.token_ids[request.num_computed : request.num_computed + count]
    return np.array(ids, np.int32)


def _has_embeds(request: Request) -> bool:
    """True if rows of the row store may stand in the places of the tokens that it computes next."""
    return request.num_computed < request.num_prompt and request.core_request.has_rows


def _sees_ahead(request: Request) -> bool:
    """True if it computes tokens of its prompt next, which see all of it."""
    return request.core_request.sees_prompt and request.num_computed < request.num_prompt


def _embed_indices(plan: StepPlan) -> IntArray:
    """The row of the row store for each of a step's tokens, or -1."""
    places = np.full(plan.num_tokens, -1, np.int32)
    at = 0
    for request, count in plan.tokens.items():
        if _has_embeds(request):
            assert request.prompt_rows is not None, "the scheduler has seen that its rows are there"
            start, stop = request.num_computed, min(request.num_computed + count, request.num_prompt)
            places[at : at + stop - start] = request.prompt_rows.places(start, stop)
        at += count
    return places


def _token_types(plan: StepPlan) -> IntArray:
    """The segments of a step's tokens."""
    found = np.zeros(plan.num_tokens, np.int32)
    at = 0
    for request, count in plan.tokens.items():
        if request.core_request.token_types:
            start = request.num_computed
            found[at : at + count] = np.frombuffer(request.core_request.token_types, np.int32)[start : start + count]
        at += count
    return found


def _with_rotary(batch: HostBatch, requests: Sequence[Request]) -> HostBatch:
    """The batch with the rotary positions of each token, where those of a request are not its positions."""
    if all(request.rotary is None for request in requests):
        return batch
    positions = np.tile(batch.positions, (3, 1))
    for index, request in enumerate(requests):
        if request.rotary is not None:
            first, stop = batch.query_start_loc[index : index + 2].tolist()
            start = request.num_computed
            positions[:, first:stop] = request.rotary.between(start, start + stop - first)
    return batch._replace(inputs=batch.inputs._replace(rotary_positions=positions))


def _block_table(requests: Sequence[Request], group: int) -> IntArray:
    rows = []
    for request in requests:
        row = request.table_rows[group]
        if row is None:
            row = request.table_rows[group] = np.array(request.pages[group], np.int32)
        rows.append(row)
    if len(rows) == 1:
        return rows[0][None]
    table = np.zeros((len(rows), max(map(len, rows))), np.int32)
    for index, row in enumerate(rows):
        table[index, : len(row)] = row
    return table


def pad(batch: HostBatch, buckets: Sequence[ShapeBucket]) -> HostBatch:
    """Padded tokens write to page 0 and belong to the last row; padded requests have length 0."""
    named = ("embeds", "embed_indices", "token_type_ids", "adapters", "adapter_extras")
    count, inputs = len(batch.token_ids), tuple(name for name in named if getattr(batch.inputs, name) is not None)
    # the smallest: they are in order
    bucket = next(each for each in buckets if each.tokens >= count and each.inputs == inputs)
    starts = np.full(bucket.requests + 1, batch.query_start_loc[-1], np.int32)
    starts[: len(batch.query_start_loc)] = batch.query_start_loc
    groups = []
    for group, pages in zip(batch.groups, bucket.pages, strict=True):
        table = np.zeros((bucket.requests, pages), np.int32)
        table[: group.block_table.shape[0], : group.block_table.shape[1]] = group.block_table
        groups.append(
            HostGroup(_pad_array(group.slot_mapping, bucket.tokens), table, _pad_array(group.seq_lens, bucket.requests))
        )
    return HostBatch(
        token_ids=_pad_array(batch.token_ids, bucket.tokens),
        positions=_pad_array(batch.positions, bucket.tokens),
        token_to_seq=_pad_array(batch.token_to_seq, bucket.tokens, bucket.requests - 1),
        query_start_loc=starts,
        logits_indices=_pad_array(batch.logits_indices, bucket.rows),
        groups=tuple(groups),
        inputs=_pad_token_inputs(batch.inputs, bucket.tokens),
    )


def _pad_token_inputs(inputs: HostInputs, tokens: int) -> HostInputs:
    """The inputs that have an entry for each token, with those of padded ones."""
    given = {name: getattr(inputs, name) for name in TOKEN_INPUTS}
    padded: dict[str, Any] = {
        name: _pad_array(each, tokens, TOKEN_INPUTS[name]) for name, each in given.items() if each is not None
    }
    return inputs._replace(**padded) if padded else inputs


class CaptureSizes:
    """The sizes of the steps that are captured, where shapes are free: what is near one is padded to it."""

    def __init__(self, buckets: Sequence[ShapeBucket]) -> None:
        self._decodes = sorted({each.tokens for each in buckets if each.decode})
        self._mixed = sorted({(each.tokens, each.requests, each.rows) for each in buckets if not each.decode})

    def pad(self, batch: HostBatch) -> HostBatch:
        """The step in the next size; as it is where none holds it. Rows stay, and tables are as wide as they
        were."""
        tokens, requests, rows = len(batch.token_ids), len(batch.query_start_loc) - 1, len(batch.logits_indices)
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
        table = np.zeros((requests, group.block_table.shape[1]), np.int32)
        table[: len(group.block_table)] = group.block_table
        groups.append(
            group._replace(
                slot_mapping=_pad_array(group.slot_mapping, tokens),
                block_table=table,
                seq_lens=_pad_array(group.seq_lens, requests),
            )
        )
    return batch._replace(
        token_ids=_pad_array(batch.token_ids, tokens),
        positions=_pad_array(batch.positions, tokens),
        token_to_seq=_pad_array(batch.token_to_seq, tokens, requests - 1),
        query_start_loc=_pad_array(batch.query_start_loc, requests + 1, batch.query_start_loc[-1]),
        groups=tuple(groups),
        inputs=_pad_token_inputs(batch.inputs, tokens),
    )


def _pad_decode(batch: HostBatch, size: int) -> HostBatch:
    """With requests of one token on page 0."""
    count = len(batch.token_ids)
    if size == count:
        return batch
    at, groups = np.arange(size + 1, dtype=np.int32), []
    # the beginning of what it is the whole of here
    rows = at[:count] if batch.logits_indices is batch.token_to_seq else batch.logits_indices
    for group in batch.groups:
        table = np.zeros((size, group.block_table.shape[1]), np.int32)
        table[:count] = group.block_table
        groups.append(HostGroup(_pad_array(group.slot_mapping, size), table, _pad_array(group.seq_lens, size, 1)))
    return batch._replace(
        token_ids=_pad_array(batch.token_ids, size),
        positions=_pad_array(batch.positions, size),
        token_to_seq=at[:-1],
        query_start_loc=at,
        logits_indices=rows,
        groups=tuple(groups),
        inputs=_pad_token_inputs(batch.inputs, size),
    )


def _pad_array(array: IntArray, size: int, value: int = 0) -> IntArray:
    filled = np.full((*array.shape[:-1], size), value, np.int32)
    filled[..., : array.shape[-1]] = array
    return filled
