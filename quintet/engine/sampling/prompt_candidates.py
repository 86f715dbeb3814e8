"""Tokens whose log-probabilities after positions of a prompt are asked for (prompt_logprob_token_ids)."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from quintet.engine.request import Request
from quintet.interface.types import IntArray

if TYPE_CHECKING:
    from quintet.engine.pooling.heads import FloatRows


class PromptCandidates(NamedTuple):
    """The candidates of a step's rows. Requests may want different numbers of them."""

    columns: list[IntArray]  # the k-th candidate of every row [L], -1 where a row has none
    rows: dict[Request, tuple[slice, int]]  # of each request with candidates: its rows of the step, and their width

    @classmethod
    def of_step(
        cls, score: Sequence[tuple[Request, int, int]], places: Mapping[Request, slice], num_rows: int
    ) -> "PromptCandidates":
        """`score` has each request's first position and number of rows, which are at `places` of the step's."""
        rows: dict[Request, tuple[slice, int]] = {}
        table = np.zeros((0, num_rows), np.int32)
        for request, first, count in score:
            candidates = request.params.prompt_logprob_token_ids
            begin = request.params.prompt_logprob_start
            if candidates is None or first + count <= begin:
                continue
            skipped = max(begin - first, 0)  # prompt_logprobs, asked for with them, begin with the prompt
            place = slice(places[request].start + skipped, places[request].stop)
            width = max(map(len, candidates))
            if len(table) < width:
                table = np.pad(table, ((0, width - len(table)), (0, 0)), constant_values=-1)
            for row, ids in enumerate(candidates[first + skipped - begin : first + count - begin], place.start):
                table[: len(ids), row] = ids
            rows[request] = place, width
        return cls(list(table), rows)

    def scores(self, columns: Sequence[Any]) -> "dict[Request, FloatRows]":
        """Log-probabilities of `columns`, each [L, 1] -> of each request [rows, candidates]; -inf where it has none."""
        found: dict[Request, FloatRows] = {}
        for request, (rows, width) in self.rows.items():
            values = [np.asarray(column)[rows, 0] for column in columns[:width]]
            known = [ids[rows] >= 0 for ids in self.columns[:width]]
            found[request] = np.where(known, values, -np.inf).T.astype(np.float32)
        return found
