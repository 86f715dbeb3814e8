"""The draft head that comes with the package: it is often right, and changes no token."""

import json
from pathlib import Path
from typing import Any

import pytest

import quintet
from quintet import LLM, SamplingParams
from quintet.config import INSIDE
from tests.e2e.spec_decode.test_draft_heads import stats

HEAD = {"speculative_config": {"method": "eagle", "model": "bundled-draft", "num_speculative_tokens": 3}}
PROMPTS = ("What is the capital of Japan?", "What is 21 + 34?", "Count from 5 to 15.", "Tell me a story.")


@pytest.mark.parametrize("how", [{"temperature": 0}, {"temperature": 1, "seed": 2}])
def test_the_tokens_are_those_without_it(how: dict[str, Any]) -> None:
    settings: dict[str, Any] = {"device": "cpu", "max_model_len": 256, "use_tqdm": False}
    params, talks = SamplingParams(max_tokens=48, **how), [[{"role": "user", "content": text}] for text in PROMPTS]
    with LLM("bundled", **settings) as plain, LLM("bundled", **settings, **HEAD) as drafting:
        found = [
            [list(each.outputs[0].token_ids) for each in llm.chat(talks, params, use_tqdm=False)]
            for llm in (plain, drafting)
        ]
        counts = stats(drafting).spec_decode
    assert found[0] == found[1]
    assert counts.num_accepted_tokens > counts.num_draft_tokens / 2


def test_it_is_small_and_says_what_it_is() -> None:
    folder = Path(quintet.__file__).parent / "bundled-draft"
    assert "bundled-draft" in INSIDE and (folder / "model.safetensors").stat().st_size < 1_000_000
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["LlamaForCausalLMEagle"]
    with pytest.raises(
        ValueError, match="architectures is 'LlamaForCausalLMEagle', which is a draft head, for speculative_config"
    ):
        LLM("bundled-draft", device="cpu", use_tqdm=False)
    wrong = {"speculative_config": {**HEAD["speculative_config"], "method": "draft_model"}}
    with pytest.raises(ValueError, match="'bundled-draft' holds a draft head; use method 'eagle' or .*, or leave"):
        LLM("bundled", device="cpu", use_tqdm=False, **wrong)
