"""Scores of documents against a query whose token vectors the engine keeps (LateInteractionParams)."""

from collections import OrderedDict

import numpy as np

from quintet.engine.pooling.heads import FloatRows
from quintet.engine.pooling.scoring import max_sim
from quintet.pooling_params import LateInteractionParams

_PER_QUERY = 1 << 10  # bytes that are counted for a query beside its vectors
MAX_BYTES = 256 << 20  # of all queries' vectors; beyond it the oldest query goes


class QueryCache:
    """Queries by their keys, each until as many documents as it names were scored."""

    def __init__(self) -> None:
        self._queries: OrderedDict[str, tuple[FloatRows, int]] = OrderedDict()
        self._bytes = 0

    def apply(self, params: LateInteractionParams, vectors: FloatRows) -> FloatRows:
        """Keeps the token vectors [tokens, n] of a query and returns [0], or returns a document's score [1]. ValueError
        if the document's query is not there."""
        if params.mode == "cache_query":
            assert params.query_uses is not None, "checked with the parameters"
            self._remove(params.query_key)
            self._queries[params.query_key] = vectors, params.query_uses
            self._bytes += vectors.nbytes + _PER_QUERY
            while self._bytes > MAX_BYTES:
                self._remove(next(iter(self._queries)))
            return np.zeros(1, np.float32)
        if params.query_key not in self._queries:
            raise ValueError(
                f"no query {params.query_key!r} is kept: run it first, with mode='cache_query' and the number of its "
                f"documents as query_uses, in the same engine; queries are kept in {MAX_BYTES >> 20} MiB"
            )
        query, uses = self._queries[params.query_key]
        if query.shape[1] != vectors.shape[1]:
            raise ValueError(
                f"the query {params.query_key!r} has vectors of {query.shape[1]} dimensions, and the document of "
                f"{vectors.shape[1]}; give both the same `dimensions`"
            )
        if uses == 1:
            self._remove(params.query_key)
        else:
            self._queries[params.query_key] = query, uses - 1
        return np.asarray([max_sim(query, vectors)], np.float32)

    def _remove(self, key: str) -> None:
        if (found := self._queries.pop(key, None)) is not None:
            self._bytes -= found[0].nbytes + _PER_QUERY
