"""From the hidden states of one text to its numbers: which rows count, heads, dimensions, activation or length 1."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from quintet.engine.pooling.adapted_heads import Heads
from quintet.engine.pooling.heads import FloatRows, unit_length
from quintet.hub.pooling_task import Pooling
from quintet.pooling_params import PoolingParams

NOT_FINITE = "the model gave no finite numbers for this text; its weights or dtype may be at fault"


ACCUMULATED = ("MEAN", "MAX", "ROOT", "WEIGHTED")  # ways of pooling that need no token's row once it was seen


@dataclass
class PooledRows:
    """Results of the steps of one text so far."""

    count: int = 0  # tokens that have rows
    running_sum: "np.ndarray[tuple[int], np.dtype[np.float64]] | None" = None  # of a mean, or the largest so far
    rows: list[FloatRows] = field(default_factory=list)  # where each counts, or one does

    def add(self, rows: FloatRows, first: int, kind: str) -> None:
        """Rows [n, H] of the tokens from `first` on. With the first token a text begins, perhaps anew (it was
        preempted); where one token counts, its latest row does."""
        if first == 0 or kind in ("CLS", "LAST"):
            self.count, self.running_sum, self.rows = 0, None, []
        before, self.count = self.count, self.count + len(rows)
        if kind not in ACCUMULATED:
            self.rows.append(rows)
        elif kind == "MAX":
            most = rows.max(0).astype(np.float64)
            self.running_sum = most if self.running_sum is None else np.maximum(self.running_sum, most)
        else:
            if kind == "WEIGHTED":
                rows = rows * np.arange(before + 1.0, self.count + 1)[:, None]
            # doubles hold sums of floats exactly, or nearly so: whichever steps they come in, there are the same bits
            added = rows.sum(0, dtype=np.float64)
            self.running_sum = added if self.running_sum is None else self.running_sum + added

    def pooled(self, kind: str) -> FloatRows:
        """[1, H]: what comes of one of ACCUMULATED."""
        assert self.running_sum is not None
        count = self.count
        divisor = {"MEAN": count, "MAX": 1, "ROOT": count**0.5, "WEIGHTED": count * (count + 1) / 2}[kind]
        return (self.running_sum / divisor).astype(np.float32)[None]


@dataclass(frozen=True)
class Pooler:
    """One model's: its plan, and the heads of each task."""

    pooling: Pooling
    heads: Heads  # by task; none: hidden states as they are
    softmax: bool = False  # what becomes of classes; False: each a sigmoid
    regression: bool = False  # nothing does
    relu: bool = False  # what is below 0 becomes 0
    # by task: a first and a last token that have no row of their own in the answer, where a text has them there
    excluded_tokens: Mapping[str, tuple[int | None, int | None]] = field(default_factory=dict)

    def pooling_type(self, params: PoolingParams) -> str:
        """The way of pooling that a request asks for."""
        return self.pooling.token if params.of_tokens else self.pooling.sequence

    def finish(
        self, gathered: PooledRows, params: PoolingParams, token_ids: Sequence[int], heads: Heads | None = None
    ) -> FloatRows:
        """[n] of a text, or [tokens, n] of each; ValueError where they are not finite. `heads`: an adapter's, in place
        of the model's."""
        kind, pooling = self.pooling_type(params), self.pooling
        if kind in ACCUMULATED:
            x = gathered.pooled(kind)
        else:
            x = gathered.rows[0] if len(gathered.rows) == 1 else np.concatenate(gathered.rows)
        tag = pooling.step_tag_id if params.step_tag_id is None else params.step_tag_id
        if params.late_chunking_params is not None:
            x = _chunk_means(x, params.late_chunking_params.chunk_size)
        elif params.of_tokens and pooling.row_tokens:
            ids = np.asarray(token_ids)
            x = np.concatenate([x[ids == token] for token in pooling.row_tokens])
        elif params.of_tokens and tag is not None:
            x = x[np.asarray(token_ids) == tag]
        elif params.of_tokens:
            x = self._without_ends(x, params, token_ids)
        elif pooling.splade:
            x = _between(x, token_ids, pooling.ends)
        for product in (self.heads if heads is None else heads).get(params.task or "", ()):
            x = product(x)
        if pooling.splade and not params.of_tokens:
            x = np.log1p(np.maximum(x.max(0, keepdims=True, initial=0.0), 0))
        columns = params.returned_token_ids or pooling.returned_token_ids
        if columns and params.of_tokens:
            x = x[:, list(columns)]
        if not np.isfinite(x).all():
            raise ValueError(NOT_FINITE)
        x = self._embed(x, params) if params.task in ("embed", "token_embed") else self._classes(x, params)
        if not params.of_tokens or (self.relu and params.task == "token_classify"):
            x = x[0] if not params.of_tokens else x[:, 0]  # a number for each token, as vLLM gives it
        return np.ascontiguousarray(x, np.float32)

    def _without_ends(self, x: FloatRows, params: PoolingParams, token_ids: Sequence[int]) -> FloatRows:
        return _between(x, token_ids, self.excluded_tokens.get(params.task or "", (None, None)))

    def _embed(self, x: FloatRows, params: PoolingParams) -> FloatRows:
        dimensions = params.dimensions or self.pooling.dimensions
        x = x[:, :dimensions]
        asked = params.use_activation if params.normalize is None else params.normalize
        usual = self.pooling.normalize or (self.pooling.splade and params.of_tokens)
        if usual if asked is None else asked:
            x = unit_length(x)
        # truncate_dim of Sentence Transformers cuts what is finished
        return x if params.dimensions is not None else x[:, : self.pooling.sentence.settings.dimensions]

    def _classes(self, x: FloatRows, params: PoolingParams) -> FloatRows:
        if self.pooling.logit_bias is not None:
            x = x - np.float32(self.pooling.logit_bias)
        wanted = self.pooling.activate if params.use_activation is None else params.use_activation
        if self.regression if wanted is None else not wanted:
            return x
        if self.relu:
            return np.maximum(x, 0)
        wide = x.astype(np.float64)
        if not self.softmax:
            with np.errstate(over="ignore"):
                return (1 / (1 + np.exp(-wide))).astype(np.float32)
        powers = np.exp(wide - wide.max(-1, keepdims=True))
        return (powers / powers.sum(-1, keepdims=True)).astype(np.float32)


def _between(x: FloatRows, token_ids: Sequence[int], ends: tuple[int | None, int | None]) -> FloatRows:
    """The rows without that of the first token, and of the last, where these are the ones given."""
    first, last = ends
    if first is not None and len(x) and token_ids[0] == first:
        x = x[1:]
    return x[:-1] if last is not None and len(x) and token_ids[-1] == last else x


def _chunk_means(x: FloatRows, size: int) -> FloatRows:
    """[tokens, H] -> [ceil(tokens / size), H]: the mean of each `size` rows, the last of what is left."""
    starts = np.arange(0, len(x), size)
    sums = np.add.reduceat(x.astype(np.float64), starts, axis=0)
    return (sums / np.diff(starts, append=len(x))[:, None]).astype(np.float32)
