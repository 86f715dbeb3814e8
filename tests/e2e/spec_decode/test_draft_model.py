"""A draft model beside the bundled one: the same tokens as without, in fewer steps, whatever is asked for."""

import functools
import shutil
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quintet import LLM, SamplingParams
from quintet.config import BUNDLED, EngineConfig
from quintet.engine.observability.stats import Stats
from quintet.hub.resolve import resolve_model
from quintet_tools.checkpoints.tiny import variant

PROMPTS = ("Once upon a time", "Tom and Lily went to the park because", "The dog said", "One day, a girl named Mia")
SETTINGS: dict[str, Any] = {"device": "cpu", "use_tqdm": False, "kv_cache_memory_bytes": "64M", "max_model_len": 256}
EDITS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 0.9, "seed": 5},
    "cut": {"temperature": 0.9, "top_p": 0.8, "top_k": 20, "seed": 6},
    "penalized": {"temperature": 0.7, "seed": 7, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    "logprobs": {"temperature": 0, "logprobs": 3},
    "several": {"temperature": 0.8, "seed": 8, "n": 3},
    "stopped": {"temperature": 0, "stop": [" and"], "min_tokens": 5},
    "scored": {"temperature": 0, "prompt_logprobs": 1},
}


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The bundled model with noise in its weights: it is right now and then."""
    folder = tmp_path_factory.mktemp("drafter") / "model"
    shutil.copytree(resolve_model(EngineConfig(model=BUNDLED, device="cpu")), folder)
    torch.manual_seed(0)
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        noisy = {k: v + 0.35 * v.float().std().to(v.dtype) * torch.randn_like(v) for k, v in tensors.items()}
        save_file(noisy, file)
    return str(folder)


@functools.cache
def opened(drafter: str, **settings: Any) -> LLM:
    spec = {"speculative_config": {"model": drafter, "num_speculative_tokens": 4}} if drafter else {}
    return LLM(BUNDLED, **{**SETTINGS, **settings}, **spec)


def said(llm: LLM, params: dict[str, Any], prompts: Sequence[str] = PROMPTS) -> list[Any]:
    answers = llm.generate(list(prompts), SamplingParams(max_tokens=40, **params), use_tqdm=False)
    llm._client.engine.check_integrity()  # type: ignore[attr-defined]
    found = []
    for answer in answers:
        found += [(list(each.token_ids), each.text, each.finish_reason, each.logprobs) for each in answer.outputs]
        found.append(answer.prompt_logprobs)
    return found


def stats(llm: LLM) -> Stats:
    made: Stats = llm._client.engine.stats()  # type: ignore[attr-defined]
    return made


@pytest.mark.parametrize("edit", EDITS)
def test_the_tokens_are_those_without_it(drafter: str, edit: str) -> None:
    ours, theirs = opened(drafter), opened("")
    before = stats(ours).spec_decode, stats(ours).steps.num_steps, stats(theirs).steps.num_steps
    assert said(ours, EDITS[edit]) == said(theirs, EDITS[edit])
    after = stats(ours).spec_decode
    proposed = after.num_draft_tokens - before[0].num_draft_tokens
    accepted = after.num_accepted_tokens - before[0].num_accepted_tokens
    assert 0 < accepted < proposed
    assert stats(ours).steps.num_steps - before[1] < stats(theirs).steps.num_steps - before[2]


@pytest.mark.parametrize(
    "settings",
    [
        {"num_pages": 11, "kv_cache_memory_bytes": None, "max_model_len": 128},
        {"max_num_batched_tokens": 16},
        {"enable_prefix_caching": False, "max_num_seqs": 2},
        {"enforce_eager": True},
        {"kv_cache_dtype": "int8"},
        pytest.param({"tensor_parallel_size": 2}, marks=pytest.mark.slow),
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_few_pages_chunks_and_ranks_change_nothing(drafter: str, settings: dict[str, Any]) -> None:
    """Requests are preempted, prompts come in chunks, and texts are found that were said before."""
    ours, theirs = (LLM(BUNDLED, **{**SETTINGS, **settings}, **spec) for spec in (_spec(drafter), {}))
    with ours, theirs:
        for _ in range(2):
            for edit in ("greedy", "sampled"):
                assert said(ours, EDITS[edit]) == said(theirs, EDITS[edit])
        if "num_pages" in settings:
            assert stats(ours).scheduler.num_preemptions > 0
        if "tensor_parallel_size" not in settings:
            assert stats(ours).spec_decode.num_accepted_tokens > 0


def _spec(drafter: str) -> dict[str, Any]:
    return {"speculative_config": {"model": drafter, "num_speculative_tokens": 4}}


def test_the_model_as_its_own_drafter_is_always_right() -> None:
    """Sampled requests too: both draw with the same random numbers. A prefix that was found holds its keys, too."""
    llm = opened(BUNDLED)
    for edit in ("greedy", "sampled", "cut"):
        for _ in range(2):
            before = stats(llm)
            answers = llm.generate(list(PROMPTS), SamplingParams(max_tokens=42, ignore_eos=True, **EDITS[edit]))
            after = stats(llm)
            assert [len(each.outputs[0].token_ids) for each in answers] == [42] * len(PROMPTS)
            spec = after.spec_decode, before.spec_decode
            proposed, accepted = (
                spec[0].num_draft_tokens - spec[1].num_draft_tokens,
                spec[0].num_accepted_tokens - spec[1].num_accepted_tokens,
            )
            assert accepted == proposed > 0
    assert stats(llm).scheduler.prefix_hits > 0


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_first_tokens_of_a_vocabulary_are_guessed_alone(ranks: int) -> None:
    """What the model itself would draw, but for tokens that are cut off; the tokens stay."""
    size, settings = 1000, {**SETTINGS, "tensor_parallel_size": ranks}  # no multiple of 64, and of 2,048 tokens
    spec = {"model": BUNDLED, "num_speculative_tokens": 4, "draft_vocab_size": size}
    with LLM(BUNDLED, **settings, speculative_config=spec) as ours, LLM(BUNDLED, **settings) as theirs:
        if ranks == 1:
            drafter = ours._client.engine._runner.ranks.workers[0].drafter  # type: ignore[attr-defined]
            assert drafter.model.vocab_size == size
        for edit in ("greedy", "sampled", "cut"):
            found = said(ours, EDITS[edit])
            assert found == said(theirs, EDITS[edit])
            if edit == "greedy":
                drawn = [token for each in found if each for token in each[0]]
                assert any(token >= size for token in drawn) and any(token < size for token in drawn)
        if ranks == 1:
            made = stats(ours).spec_decode
            assert 0 < made.num_accepted_tokens < made.num_draft_tokens


@pytest.mark.parametrize("target", ["gemma3_text", "qwen3_next"])
def test_layers_of_other_shapes_windows_and_states_stand_beside_it(target: str) -> None:
    """A small random Llama proposes to models that keep windows or states; steps are recorded for both."""
    tiny, small = variant(target, "plain"), variant("llama", "plain")
    assert tiny.config.vocab_size == small.config.vocab_size
    settings = {"device": "cpu", "dtype": "float32", "skip_tokenizer_init": True, "num_pages": 200, "use_tqdm": False}
    prompts = [{"prompt_token_ids": [(7 * at + row) % 90 + 1 for at in range(20 + 9 * row)]} for row in range(4)]
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, detokenize=False)
    found = []
    for spec in ({}, _spec(str(small.folder))):
        with LLM(str(tiny.folder), **settings, **spec) as llm:
            found.append([list(each.outputs[0].token_ids) for each in llm.generate(prompts, params)])
            llm._client.engine.check_integrity()  # type: ignore[attr-defined]
            if spec:
                assert stats(llm).spec_decode.num_draft_tokens > 0
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ({"method": "draft_model", "num_speculative_tokens": 2}, "needs speculative_config.model"),
        ({"method": "ngram", "model": "x", "num_speculative_tokens": 2}, "is for draft models and heads"),
        ({"method": "ngram", "draft_vocab_size": 9, "num_speculative_tokens": 2}, "is for draft models and heads"),
        ({"method": "mtp", "draft_vocab_size": 9, "num_speculative_tokens": 2}, "draft_vocab_size is for draft models"),
        ({"model": "bundled-draft", "draft_vocab_size": 9, "num_speculative_tokens": 2}, "this is a draft head"),
        ({"num_speculative_tokens": 2}, "speculative_config.method must be given"),
        ({"model": "/no/such/folder", "num_speculative_tokens": 2}, "/no/such/folder"),
    ],
)
def test_what_cannot_be_is_refused(spec: dict[str, Any], why: str) -> None:
    with pytest.raises((ValueError, OSError), match=why):
        LLM(BUNDLED, **SETTINGS, speculative_config=spec)


def test_another_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match="has a vocabulary of .* tokens, and the model has"):
        LLM(BUNDLED, **SETTINGS, **_spec(str(variant("llama", "plain").folder)))


@pytest.mark.slow
def test_the_tokens_are_those_without_it_where_shapes_are_fixed() -> None:
    """On JAX's CPU device: two models are compiled, and run in turns on one state."""
    pytest.importorskip("jax")
    settings = {
        "device": "tpu",
        "use_tqdm": False,
        "max_model_len": 128,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "num_pages": 64,
    }
    params = [SamplingParams(temperature=0, max_tokens=24), SamplingParams(temperature=0.8, seed=3, max_tokens=24)]
    found = []
    for spec in ({}, _spec(BUNDLED)):
        with LLM(BUNDLED, **settings, **spec) as llm:
            answers = llm.generate(list(PROMPTS[:2]), params, use_tqdm=False)
            found.append([list(each.outputs[0].token_ids) for each in answers])
            counts = stats(llm).spec_decode
    assert found[0] == found[1]
    assert counts.num_accepted_tokens > counts.num_draft_tokens // 2
