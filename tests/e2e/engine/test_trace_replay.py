"""trace_decode_token_ids: the output is given, and its log-probabilities are the model's."""

from typing import Any

import pytest

from quintet import LLM, SamplingParams
from quintet.sampling_params import ParameterError
from quintet_tools.checkpoints.tiny import PLAIN, make
from tests.helpers.platforms.engines import engine

PROMPT = list(range(5, 25))
TRACE = [9, 3, 3, 40, 17, 2, 8]


@pytest.fixture(scope="module")
def llm() -> Any:
    with engine(make("llama", PLAIN)) as made:
        yield made


def run(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> list[Any]:
    given: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
    return [output.outputs[0] for output in llm.generate(given, params, use_tqdm=False)]


def scored(llm: LLM, ids: list[int]) -> list[dict[int, float]]:
    """Log-probabilities of the tokens of a prompt, with the likeliest of each position."""
    params = SamplingParams(max_tokens=1, prompt_logprobs=2, detokenize=False)
    given: Any = [{"prompt_token_ids": ids}]
    (output,) = llm.generate(given, params, use_tqdm=False)
    return [{token: each.logprob for token, each in (at or {}).items()} for at in output.prompt_logprobs or ()]


@pytest.mark.parametrize("more", [{"temperature": 0}, {"temperature": 0.7, "top_p": 0.5, "seed": 3}])
def test_the_output_is_the_trace_with_the_models_log_probabilities(llm: LLM, more: dict[str, Any]) -> None:
    params = SamplingParams(trace_decode_token_ids=TRACE, logprobs=2, max_tokens=3, detokenize=False, **more)
    (found,) = run(llm, [PROMPT], [params])
    assert list(found.token_ids) == TRACE and found.finish_reason == "length"
    values = [{token: each.logprob for token, each in at.items()} for at in found.logprobs]
    assert values == scored(llm, PROMPT + TRACE)[len(PROMPT) :]


def test_others_in_the_batch_draw_what_they_draw_alone(llm: LLM) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=7, ignore_eos=True, detokenize=False, logprobs=0)
    drawn = SamplingParams(temperature=1, seed=5, max_tokens=7, ignore_eos=True, detokenize=False)
    trace = SamplingParams(trace_decode_token_ids=TRACE, detokenize=False)
    alone = [run(llm, [PROMPT], [each])[0].token_ids for each in (greedy, drawn)]
    together = run(llm, [PROMPT] * 3, [greedy, trace, drawn])
    assert [list(each.token_ids) for each in together] == [list(alone[0]), TRACE, list(alone[1])]


def test_tokens_that_would_end_it_do_not(llm: LLM) -> None:
    params = SamplingParams(trace_decode_token_ids=TRACE, stop_token_ids=[3], min_tokens=2, detokenize=False)
    (found,) = run(llm, [PROMPT], [params])
    assert list(found.token_ids) == TRACE and params.stop_token_ids == []


def test_a_trace_that_is_too_long_ends_where_the_model_does(llm: LLM) -> None:
    (found,) = run(llm, [PROMPT], [SamplingParams(trace_decode_token_ids=[7] * 100, detokenize=False)])
    assert list(found.token_ids) == [7] * (64 - len(PROMPT))


def test_processed_log_probabilities_are_those_without_the_trace() -> None:
    with engine(make("llama", PLAIN), logprobs_mode="processed_logprobs") as llm:
        greedy = SamplingParams(temperature=0.5, top_k=3, seed=1, max_tokens=5, ignore_eos=True, logprobs=0)
        greedy.detokenize = False
        (want,) = run(llm, [PROMPT], [greedy])
        again = greedy.clone()
        again.trace_decode_token_ids = list(want.token_ids)
        (found,) = run(llm, [PROMPT], [again])
        assert found.token_ids == want.token_ids and found.logprobs == want.logprobs


def test_a_draft_is_accepted_where_it_is_the_trace() -> None:
    text = [9, 3, 40, 17] * 4
    spec = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
    with engine(make("llama", PLAIN), speculative_config=spec) as llm:
        (found,) = run(llm, [text], [SamplingParams(trace_decode_token_ids=text, detokenize=False)])
        assert list(found.token_ids) == text
        assert llm._client.engine.stats().spec_decode.num_accepted_tokens > 0


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"trace_decode_token_ids": []}, "trace_decode_token_ids must be a list of at least one token id"),
        ({"trace_decode_token_ids": {1, 2}}, "trace_decode_token_ids must be a list"),
        ({"trace_decode_token_ids": [-1]}, "trace_decode_token_ids entry 0"),
        ({"n": 2}, "n must be 1 with trace_decode_token_ids"),
        ({"bad_words": ["a"]}, "bad_words changes which tokens are drawn"),
        ({"allowed_token_ids": [1]}, "allowed_token_ids changes"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs changes"),
    ],
)
def test_what_does_not_go_with_a_trace_is_named(more: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        SamplingParams(**{"trace_decode_token_ids": TRACE, **more})


def test_a_token_that_the_model_does_not_have_is_named(llm: LLM) -> None:
    with pytest.raises(ValueError, match="trace_decode_token_ids names token 9999"):
        run(llm, [PROMPT], [SamplingParams(trace_decode_token_ids=[9999], detokenize=False)])
