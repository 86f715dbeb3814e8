"""An engine with a drafter sleeps and wakes: the tokens are those of before, and drafts are accepted as before."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quintet import LLM, SamplingParams
from tests.e2e.spec_decode import test_block_heads as block_heads
from tests.e2e.spec_decode import test_draft_heads as heads
from tests.e2e.spec_decode.test_draft_heads import SETTINGS, Files, prompts, spec, stats

HOW = ({"temperature": 0}, {"temperature": 0.8, "seed": 3})


def itself(folder: Path, kind: str) -> Files:
    """A model that is its own draft model, and so always right."""
    files = heads.written(folder, "eagle")
    return files._replace(head=files.target)


DRAFTERS: dict[str, tuple[Callable[[Path, str], Files], str]] = {
    "draft_model": (itself, ""),
    "eagle3": (heads.written, "eagle3"),
    "dflash": (block_heads.written, "dflash"),
}


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_awake_again_the_tokens_and_their_drafts_are_the_same(tmp_path: Path, drafter: str, level: int) -> None:
    make, kind = DRAFTERS[drafter]
    files = make(tmp_path, kind)

    def answered(llm: LLM) -> tuple[list[Any], tuple[int, int]]:
        """The tokens, and how many drafts were accepted of how many."""
        before = stats(llm).spec_decode
        params = [SamplingParams(max_tokens=20, ignore_eos=True, detokenize=False, **how) for how in HOW]
        found = [[list(o.outputs[0].token_ids) for o in llm.generate(prompts(), each)] for each in params]
        after = stats(llm).spec_decode
        drafted = after.num_draft_tokens - before.num_draft_tokens
        return found, (after.num_accepted_tokens - before.num_accepted_tokens, drafted)

    with LLM(str(files.target), **SETTINGS, **spec(files, adapt_num_tokens=False)) as llm:
        found, counts = answered(llm)
        assert counts[1] > 0 and (drafter != "draft_model" or counts[0] > counts[1] / 2)
        llm.sleep(level)
        llm.wake_up()
        assert answered(llm) == (found, counts), "the pages of before are not found, so the same steps run"
        llm._client.engine.check_integrity()  # type: ignore[attr-defined]
