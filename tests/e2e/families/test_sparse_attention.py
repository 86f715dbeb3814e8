"""DeepSeek sparse attention (DeepSeek-V3.2, GLM-5): requests of more tokens than an indexer chooses."""

import copy
import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from quintet import LLM, SamplingParams
from quintet.conformance.harness.batches import AttentionRequest, RandomKVCache, spec
from quintet.conformance.harness.worker_runner import random_prompts
from quintet.engine.executor.model_part import ModelSizes
from quintet.engine.executor.worker import Worker
from quintet.ops.attention import choose_tokens
from quintet.platforms.cpu import PLATFORM
from quintet_tools.checkpoints.hyper_families import GROUPED, SPARSE
from quintet_tools.checkpoints.tiny import PLAIN, VOCAB, Tiny, make
from tests.helpers.checkpoints.wrappers import WRAPPERS, make_wrapper
from tests.helpers.platforms.run_model import Runner

TOPK, SERVED = 16, 256
HEADS = 32  # of an indexer: with few, many scores are 0, and transformers chooses any of equal ones
LENGTHS = (150, 3, TOPK, TOPK + 1, 77)
GLM = {"n_group": 1, "topk_group": 1, "num_hidden_layers": 4}
MISTRAL = {
    "q_lora_rank": None, "n_group": 1, "topk_group": 1, "num_hidden_layers": 4, "final_logit_softcapping": 20.0,
    "indexer_types": ["full", "full", "full", "shared"], "no_rope_layers": [1, 0, 1, 0],
    "rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 16.0, "attention_factor": 1.0,
                        "original_max_position_embeddings": 16, "beta_fast": 32.0, "beta_slow": 1.0},
}  # fmt: skip
GLM_5_NEXT = {
    **GLM, "qk_rope_head_dim": 0, "index_kpool": 4, "hc_mult": 3, "swiglu_limit": 1.5, "linear_head_dim": 12,
    "layer_types": ["linear_attention", "indexed_attention", "indexed_attention", "linear_attention"],
    "indexer_types": ["shared", "full", "shared", "full"], "linear_num_heads": 4,
}  # fmt: skip
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "A.X K2": ("axk2", {"gated_norm_rank": 5}),
    "deepseek": ("deepseek_v32", {}),
    "glm": ("glm_moe_dsa", GLM),
    "glm 5 next": ("glm5_next", GLM_5_NEXT),
    "mistral": ("mistral_large4", MISTRAL),
    "hy v4": ("hy_v4", {"n_group": 1, "topk_group": 1, "hc_mult": 3, "swiglu_limit": 1.5}),
    "glm, shared": ("glm_moe_dsa", {**GLM, "indexer_types": ["full", "shared", "full", "shared"]}),
}
ENGINES: dict[str, dict[str, Any]] = {
    "batched": {},
    "chunked": {"max_num_batched_tokens": 13, "max_num_seqs": 5},
    "preempted": {"num_pages": 18, "enable_prefix_caching": False},
    "two ranks": {"tensor_parallel_size": 2},
}


@functools.cache
def tiny(name: str) -> Tiny:
    family, differences = CONFIGS[name]
    sizes = {"index_topk": TOPK, "index_n_heads": HEADS, "max_position_embeddings": SERVED}
    settings = {**PLAIN, **GROUPED, **SPARSE, **sizes, **differences}
    return make_wrapper(family, settings) if family in WRAPPERS else make(family, settings)


def generated(name: str, prompts: list[list[int]], **settings: Any) -> list[list[int]]:
    llm = LLM(
        str(tiny(name).folder), device="cpu", dtype="float32", skip_tokenizer_init=True, use_tqdm=False,
        **{"num_pages": 100, **settings},
    )  # fmt: skip
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
    for _ in range(2):  # the second time beginnings are cached, and steps come again
        outputs = llm.generate([{"prompt_token_ids": each} for each in prompts], params, use_tqdm=False)
    llm.close()
    return [list(each.outputs[0].token_ids) for each in outputs]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", CONFIGS)
