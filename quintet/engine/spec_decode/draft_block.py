"""Draft tokens of a head that draws all of a request in one step, at mask tokens: parallel drafting.

P-EAGLE, DFlash and DSpark.

The step fills the slots of the model's last step, as that of other heads does, and has each request's block behind
them: masks, of which the keys and values are overwritten once the tokens are known. A P-EAGLE's block follows the last
token with the token after it; a DFlash's begins with the last known token, and each mask draws the token of its place.
A DSpark's may draw at the last known token, too, and then each draws the token after its place.
"""

import itertools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from quintet.engine.request import Request
from quintet.engine.spec_decode.draft_head import DraftHeadProposer, Stretch
from quintet.models.draft_heads.dflash import DSparkHead


class DraftBlockProposer(DraftHeadProposer):
    """Proposes blocks."""

    @torch.inference_mode()
    def propose(self, room: Sequence[tuple[Request, int]]) -> None:
        wanted = {request: self._reserved(request, most) for request, most in room}
        stretches = self._stretches()
        if not stretches:
            return
        counts, left = [], self._limits.max_num_batched_tokens - sum(len(each.token_ids) for each in stretches)
        for each in stretches:
            is_last = each.start + len(each.token_ids) == each.request.num_known - 1
            count = wanted.get(each.request, 0) if is_last else 0
            count = count if len(self._block(each.request, count)) <= left else 0
            left -= len(self._block(each.request, count))
            counts.append(count)
        drawn = iter(self._run_blocks(stretches, counts))
        for each, count in zip(stretches, counts, strict=True):
            tokens = [next(drawn) for _ in range(max(count, 1))][:count]
            if tokens:
                each.request.draft_tokens = tokens[: tokens.index(-1) if -1 in tokens else count]

    def _block(self, request: Request, count: int) -> list[int]:
        """Returns the tokens of the block that draws so many drafts."""
        mask = self._head.mask_token_id
        assert mask is not None, "the head has a mask token"
        if self._head.family.starts_at_last_token:
            masks = count - self._head.draws_at_anchor
            return [request.token_ids[request.num_known - 1], *[mask] * masks] if count else []
        return [mask] * (count - 1)

    def _run_blocks(self, stretches: Sequence[Stretch], counts: Sequence[int]) -> list[int]:
        """Runs the head -> the tokens that it draws for each request, and one where there are none to draw."""
        requests, starts, tokens, rows = zip(*stretches, strict=True)
        blocks = [self._block(request, count) for request, count in zip(requests, counts, strict=True)]
        whole = [[*known, *block] for known, block in zip(tokens, blocks, strict=True)]
        before, within = (0, -1) if self._head.family.starts_at_last_token else (-1, 0)
        sizes = [(len(known), len(block)) for known, block in zip(tokens, blocks, strict=True)]
        places = [place for known, block in sizes for place in [before] * known + [within] * block]
        drawn = [max(count, 1) for count in counts]
        host = self._batches.build_draft(list(requests), starts, whole, drawn, places)
        hidden = [row for of, block in zip(rows, blocks, strict=True) for row in [*of, *[0] * len(block)]]
        logits = self._ranks.draft(host, hidden).logits
        assert logits is not None, "a draft head gives logits"
        if self._head.family.draws_in_turn:
            return self._drawn_in_turn(logits, requests, drawn)
        pairs = [
            (request, request.num_known + at)
            for request, count in zip(requests, drawn, strict=True)
            for at in range(count)
        ]
        return self._sampler(logits, *zip(*pairs, strict=True))

    def _drawn_in_turn(self, logits: Tensor, requests: Sequence[Request], counts: Sequence[int]) -> list[int]:
        """Draws the first token of each block, then the second, and so on: each depends on the one before it."""
        worker, firsts = self._ranks.workers[0], [0, *itertools.accumulate(counts)]
        assert worker.drafter is not None and isinstance(head := worker.drafter.model, DSparkHead), "it draws in turn"
        found = [[request.token_ids[request.num_known - 1]] for request in requests]
        for at in range(max(counts)):
            left = [index for index, count in enumerate(counts) if count > at]
            before = [max(found[index][-1], 0) for index in left]  # -1: none was drawn, and what follows is left out
            rows, tokens = worker.upload(
                np.array([firsts[index] + at for index in left], np.int32), np.array(before, np.int32)
            )
            own = head.following(worker.ops.take_rows(logits, rows), tokens)
            drawing = [requests[index] for index in left]
            drawn = self._sampler(own, drawing, [each.num_known + at for each in drawing])
            for index, token_id in zip(left, drawn, strict=True):
                found[index].append(token_id)
        return [token_id for tokens in found for token_id in tokens[1:]]
