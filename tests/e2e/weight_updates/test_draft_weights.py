"""Weights of draft models and draft heads that a trainer sends: drafts follow them, and no token changes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from quintet import LLM
from quintet.model_loader.incoming import weight_checksums
from quintet_tools.checkpoints.tiny import PLAIN, Tiny, make
from tests.e2e.spec_decode.test_draft_heads import SETTINGS, spec, written
from tests.helpers.platforms.engines import answers, engine


def tensors_of(tiny: Tiny) -> dict[str, Tensor]:
    return load_file(tiny.folder / "model.safetensors")


def accepted(llm: LLM) -> tuple[int, int]:
    """Draft tokens that were accepted, and all."""
    made: Any = llm._client.engine
    found = made.stats().spec_decode
    return found.num_accepted_tokens, found.num_draft_tokens


def test_a_draft_model_that_gets_the_models_weights_is_always_right() -> None:
    target, other = make("llama", PLAIN), make("llama", PLAIN, 1)
    drafting: dict[str, Any] = {"speculative_config": {"model": str(other.folder), "num_speculative_tokens": 3}}
    with engine(target) as plain, engine(target, **drafting) as llm:
        want = answers(plain)
        assert answers(llm) == want
        before = accepted(llm)
        assert before[0] < before[1] / 2
        llm.start_draft_weight_update()
        llm.update_weights(tensors_of(target).items())
        llm.finish_weight_update("draft 1")
        assert answers(llm) == want and llm.get_weight_version() == "draft 1"
        after = accepted(llm)
        assert after[1] > before[1] and after[0] - before[0] == after[1] - before[1]
        llm.update_weights(tensors_of(other).items())
        with engine(other) as fresh:
            assert answers(llm) == answers(fresh), "an update without draft is of the model"


def test_a_draft_update_that_fails_tears_nothing() -> None:
    target, other = make("llama", PLAIN), make("llama", PLAIN, 1)
    drafting: dict[str, Any] = {"speculative_config": {"model": str(other.folder), "num_speculative_tokens": 3}}
    with engine(target, **drafting) as llm:
        want = answers(llm)
        llm.start_draft_weight_update()
        name = "model.layers.0.mlp.down_proj.weight"
        with pytest.raises(ValueError, match=r"no place for nonsense"):
            llm.update_weights([(name, tensors_of(target)[name]), ("nonsense", torch.zeros(3))])
        assert answers(llm) == want and llm.get_stats()["torn"] == 0
    with engine(target) as llm, pytest.raises(ValueError, match="has no draft model; start it with"):
        llm.start_draft_weight_update()


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_a_draft_head_takes_tensors_by_the_names_of_its_own_file(tmp_path: Path, method: str) -> None:
    files = written(tmp_path, method)
    new = {name: each * 0.5 if each.is_floating_point() else each for name, each in files.tensors.items()}

    def checksums(llm: LLM) -> Any:
        (worker,) = llm._client.engine_plan.ranks.workers
        assert worker.drafter is not None
        return weight_checksums(worker.drafter.model)

    with LLM(str(files.target), **SETTINGS, **spec(files)) as llm:
        before = checksums(llm)
        llm.start_draft_weight_update()
        llm.update_weights(new.items())
        llm.finish_weight_update()
        changed = checksums(llm)
        kept = [name for name in before if before[name] == changed[name]]
        assert before.keys() == changed.keys() and all(name.endswith("rotary.table") for name in kept)
        llm.start_draft_weight_update()
        llm.update_weights(files.tensors.items())
        llm.finish_weight_update()
        assert checksums(llm) == before
