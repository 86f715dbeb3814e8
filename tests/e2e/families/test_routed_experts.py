"""enable_return_routed_experts: the experts of tokens are those of transformers' routers, in every way to compute."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file
from torch import nn

from quintet import LLM, SamplingParams
from quintet.conformance.harness.worker_runner import random_prompts
from quintet.outputs import RequestOutput
from quintet_tools.checkpoints.tiny import VOCAB, Tiny, make, variants
from tests.helpers.platforms.engines import engine

GREEDY = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, detokenize=False)
PROMPTS = random_prompts(5, (17, 3, 30), VOCAB)
RETURNED = {"enable_return_routed_experts": True}


def tiny_of(family: str) -> Tiny:
    return make(family, next(iter(variants(family).values())))


def routers_choice(tiny: Tiny, ids: Sequence[int]) -> "np.ndarray[Any, Any]":
    """[tokens, layers, k], sorted: ids that transformers' mixtures give their experts."""
    found: list[np.ndarray[Any, Any]] = []

    def note(module: nn.Module, args: tuple[Any, ...]) -> None:
        chosen = next(each for each in args[1:] if not each.is_floating_point())
        found.append(chosen.reshape(len(ids), -1).numpy())

    experts = [each for each in tiny.reference.modules() if type(each).__name__.endswith("Experts")]
    hooks = [each.register_forward_pre_hook(note) for each in experts]
    tiny.logits(ids)
    for each in hooks:
        each.remove()
    return np.sort(np.stack(found, 1), -1)


def generate(llm: LLM, prompts: Sequence[Sequence[int]], params: SamplingParams = GREEDY) -> list[RequestOutput]:
    given: Any = [{"prompt_token_ids": list(ids)} for ids in prompts]
    return llm.generate(given, params, use_tqdm=False)


def routed(output: RequestOutput) -> "np.ndarray[Any, Any]":
    found = output.outputs[0].routed_experts
    assert found is not None
    return found


@pytest.mark.parametrize(
    "family",
    ["qwen3_moe", "qwen2_moe", "mixtral", "deepseek_v3", "gpt_oss", "olmoe", "granitemoe", "glm4_moe", "ernie4_5_moe",
     "minimax_m2", "phimoe", "nemotron_h", "lfm2_moe", "jamba", "dots1", "bailing_moe", "deepseek_v2"],
)  # fmt: skip
def test_experts_are_those_of_transformers_routers(family: str) -> None:
    tiny = tiny_of(family)
    with engine(tiny, **RETURNED, max_num_batched_tokens=16) as llm:  # prompts come in chunks
        for output in generate(llm, PROMPTS):
            ids = [*output.prompt_token_ids, *output.outputs[0].token_ids]
            want = routers_choice(tiny, ids)[:-1]  # the last token was not computed
            assert np.array_equal(np.sort(routed(output), -1), want)
            assert routed(output).dtype == np.uint8


def test_experts_are_the_same_alone_in_a_batch_in_chunks_and_from_the_prefix_cache() -> None:
    tiny = tiny_of("qwen3_moe")
    with engine(tiny, **RETURNED, enable_prefix_caching=False) as llm:
        alone = [routed(generate(llm, [ids])[0]) for ids in PROMPTS]
    with engine(tiny, **RETURNED, page_size=8, max_num_batched_tokens=8) as llm:
        first, second = generate(llm, PROMPTS), generate(llm, PROMPTS)
    assert [each.num_cached_tokens for each in second] == [16, 0, 24]
    for want, together, cached in zip(alone, first, second, strict=True):
        assert np.array_equal(routed(together), want) and np.array_equal(routed(cached), want)


def test_a_preempted_request_has_the_same_experts() -> None:
    tiny, params = tiny_of("qwen3_moe"), SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, detokenize=False)
    with engine(tiny, **RETURNED) as llm:
        want = [routed(each) for each in generate(llm, PROMPTS, params)]
    few = {"kv_cache_memory_bytes": None, "num_pages": 13, "page_size": 8, "enable_prefix_caching": False}
    with engine(tiny, **RETURNED, **few) as llm:
        outputs = generate(llm, PROMPTS, params)
    assert sum(each.metrics.num_preemptions for each in outputs) > 0
    assert all(np.array_equal(routed(output), each) for output, each in zip(outputs, want, strict=True))


def test_drafts_and_several_completions_have_the_experts_of_their_own_tokens() -> None:
    tiny = tiny_of("qwen3_moe")
    drawn = SamplingParams(n=3, seed=4, max_tokens=9, ignore_eos=True, detokenize=False)
    drafting = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
    prompt = [5, 6, 7, 8] * 6
    with engine(tiny, **RETURNED, speculative_config=drafting) as llm:
        (greedy,), (several,) = generate(llm, [prompt]), generate(llm, [prompt], drawn)
    for each in (*greedy.outputs, *several.outputs):
        assert each.routed_experts is not None
        want = routers_choice(tiny, [*prompt, *each.token_ids])[:-1]
        assert np.array_equal(np.sort(each.routed_experts, -1), want)


@pytest.mark.parametrize("more", [{}, {"enable_expert_parallel": True}], ids=repr)
def test_ranks_return_the_experts_of_the_whole_model(more: dict[str, Any]) -> None:
    tiny = tiny_of("qwen3_moe")
    with engine(tiny, **RETURNED) as llm:
        want = [routed(each) for each in generate(llm, PROMPTS)]
    with engine(tiny, **RETURNED, tensor_parallel_size=2, **more) as llm:
        found = [routed(each) for each in generate(llm, PROMPTS)]
    assert all(np.array_equal(*pair) for pair in zip(found, want, strict=True))


def test_a_start_leaves_out_the_tokens_before_it() -> None:
    with engine(tiny_of("qwen3_moe"), **RETURNED) as llm:
        whole = routed(generate(llm, PROMPTS)[0])
        params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, detokenize=False)
        params.routed_experts_prompt_start = 11
        assert np.array_equal(routed(generate(llm, PROMPTS, params)[0]), whole[11:])


def test_nothing_is_returned_unless_the_engine_was_told_to() -> None:
    with engine(tiny_of("qwen3_moe")) as llm:
        assert generate(llm, PROMPTS)[0].outputs[0].routed_experts is None


@pytest.mark.parametrize(
    ("family", "settings", "named"),
    [
        ("llama", {}, "has no router that reports its choice"),
        ("qwen3_moe", {"kv_offloading_size": "1M"}, "come from a KV connector"),
        ("qwen3_moe", {"model_impl": "transformers"}, "transformers' own code"),
        ("qwen3_moe", {"pipeline_parallel_size": 2}, "the experts of its own layers"),
    ],
)
def test_what_cannot_return_experts_is_refused_by_name(family: str, settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=f"enable_return_routed_experts.*{named}"):
        engine(tiny_of(family), **RETURNED, **settings)


def test_updates_of_weights_change_the_experts_of_cached_prompts() -> None:
    old, new = tiny_of("qwen3_moe"), make("qwen3_moe", next(iter(variants("qwen3_moe").values())), 1)
    with engine(old, **RETURNED, page_size=8) as llm, engine(new, **RETURNED) as fresh:
        generate(llm, PROMPTS)
        for file in sorted(new.folder.glob("*.safetensors")):
            llm.update_weights(load_file(file))
        for ours, theirs in zip(generate(llm, PROMPTS), generate(fresh, PROMPTS), strict=True):
            assert np.array_equal(routed(ours), routed(theirs))
