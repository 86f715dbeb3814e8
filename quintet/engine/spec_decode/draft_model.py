"""Draft tokens of a small model that stands beside the one that answers (Leviathan et al. 2023; vLLM's "draft_model").

The drafter's layers are in the arrangement of the other model's: its keys and values of a token lie in the page that
holds the other's, so that a prefix that is found holds both, and no second bookkeeping is needed. It computes what it
lacks of a request, which is usually one or two tokens, and then a token after the other.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from quintet.engine.executor.batch_builder import BatchBuilder
from quintet.engine.executor.worker_group import WorkerGroup
from quintet.engine.kv_cache.manager import KVCacheManager, missing_pages
from quintet.engine.kv_cache.page_pool import NULL_PAGE
from quintet.engine.request import Request
from quintet.engine.spec_decode.draft_sampler import DraftSampler
from quintet.interface.types import HostBatch


@dataclass
class DraftProgress:
    """State of a drafter for one request, as long as that holds its pages."""

    num_computed: int = 0  # tokens with the drafter's K and V in the cache
    proposed: list[int] = field(default_factory=list)  # after `num_known` tokens; K and V of the last are not there
    num_known: int = 0  # tokens of the request when they were proposed
    num_marked: int = 0  # pages that were marked as complete


@dataclass(frozen=True)
class DraftLimits:
    """Limits of a drafter's steps."""

    num_drafts: int  # of a request in a step
    max_num_batched_tokens: int
    max_model_len: int  # positions that the drafter knows; requests get no drafts past them
    vocab_size: int


class DraftModelProposer:
    """Proposes what a drafter draws: greedily, or with the random numbers that the request draws with itself."""

    def __init__(self, ranks: WorkerGroup, batches: BatchBuilder, tables: KVCacheManager, limits: DraftLimits) -> None:
        self.num_drafts = limits.num_drafts
        self._ranks, self._batches, self._tables, self._limits = ranks, batches, tables, limits
        drafter = ranks.workers[0].drafter
        assert drafter is not None, "no drafter was built"
        self._sampler = DraftSampler(ranks.workers[0], drafter.model.vocab_size)
        self._groups = sorted({mixer.group for mixer in drafter.mixers if mixer.group is not None})

    def may_propose(self, requests: Sequence[Request]) -> bool:
        """Returns True: whatever the text is, there are drafts after it."""
        return any(not each.core_request.has_rows for each in requests)

    def finish(self, request: Request) -> None:
        """Does nothing: pages go with the request."""

    def start_over(self) -> None:
        """Does nothing: what was drafted of requests goes with their pages."""

    @torch.inference_mode()
    def propose(self, room: Sequence[tuple[Request, int]]) -> None:
        """Fills `draft_tokens` of the requests that the drafter knows all tokens of; of the others it computes as many
        as fit into one step."""
        wanted = {request: self._clip(request, most) for request, most in room}
        ready = self._catch_up(
            [request for request, most in wanted.items() if most > 0 and self._reserve(request, most)]
        )
        while ready:
            requests = [r for r in ready if len(r.draft_tokens) < wanted[r]]
            if not requests:
                break
            tokens = [[r.draft_tokens[-1]] for r in requests]
            starts = [r.num_known + len(r.draft_tokens) - 1 for r in requests]
            for request, token_id in zip(requests, self._run(requests, starts, tokens), strict=True):
                request.draft_tokens.append(token_id)
            ready = [r for r in requests if r.draft_tokens[-1] >= 0]
        for request in wanted:
            if request.draft_progress is not None:
                request.draft_progress.proposed = list(request.draft_tokens)

    def _clip(self, request: Request, most: int) -> int:
        """Returns how many drafts a request may have, by what the drafter can do."""
        if request.core_request.has_rows:  # it has no rows for them
            return 0
        return min(most, self.num_drafts, self._limits.max_model_len - request.num_known)

    def _reserve(self, request: Request, most: int) -> bool:
        """Reserves the pages of a request's drafts, which the step that verifies them needs, too."""
        end = request.num_known + most
        if missing_pages(request, end, self._tables.page_size) > self._tables.pool.num_free:
            return False
        self._tables.reserve(request, end)
        return True

    def _catch_up(self, requests: Sequence[Request]) -> list[Request]:
        """Computes the known tokens that the drafter lacks -> the requests with a first draft."""
        left = self._limits.max_num_batched_tokens
        chosen: dict[Request, DraftProgress] = {}
        starts, tokens = [], []
        for request in requests:
            progress = self._progress(request)
            stop = min(request.num_known, progress.num_computed + left)
            if stop > progress.num_computed:
                chosen[request] = progress
                starts.append(progress.num_computed)
                tokens.append(request.token_ids[progress.num_computed : stop])
                left -= stop - progress.num_computed
                progress.num_computed, progress.num_known = stop, request.num_known
        drawn = self._run(list(chosen), starts, tokens) if chosen else []
        ready = []
        for (request, progress), token_id in zip(chosen.items(), drawn, strict=True):
            self._mark_pages(request, progress)
            if progress.num_computed == request.num_known and token_id >= 0:
                request.draft_tokens = [token_id]
                ready.append(request)
        return ready

    def _progress(self, request: Request) -> DraftProgress:
        """Returns what the drafter has of a request; at least its last token is left to compute."""
        progress = request.draft_progress
        if progress is None:
            pages = self._marked_pages(request)
            progress = request.draft_progress = DraftProgress(pages * self._tables.page_size, num_marked=pages)
        elif progress.proposed:
            proposed, start = progress.proposed[:-1], progress.num_known
            known = request.token_ids[start : request.num_known]
            accepted = next((i for i, pair in enumerate(zip(proposed, known)) if pair[0] != pair[1]), len(proposed))  # noqa: B905
            progress.num_computed, progress.proposed = start + min(accepted, len(known)), []
        progress.num_computed = min(progress.num_computed, request.num_known - 1)
        return progress

    def _marked_pages(self, request: Request) -> int:
        """Returns how many of a request's first pages hold K and V of the drafter: they were found in the cache."""
        marks, count = self._tables.pool.drafted, len(request.pages[0]) if request.pages else 0
        rows = [request.pages[group] for group in self._groups]
        return next(
            (at for at in range(count) if any(row[at] != NULL_PAGE and row[at] not in marks for row in rows)), count
        )

    def _mark_pages(self, request: Request, progress: DraftProgress) -> None:
        """Marks the pages that hold K and V of the drafter for each of their tokens."""
        full = progress.num_computed // self._tables.page_size
        for group in self._groups:
            self._tables.pool.drafted.update(request.pages[group][progress.num_marked : full])
        progress.num_marked = max(progress.num_marked, full)

    def _run(self, requests: list[Request], starts: Sequence[int], tokens: Sequence[Sequence[int]]) -> list[int]:
        """Runs the drafter -> the token that it draws for each request; -1: none."""
        host = self._batches.build_draft(requests, starts, tokens)
        positions = [start + len(row) for start, row in zip(starts, tokens, strict=True)]
        return self._sampler(self._logits(host), requests, positions)

    def _logits(self, host: HostBatch) -> Tensor:
        """Runs one step on all ranks -> its logits [L, V]."""
        logits = self._ranks.draft(host).logits
        assert logits is not None, "a drafter gives logits"
        return logits
