"""DeepSeek-V4: requests shorter and longer than windows, than the tokens of an entry, and than entries are chosen."""

import copy
import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from quintet import LLM, SamplingParams
from quintet.conformance.harness.worker_runner import random_prompts
from quintet.engine.executor.model_part import ModelSizes
from quintet.engine.executor.worker import Worker
from quintet.platforms.cpu import PLATFORM
from quintet_tools.checkpoints.derived_families import DEEPSEEK_V4
from quintet_tools.checkpoints.tiny import VOCAB, Tiny, make
from tests.helpers.platforms.run_model import Runner

SERVED, WINDOW, SPARSE, HEAVY, TOPK = 256, 9, 4, 24, 6
# an entry's tokens, one fewer and one more; more entries than are chosen
LENGTHS = (150, 3, SPARSE, HEAVY - 1, HEAVY, WINDOW, SPARSE * (TOPK + 1) + 1, 77)
CONFIGS: dict[str, dict[str, Any]] = {
    "all kinds": {},
    "heavy alone": {"layer_types": ["heavily_compressed_attention"] * 4},
    "windows alone": {"layer_types": ["sliding_attention"] * 4},
    "entries longer than windows": {"sliding_window": 3, "mlp_layer_types": ["moe"] * 4},
    "YaRN": {
        "rope_parameters": {
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1
        }
    },
}  # fmt: skip
ENGINES: dict[str, dict[str, Any]] = {
    "batched": {},
    "chunked": {"max_num_batched_tokens": 13, "max_num_seqs": 5},
    "pages of 32": {"block_size": 32, "num_pages": 60},
    "preempted": {"num_pages": 20},
    "preempted, no cached pages": {"num_pages": 20, "enable_prefix_caching": False},
    "two ranks": {"tensor_parallel_size": 2},
}


@functools.cache
def tiny(name: str) -> Tiny:
    return make("deepseek_v4", {**DEEPSEEK_V4, "max_position_embeddings": SERVED, **CONFIGS[name]})


def generated(name: str, prompts: list[list[int]], **settings: Any) -> tuple[list[list[int]], int]:
    """Tokens after prompts that came twice, and those of the second time that were cached."""
    llm = LLM(
        str(tiny(name).folder), device="cpu", dtype="float32", skip_tokenizer_init=True, use_tqdm=False,
        **{"num_pages": 100, **settings},
    )  # fmt: skip
    params = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True, detokenize=False)
    for _ in range(2):  # the second time beginnings are cached, and steps come again
        outputs = llm.generate([{"prompt_token_ids": each} for each in prompts], params, use_tqdm=False)
    llm.close()
    return [list(each.outputs[0].token_ids) for each in outputs], sum(each.num_cached_tokens or 0 for each in outputs)


@pytest.mark.parametrize(
    ("name", "engine"), [("all kinds", each) for each in ENGINES] + [(each, "chunked") for each in CONFIGS][1:]
)
def test_tokens_equal_transformers(name: str, engine: str) -> None:
    prompts = random_prompts(4, LENGTHS, VOCAB)
    found, cached = generated(name, prompts, **ENGINES[engine])
    for prompt, tokens in zip(prompts, found, strict=True):
        reference = tiny(name).logits(prompt + tokens)
        assert reference[len(prompt) - 1 : -1].argmax(-1).tolist() == tokens
    assert cached or engine != "batched"


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_transformers_and_bits_do_not_depend_on_the_batch(name: str) -> None:
    run, prompts = Runner(tiny(name), max_model_len=SERVED), random_prompts(1, LENGTHS, VOCAB)
    for prompt, together in zip(prompts, run.prompts(prompts), strict=True):
        reference = tiny(name).logits(prompt)
        torch.testing.assert_close(together, reference, rtol=0, atol=1e-4 * float(reference.std()))
        alone = run.prompts([prompt])[0]
        chunks = [run.step({0: prompt[at : at + 7]})[0] for at in range(0, len(prompt), 7)]
        run.finish(0)
        assert torch.equal(alone, together) and torch.equal(alone, torch.cat(chunks))


def test_an_indexer_matters_behind_the_entries_that_it_may_choose() -> None:
    """Else the tests above would pass without one."""
    [prompt], every = random_prompts(1, (100,), VOCAB), copy.deepcopy(tiny("all kinds").reference)
    for module in every.modules():
        if hasattr(module, "index_topk"):
            module.index_topk = SERVED
    whole = replace(tiny("all kinds"), reference=every).logits(prompt)
    found, first = Runner(tiny("all kinds")).prompts([prompt])[0], SPARSE * (TOPK + 1) - 1
    torch.testing.assert_close(found[:first], whole[:first], rtol=0, atol=1e-4 * float(whole.std()))
    assert (found - whole)[first:].abs().max() > 0.1 * whole.std()


def test_platforms_without_compressed_entries_refuse_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PLATFORM, "optional_spec_fields", PLATFORM.optional_spec_fields - {"compressed"})
    for name in ("all kinds", "windows alone"):
        config = AutoConfig.for_model("deepseek_v4", **{**DEEPSEEK_V4, **CONFIGS[name]})
        with pytest.raises(ValueError, match="has no attention to compressed entries.*run this model with device='cpu'"):
            Worker(PLATFORM(), config, ModelSizes(torch.float32, 16, 40))