def test_tokens_equal_transformers(name: str, engine: str) -> None:
    prompts = random_prompts(4, LENGTHS, VOCAB)
    found = generated(name, prompts, **ENGINES[engine])
    for prompt, tokens in zip(prompts, found, strict=True):
        reference = tiny(name).logits(prompt + tokens)
        assert reference[len(prompt) - 1 : -1].argmax(-1).tolist() == tokens


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


def test_an_indexer_matters_behind_the_tokens_that_it_may_choose() -> None:
    """Else the tests above would pass without one."""
    [prompt], every = random_prompts(1, (100,), VOCAB), copy.deepcopy(tiny("deepseek").reference)
    for module in every.modules():
        if hasattr(module, "index_topk"):
            module.index_topk = SERVED
    dense, found = (
        replace(tiny("deepseek"), reference=every).logits(prompt),
        Runner(tiny("deepseek")).prompts([prompt])[0],
    )
    torch.testing.assert_close(found[:TOPK], dense[:TOPK], rtol=0, atol=1e-4 * float(dense.std()))
    assert (found - dense)[TOPK:].abs().max() > 0.1 * dense.std()


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["deepseek", "glm, shared"])
def test_tokens_equal_transformers_at_8192_tokens(name: str) -> None:
    """With as many chosen tokens as published models have."""
    family, differences = CONFIGS[name]
    sizes = {"index_topk": 2048, "index_n_heads": HEADS, "max_position_embeddings": 8192, "num_hidden_layers": 2}
    long = make(family, {**PLAIN, **GROUPED, **SPARSE, **differences, **sizes, "indexer_types": None})
    [prompt] = random_prompts(2, (8180,), VOCAB)
    llm = LLM(str(long.folder), device="cpu", dtype="float32", skip_tokenizer_init=True, use_tqdm=False, num_pages=520)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False, logprobs=20)
    [output] = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
    llm.close()
    completion = output.outputs[0]
    reference = long.logits(prompt + list(completion.token_ids))[-9:-1]
    assert reference.argmax(-1).tolist() == list(completion.token_ids) and completion.logprobs is not None
    for found, want in zip(completion.logprobs, reference.log_softmax(-1), strict=True):
        assert all(abs(each.logprob - float(want[token])) < 1e-3 for token, each in found.items())


def test_a_key_that_is_not_a_number_is_chosen_and_fails_no_step() -> None:
    cache = RandomKVCache(spec(2, 1, 8, page_size=16, shared=8), [40])
    q, context = cache.batch({0: AttentionRequest(0, 40)})
    cache.kv[context.group.block_table[0, 0], 0, 0, 3] = torch.nan
    given = (q, torch.ones(40, 2), cache.kv, context, 8)
    found = choose_tokens.providers["torch"](*given)
    assert torch.equal(found, choose_tokens.reference(*given)) and (found[8:] == 3).any(1).all()


def test_platforms_without_chosen_tokens_serve_short_requests_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PLATFORM, "optional_spec_fields", PLATFORM.optional_spec_fields - {"chosen"})
    family, differences = CONFIGS["deepseek"]
    config = AutoConfig.for_model(family, **{**PLAIN, **GROUPED, **SPARSE, **differences, "index_topk": 40})
    Worker(PLATFORM(), config, ModelSizes(torch.float32, 16, 40))
    with pytest.raises(ValueError, match="set max_model_len to 40 or less, or use device='cpu'"):
        Worker(PLATFORM(), config, ModelSizes(torch.float32, 16, 41))


def test_stages_that_lack_the_choice_of_an_indexer_are_refused() -> None:
    with pytest.raises(ValueError, match="leave pipeline_parallel_size out, or set max_model_len to 16 or less"):
        generated("glm, shared", [[1, 2]], pipeline_parallel_size=2)
