"""LLM.enqueue and wait_for_completion, vLLM's two halves of generate(), and log-probabilities in flat lists."""

from typing import Any

import pytest

from quintet import LLM, SamplingParams
from quintet.outputs import CompletionOutput, FlatLogprobs, Logprob, RequestOutput

PROMPTS = ["Once upon a time", "The dog said", "2 + 2 ="]
GREEDY = SamplingParams(temperature=0, max_tokens=6)


@pytest.fixture(scope="module")
def llm() -> Any:
    with LLM("bundled", device="cpu", kv_cache_memory_bytes="32M", use_tqdm=False) as made:
        yield made


def texts(outputs: list[RequestOutput]) -> list[str]:
    return [output.outputs[0].text for output in outputs]


def test_what_was_enqueued_is_what_generate_gives_in_that_order(llm: LLM) -> None:
    want = texts(llm.generate(PROMPTS, GREEDY, use_tqdm=False))
    first = llm.enqueue(PROMPTS[:2], GREEDY)
    between = llm.generate(PROMPTS[2], GREEDY, use_tqdm=False)
    last = llm.enqueue(PROMPTS[2:], GREEDY)
    found = llm.wait_for_completion(use_tqdm=False)
    assert texts(found) == want and [each.request_id for each in found] == [*first, *last]
    assert texts(between) == want[2:] and all(each.finished for each in found)
    assert llm.wait_for_completion(use_tqdm=False) == [], "each is returned once"


def test_chats_are_taken_apart_as_chat_does(llm: LLM) -> None:
    talk = [{"role": "user", "content": "What is the capital of France?"}]
    (want,) = llm.chat(talk, GREEDY, use_tqdm=False)
    llm.enqueue_chat(talk, GREEDY)
    (found,) = llm.wait_for_completion(RequestOutput, use_tqdm=False)
    assert found.outputs[0].message == want.outputs[0].message is not None


def test_nothing_is_queued_if_anything_is_wrong(llm: LLM) -> None:
    with pytest.raises(ValueError, match="max_model_len"):
        llm.enqueue([PROMPTS[0], {"prompt_token_ids": [5] * 2000}], GREEDY)
    with pytest.raises(ValueError, match="enqueued requests have RequestOutput"):
        llm.wait_for_completion(CompletionOutput, use_tqdm=False)
    assert llm.wait_for_completion(use_tqdm=False) == []


def test_flat_log_probabilities_are_the_same_in_few_lists(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=2, prompt_logprobs=1)
    flat = SamplingParams(temperature=0, max_tokens=6, logprobs=2, prompt_logprobs=1, flat_logprobs=True)
    for prompt in PROMPTS:
        (want,), (found,) = llm.generate(prompt, params, use_tqdm=False), llm.generate(prompt, flat, use_tqdm=False)
        mine, scored = found.outputs[0].logprobs, found.prompt_logprobs
        assert isinstance(mine, FlatLogprobs) and isinstance(scored, FlatLogprobs)
        assert list(mine) == want.outputs[0].logprobs and list(scored) == want.prompt_logprobs
        assert mine.token_ids[mine.start_indices[1]] == found.outputs[0].token_ids[1]
        assert found.outputs[0].cumulative_logprob == want.outputs[0].cumulative_logprob


def test_flat_log_probabilities_come_in_a_stream(llm: LLM) -> None:
    flat = SamplingParams(temperature=0, max_tokens=5, logprobs=1, flat_logprobs=True)
    (whole,) = llm.generate(PROMPTS[0], flat, use_tqdm=False)
    pieces = [output.outputs[0].logprobs or FlatLogprobs() for output in llm.stream(PROMPTS[0], flat)]
    assert [at for piece in pieces for at in piece] == list(whole.outputs[0].logprobs or ())


def test_flat_log_probabilities_are_a_sequence() -> None:
    made = FlatLogprobs()
    made.append(None)
    made.append({3: Logprob(-0.5, 1, "a"), 4: Logprob(-1.5, 2, "b")})
    assert len(made) == 2 and made[0] is None and made[-1] == {3: Logprob(-0.5, 1, "a"), 4: Logprob(-1.5, 2, "b")}
    assert list(made[1:]) == [made[1]] and made.copy() == made
    with pytest.raises(IndexError):
        made[2]
