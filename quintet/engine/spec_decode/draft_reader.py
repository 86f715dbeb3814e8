"""Draft tokens of a head that keeps nothing, and reads the model's own KV cache (Gemma 4's assistants).

All drafts of a request are drawn at one place, that of the last token that the model computed: nothing is filled in
after a step, so a step without drafts costs nothing.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from quintet.engine.request import Request
from quintet.engine.spec_decode.draft_head import DraftHeadProposer


class DraftReaderProposer(DraftHeadProposer):
    """Proposes a chain: each draft reads the one before it, and the hidden state that the head gave for it."""

    @torch.inference_mode()
    def propose(self, room: Sequence[tuple[Request, int]]) -> None:
        wanted = {request: self._reserved(request, most) for request, most in room}
        rows = {
            each.request: each.rows[-1]
            for each in self._stretches()
            if wanted.get(each.request, 0) > 0 and each.start + len(each.token_ids) == each.request.num_known - 1
        }
        while rows:
            drawn = self._draw(rows)
            for request, token_id in zip(rows, drawn, strict=True):
                request.draft_tokens = [*request.draft_tokens, *[token_id] * (token_id >= 0)]
            rows = {
                request: row
                for row, (request, token_id) in enumerate(zip(rows, drawn, strict=True))
                if token_id >= 0 and len(request.draft_tokens) < wanted[request]
            }

    def _draw(self, rows: Mapping[Request, int]) -> list[int]:
        """Draws the next draft of each request; `rows` are of the hidden states before them. -1: none."""
        requests = list(rows)
        tokens = [
            [each.draft_tokens[-1] if each.draft_tokens else each.token_ids[each.num_known - 1]] for each in requests
        ]
        host = self._batches.build_draft(requests, [each.num_known - 2 for each in requests], tokens)
        groups = [each._replace(slot_mapping=np.zeros_like(each.slot_mapping)) for each in host.groups]  # the null page
        logits = self._ranks.draft(host._replace(groups=tuple(groups)), list(rows.values())).logits
        assert logits is not None, "a draft head gives logits"
        return self._sampler(logits, requests, [each.num_known + len(each.draft_tokens) for each in requests])
