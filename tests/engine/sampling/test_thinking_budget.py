"""Rows of a step in which thoughts end: the forced token is the only one there, and others keep all of theirs."""

import dataclasses

import torch

from quintet.chat.reasoning_tokens import ReasoningMarkerIds
from quintet.engine.sampling.thinking_budget import ThinkingBudget
from tests.helpers.platforms.sampling import HOST, HostDevice, bound, request

OPEN, CLOSE, VOCAB = 8, 9, 70


def test_other_rows_keep_all_tokens() -> None:
    marks = ReasoningMarkerIds(((OPEN,),), ((CLOSE,),), (CLOSE,))
    over, within, free = (
        request(str(index), [5, OPEN], [20, 21], thinking_token_budget=budget)
        for index, budget in enumerate((2, 30, None))
    )
    for each in (over, within):
        each.core_request = dataclasses.replace(each.core_request, reasoning_marker_ids=marks, open_reasoning_tokens=0)
    edit = ThinkingBudget(bound(HOST), HostDevice(), VOCAB, static=False)  # type: ignore[arg-type]
    assert edit.set_requests([over, within, free], 3)
    logits = torch.arange(3 * VOCAB, dtype=torch.float32).view(3, VOCAB)
    found = edit(logits.clone(), [4, 4, 4])
    assert found[0].isfinite().nonzero().flatten().tolist() == [CLOSE]
    assert torch.equal(found[1:], logits[1:])
