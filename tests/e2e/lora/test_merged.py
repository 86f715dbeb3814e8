"""Adapters that are not served beside others: the refusal names what it is, and merged the model answers as PEFT's."""

import warnings
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig, get_peft_model

from quintet import LLM
from quintet.quantize.lora.merge import merge_lora
from tests.e2e.lora.adapters import ask, assert_equal_to, request_of
from tests.helpers.checkpoints.lora import causal_lm, randomize

PROMPTS = ([5, 17, 33, 2, 9], [8, 1, 30])
SORTS: dict[str, tuple[dict[str, Any], str]] = {
    "bias=all": ({"target_modules": ["q_proj"], "bias": "all"}, r"bias: the adapter holds it whole"),
    "bias=lora_only": (
        {"target_modules": ["q_proj"], "bias": "lora_only"},
        r"q_proj\.bias: the adapter holds it whole",
    ),
    "modules_to_save": (
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens"]},
        r"lm_head\.weight: the adapter holds it whole",
    ),
    "norms": ({"target_modules": ["q_proj"], "modules_to_save": ["norm"]}, r"norm\.weight: the adapter holds it whole"),
}


@pytest.mark.parametrize("sort", SORTS)
def test_it_is_refused_by_name_and_merged_it_is_pefts(sort: str, tmp_path: Path) -> None:
    settings, words = SORTS[sort]
    model = causal_lm()
    model.save_pretrained(tmp_path / "base")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = randomize(get_peft_model(model, LoraConfig(r=3, lora_alpha=5, task_type="CAUSAL_LM", **settings)))
        adapted.save_pretrained(tmp_path / "adapter")
    merge_lora(str(tmp_path / "base"), tmp_path / "adapter", tmp_path / "merged", progress=False)
    options: dict[str, Any] = {
        "device": "cpu", "dtype": "float32", "skip_tokenizer_init": True, "use_tqdm": False, "weights_cache": "none",
        "kv_cache_memory_bytes": 1 << 24,
    }  # fmt: skip
    with LLM(str(tmp_path / "base"), enable_lora=True, **options) as llm:
        with pytest.raises(ValueError, match=f"{words}.*quintet merge-lora"):
            ask(llm, PROMPTS, request_of(tmp_path / "adapter"))
        before = [list(each.outputs[0].token_ids) for each in ask(llm, PROMPTS, None)]
    with LLM(str(tmp_path / "merged"), **options) as llm:
        outputs = ask(llm, PROMPTS, None)
        assert_equal_to(adapted, outputs, PROMPTS)
    assert before != [list(each.outputs[0].token_ids) for each in outputs]
