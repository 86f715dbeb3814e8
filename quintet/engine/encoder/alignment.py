"""Attention of transcripts' tokens to their audio, by the heads of a decoder that follow what is spoken.

A request with an alignment has a prompt that ends with its transcript. Steps that compute tokens of it run operator by
operator, and leave the queries of these heads here. With the last token they meet the encoder's keys, which lie in the
request's pages, and one matrix of weights is its result. Other steps are as they were.
Source: openai-whisper's timing.py; transformers' generation_whisper.py, which normalises and filters in this order.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from quintet.engine.request import Request
from quintet.engine.step_plan import StepPlan
from quintet.layers.encoder_decoder import CrossDecoderLM
from quintet.ops.attention import from_cache_rows, page_shape

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from quintet.engine.executor.worker import Worker
    from quintet.engine.executor.worker_group import WorkerGroup

FILTER_WIDTH = 7  # rows of 20 ms that the median is taken of, where the configuration says nothing
_Queries = dict[int, list[Tensor]]  # of each layer: [T, H, D] of each step


class Aligner:
    """Queries of requests with an alignment, and the weights that come of them."""

    def __init__(self, ranks: "WorkerGroup", heads: Sequence[tuple[int, int]], filter_width: int) -> None:
        """`heads`: pairs of a layer and a head of it."""
        self.ranks, self._width = ranks, filter_width
        self._heads = {layer: sorted(head for at, head in heads if at == layer) for layer, _ in sorted(heads)}
        self._queries: dict[Request, list[_Queries]] = {}  # of each rank of this process

    @contextmanager
    def watching(self, plan: StepPlan) -> Iterator[None]:
        """Keeps the queries of a step, which runs within."""
        places = dict(_places(plan))
        self._queries = {each: queries for each, queries in self._queries.items() if each.encoded is not None}
        if not places:
            yield
            return
        for request in places:
            if request.num_computed == 0:  # new, or it was preempted
                self._queries[request] = [{layer: [] for layer in self._heads} for _ in self.ranks.workers]
        with ExitStack() as stack:
            for rank, worker in enumerate(self.ranks.workers):
                worker.main.allow_recorded(False)
                stack.callback(worker.main.allow_recorded, True)
                for layer, attention in self._layers(worker):
                    keep = self._keeper(places, rank, layer)
                    stack.callback(attention.q.register_forward_hook(keep).remove)
            yield

    def results(self, plan: StepPlan) -> "dict[Request, NDArray[np.float32]]":
        """Returns the weights [T, rows] of requests whose last token the step computes."""
        found = {}
        for request, (_, count) in _places(plan):
            if request.num_computed + count == len(request.token_ids):
                queries = self._queries.pop(request)
                weights = self.ranks.map_workers(partial(self._weights, request=request, queries=queries))[0]
                found[request] = weights.cpu().numpy()
        return found

    def _layers(self, worker: "Worker") -> "list[tuple[int, Any]]":
        attention = cast(CrossDecoderLM, worker.main.model).cross_attention
        return [(layer, attention[layer]) for layer in self._heads]

    def _keeper(self, places: Mapping[Request, tuple[int, int]], rank: int, layer: int) -> Callable[..., None]:
        """Returns what is called with the queries of a layer."""

        def keep(module: nn.Module, given: Any, out: Tensor) -> None:
            for request, (row, count) in places.items():
                self._queries[request][rank][layer].append(out[row : row + count].clone())

        return keep

    @torch.inference_mode()
    def _weights(self, worker: "Worker", request: Request, queries: Sequence[_Queries]) -> Tensor:
        """Returns the mean of the heads' weights [T, rows], normalised over tokens and smoothed over rows."""
        span, encoded = request.core_request.alignment, request.encoded
        assert span is not None and encoded is not None
        own = queries[self.ranks.workers.index(worker)]
        total = torch.zeros(len(request.token_ids) - span.first, span.rows, device=own[min(own)][0].device)
        for layer, attention in self._layers(worker):
            spec = attention.spec
            kv = worker.tensors_of(attention.mixing)[0]
            assert kv.shape[1:] == page_shape(spec), "pages of other platforms lie otherwise"
            pages = torch.as_tensor(encoded.pages, device=kv.device)
            rows = from_cache_rows(kv[pages, 0], spec.head_dim)  # [pages, Hkv, page_size, D]
            k = rows.transpose(0, 1).reshape(spec.kv_heads, -1, spec.head_dim)[:, : encoded.item.count]
            q = torch.cat(own[layer])[span.first :].float().reshape(-1, spec.heads, spec.head_dim)
            for head in set(self._heads[layer]).intersection(attention.heads):
                place = attention.heads.index(head)
                scores = q[:, place] @ k[place // (spec.heads // spec.kv_heads)].T * spec.scale
                total += smoothed(scores.softmax(-1)[:, : span.rows], self._width)
        return worker.comm.all_reduce(total) / sum(map(len, self._heads.values()))


def smoothed(weights: Tensor, width: int) -> Tensor:
    """Returns weights [T, F] with mean 0 and deviation 1 over tokens, and the median of `width` columns around each."""
    deviation, mean = torch.std_mean(weights, dim=0, keepdim=True, unbiased=False)
    weights = (weights - mean) / torch.where(deviation > 0, deviation, 1.0)
    side = width // 2
    if weights.shape[1] <= side:
        return weights
    padded = functional.pad(weights, (side, side), mode="reflect")
    columns = [padded[:, at : at + weights.shape[1]] for at in range(width)]
    for turn in range(width):  # odd-even transposition sorts: few columns, many rows
        for at in range(turn % 2, width - 1, 2):
            low, high = columns[at], columns[at + 1]
            columns[at], columns[at + 1] = torch.minimum(low, high), torch.maximum(low, high)
    return columns[side]


def _places(plan: StepPlan) -> Iterator[tuple[Request, tuple[int, int]]]:
    """Yields requests with an alignment, and the first row and the number of their tokens in a step."""
    row = 0
    for request, count in plan.tokens.items():
        if request.core_request.alignment is not None:
            yield request, (row, count)
        row += count
