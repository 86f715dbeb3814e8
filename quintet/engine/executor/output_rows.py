"""Rows of a step's outputs: every row is a request's at one position, and rows of a kind follow one another."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from quintet.engine.request import Request
from quintet.engine.step_plan import StepPlan
from quintet.interface.types import IntArray


class OutputRows(NamedTuple):
    """Requests of the batch's rows, in order: sample, verify, score. Or pool, for a pooling model."""

    sample: list[Request]  # one row each: its next token is drawn
    verify: Sequence[tuple[Request, int]] = ()  # one row each: drawn after so many of its drafts
    score: Sequence[tuple[Request, int, int]] = ()  # (request, first position, number of rows)
    # the same, and whether the text is whole with them; of some steps no row is wanted
    pool: Sequence[tuple[Request, int, int, bool]] = ()

    @property
    def sampled_requests(self) -> list[Request]:
        """Requests by row: a request with drafts has one more row for each of them."""
        return [*self.sample, *(request for request, _ in self.verify)] if self.verify else self.sample

    @property
    def positions(self) -> list[int] | None:
        """The place in its request of the token that each row draws; None: the place after its last token."""
        if not self.verify:
            return None
        at = [len(request.token_ids) - request.num_drafts for request in self.sample]
        return at + [request.num_known + after for request, after in self.verify]

    def without_row(self, row: int) -> tuple["OutputRows", list[int]]:
        """The rows that are drawn, but for this one and those of its request after it, and which they were."""
        whose, after = (self.sample[row], 0) if row < len(self.sample) else self.verify[row - len(self.sample)]
        pairs = [*((request, 0) for request in self.sample), *self.verify]
        kept = [row for row, (request, drafts) in enumerate(pairs) if request is not whose or drafts < after]
        left = [pairs[row] for row in kept]
        return OutputRows([r for r, drafts in left if drafts == 0], [pair for pair in left if pair[1] > 0]), kept

    def after_drafts(self) -> dict[Request, list[int]]:
        """The rows of each request that draw after a draft, in the order of their positions."""
        rows: dict[Request, list[int]] = {}
        for row, (request, _) in enumerate(self.verify, len(self.sample)):
            rows.setdefault(request, []).append(row)
        return rows


class TokenRows:
    """Rows of the tokens of the last step: of each request its first row, the position of that, and their number."""

    def __init__(self) -> None:
        self._rows: dict[Request, tuple[int, int, int]] = {}

    def note(self, plan: StepPlan) -> None:
        """Remembers the rows of a step that is about to run."""
        self._rows, row = {}, 0
        for request, count in plan.tokens.items():
            self._rows[request] = row, request.num_computed, count
            row += count

    def take(self) -> dict[Request, tuple[int, int, int]]:
        """Returns the rows, once: hidden states hold until the next step."""
        taken, self._rows = self._rows, {}
        return taken


def output_rows_of(requests: Sequence[Request], counts: Sequence[int], starts: IntArray) -> tuple[IntArray, OutputRows]:
    """The places in the step [L] of the tokens that outputs are needed of, and what for: the last token of each
    request that has no more to compute, and its drafts; for prompt log-probabilities, all prompt tokens but the last.

    `counts` are the tokens that each request computes; they begin at starts [R + 1].
    """
    if requests and requests[0].core_request.pooling is not None:
        return _pooled_rows_of(requests, counts, starts)
    sample: list[Request] = []
    places: list[int] = []
    drafted: list[tuple[int, int, Request]] = []  # (drafts before it, place, request)
    score: list[tuple[Request, int, int]] = []
    score_places: list[int] = []
    for request, count, end in zip(requests, counts, starts[1:].tolist(), strict=True):
        first = request.num_computed
        if first + count == len(request.token_ids):
            drafts = request.num_drafts
            sample.append(request)
            places.append(end - 1 - drafts)
            drafted += [(after, end - 1 - drafts + after, request) for after in range(1, drafts + 1)]
        scored = request.scored_positions(first, count)
        if scored:
            score.append((request, scored.start, len(scored)))
            score_places += range(end - count + scored.start - first, end - count + scored.stop - first)
    drafted.sort(key=lambda each: each[:2])  # rows after as many drafts follow one another: processors take them so
    places += [place for _, place, _ in drafted]
    verify = [(request, after) for after, _, request in drafted]
    return np.array(places + score_places, np.int32), OutputRows(sample, verify, score)


def _pooled_rows_of(
    requests: Sequence[Request], counts: Sequence[int], starts: IntArray
) -> tuple[IntArray, OutputRows]:
    """The same where texts become numbers."""
    places: list[IntArray] = []
    pool = []
    for request, count, end in zip(requests, counts, starts[1:].tolist(), strict=True):
        first, rows = request.num_computed, request.core_request.pooled_positions(request.num_computed, count)
        pool.append((request, rows.start, len(rows), first + count == len(request.token_ids)))
        begin = end - count - first
        places.append(np.arange(begin + rows.start, begin + rows.stop, dtype=np.int32))
    return np.concatenate(places), OutputRows([], pool=pool)
