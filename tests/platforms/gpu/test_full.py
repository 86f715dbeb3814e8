"""Steps that fail on a device whose memory is full: the cache stays, and the others go on in it."""

from typing import Any

import pytest
import torch

from quintet import SamplingParams
from quintet.chat.prompts import Prompt
from tests.platforms.gpu.test_sleep import SETTINGS, Make, client, tokens

__all__ = ["client"]  # a fixture


def test_a_step_that_runs_out_of_memory_ends_those_in_it_alone(client: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, fake = client(**{**SETTINGS, "max_num_seqs": 2})
    wanted = tokens(engine, 2)
    (worker,) = engine.engine_plan.ranks.workers
    cache = sum(each.nbytes for each in worker._state)
    monkeypatch.setattr(fake, "limit", fake.used() + cache // 2)  # room for a step, and none for a second cache
    calls: list[Any] = []
    before = [each.data_ptr() for each in worker._state]

    def full(module: Any, inputs: Any, output: torch.Tensor) -> None:
        calls.append(fake.empty((cache,), torch.float32, 0) if not calls else None)

    params = SamplingParams(temperature=0, max_tokens=9, detokenize=False, ignore_eos=True)
    for name in range(3):  # the third waits while the step fails
        engine.add(str(name), Prompt([5 + name % 2, 6, 7]), params)
    hook = worker.model.register_forward_hook(full)
    said: dict[str, Any] = {}
    while engine.busy:
        said.update({each.request_id: each.outputs[0] for each in engine.step()})
        engine.engine.check_integrity()
        hook.remove()
    assert [said[str(name)].finish_reason for name in range(3)] == ["error", "error", "length"]
    assert "out of memory" in str(said["0"].error) and list(said["2"].token_ids) == wanted[0]
    assert [each.data_ptr() for each in worker._state] == before
