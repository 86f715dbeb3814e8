"""Draft tokens of a head on the model's own hidden states (EAGLE, MTP).

A head reads a token and the hidden state of the token before it. Its keys and values of that pair lie in the slot of
the token before, as its authors count positions: each step of the model is followed by one of the head over the same
slots, with the tokens shifted by one. Behind a prefix that was found, the last slot may be of another text's next
token: that costs drafts, never a token.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from quintet.engine.executor.batch_builder import BatchBuilder
from quintet.engine.executor.model_part import DraftHeadSizes
from quintet.engine.executor.model_runner import StepRunner
from quintet.engine.executor.output_rows import TokenRows
from quintet.engine.executor.worker_group import WorkerGroup
from quintet.engine.kv_cache.manager import KVCacheManager, missing_pages
from quintet.engine.request import Request
from quintet.engine.spec_decode.draft_model import DraftLimits
from quintet.engine.spec_decode.draft_sampler import DraftSampler


class Stretch(NamedTuple):
    """Slots of a request that the head fills, the tokens after them, and the rows of the hidden states."""

    request: Request
    start: int
    token_ids: list[int]
    rows: list[int]


class DraftHeadProposer:
    """Proposes a chain: the head's own hidden state takes the place of the model's after its first token."""

    reads_each_step = True  # propose() is called before each step, with no room where no request may have drafts

    def __init__(
        self,
        ranks: WorkerGroup,
        batches: BatchBuilder,
        tables: KVCacheManager,
        runner: StepRunner,
        limits: DraftLimits,
        head: DraftHeadSizes,
    ) -> None:
        self.num_drafts = limits.num_drafts
        self._ranks, self._batches, self._tables, self._limits = ranks, batches, tables, limits
        self._sampler = DraftSampler(ranks.workers[0], limits.vocab_size, head.token_ids)
        self._head = head
        self._rows = runner.token_rows = TokenRows()

    def may_propose(self, requests: Sequence[Request]) -> bool:
        """Returns True: whatever the text is, there are drafts after it."""
        return bool(requests)

    def finish(self, request: Request) -> None:
        """Does nothing: pages go with the request."""

    def start_over(self) -> None:
        """Forgets the last step."""
        self._rows.take()

    @torch.inference_mode()
    def propose(self, room: Sequence[tuple[Request, int]]) -> None:
        """Fills the slots of the model's last step, and `draft_tokens` of the requests with room."""
        wanted = {request: self._reserved(request, most) for request, most in room}
        stretches = self._stretches()
        if not stretches:
            return
        drawn = self._run(stretches)
        last = {each.request: row for row, each in enumerate(stretches)}  # of the hidden states of the head's step
        chain = []
        for each, token_id in zip(stretches, drawn, strict=True):
            is_last = each.start + len(each.token_ids) == each.request.num_known - 1
            if is_last and wanted.get(each.request, 0) > 0 and token_id >= 0:
                each.request.draft_tokens = [token_id]
                chain.append(each.request)
        while chain := [each for each in chain if 0 < len(each.draft_tokens) < wanted[each]]:
            steps = [Stretch(r, r.num_known - 2 + len(r.draft_tokens), [r.draft_tokens[-1]], [last[r]]) for r in chain]
            last = {request: row for row, request in enumerate(chain)}
            for request, token_id in zip(chain, self._run(steps), strict=True):
                if token_id < 0:
                    wanted[request] = len(request.draft_tokens)
                else:
                    request.draft_tokens.append(token_id)

    def _reserved(self, request: Request, most: int) -> int:
        """Reserves the pages of a request's drafts, which the step that verifies them needs -> how many it may have."""
        most = min(most, self.num_drafts, self._limits.max_model_len - request.num_known)
        end = request.num_known + most
        if most <= 0 or missing_pages(request, end, self._tables.page_size) > self._tables.pool.num_free:
            return 0
        self._tables.reserve(request, end)
        return most

    def _stretches(self) -> list[Stretch]:
        """Returns what the model's last step gave for each request, as far as the tokens after it are known."""
        found = []
        for request, (row, first, count) in self._rows.take().items():
            count = min(count, request.num_known - 1 - first)
            if count > 0 and request.pages:  # it has neither ended nor lost its place
                tokens = request.token_ids[first + 1 : first + 1 + count]
                found.append(Stretch(request, first, tokens, list(range(row, row + count))))
        return found

    def _run(self, stretches: Sequence[Stretch]) -> list[int]:
        """Runs the head -> the token that it draws after each stretch; -1: none."""
        requests, starts, tokens, rows = zip(*stretches, strict=True)
        host = self._batches.build_draft(list(requests), starts, tokens)
        logits = self._ranks.draft(host, [row for each in rows for row in each]).logits
        assert logits is not None, "a draft head gives logits"
        return self._sampler(logits, requests, [each.start + len(each.token_ids) + 1 for each in stretches])
