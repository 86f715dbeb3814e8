"""prompt_logprob_token_ids: log-probabilities of given tokens after positions of a prompt."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from quintet import LLM, SamplingParams
from quintet.sampling_params import ParameterError
from quintet_tools.checkpoints.tiny import PLAIN, Tiny, make
from tests.helpers.platforms.engines import engine

PROMPT = list(range(5, 45))
START = 9
ROWS = [[(7 * row + 3 * column) % 60 for column in range(4)] for row in range(len(PROMPT) - 1 - START)]


@pytest.fixture(scope="module")
def checkpoint() -> Tiny:
    return make("llama", PLAIN)


@pytest.fixture(scope="module")
def llm(checkpoint: Tiny) -> Iterator[LLM]:
    with engine(checkpoint) as made:
        yield made


def asked(rows: Any = ROWS, start: int = START, **more: Any) -> SamplingParams:
    given: dict[str, Any] = {"max_tokens": 1, "temperature": 0, "ignore_eos": True, "detokenize": False, **more}
    return SamplingParams(prompt_logprob_token_ids=rows, prompt_logprob_start=start, **given)


def scores(llm: LLM, *params: SamplingParams) -> list[Any]:
    given: Any = [{"prompt_token_ids": PROMPT}] * len(params)
    return [each.prompt_token_id_logprobs for each in llm.generate(given, list(params), use_tqdm=False)]


@pytest.fixture(scope="module")
def alone(llm: LLM) -> np.ndarray:
    (found,) = scores(llm, asked())
    return found


def test_they_are_transformers_log_probabilities(checkpoint: Tiny, alone: np.ndarray) -> None:
    wanted = torch.log_softmax(checkpoint.logits(PROMPT).float(), -1)
    assert alone.shape == (len(ROWS), 4) and alone.dtype == np.float32
    expected = [[float(wanted[START + row, token]) for token in ids] for row, ids in enumerate(ROWS)]
    assert alone == pytest.approx(np.array(expected), abs=1e-4)


def test_rows_are_filled_up(llm: LLM, alone: np.ndarray) -> None:
    short = [ids[: 1 + row % 4] for row, ids in enumerate(ROWS)]
    filled = np.array([ids + [-1] * (4 - len(ids)) for ids in short], np.int32)
    from_lists, from_array = scores(llm, asked(short), asked(filled))
    assert np.array_equal(from_lists, np.where(filled >= 0, alone, -np.inf)) and np.array_equal(from_lists, from_array)


def test_alone_batched_and_again_are_equal(llm: LLM, alone: np.ndarray) -> None:
    whole = [[token] for token in PROMPT[1:]]
    plain = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, detokenize=False)
    first, every, second, nothing = scores(llm, asked(), asked(whole, 0), asked(max_tokens=6, n=2), plain)
    assert nothing is None and np.array_equal(first, alone) and np.array_equal(second, alone)
    likeliest = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    given: Any = [{"prompt_token_ids": PROMPT}]
    (output,) = llm.generate(given, likeliest, use_tqdm=False)
    own = [next(iter(at.values())).logprob for at in output.prompt_logprobs[1:]]
    assert every[:, 0].tolist() == own


def test_with_prompt_logprobs_both_are_given(llm: LLM, alone: np.ndarray) -> None:
    given: Any = [{"prompt_token_ids": PROMPT}]
    (output,) = llm.generate(given, asked(prompt_logprobs=1), use_tqdm=False)
    assert np.array_equal(output.prompt_token_id_logprobs, alone) and len(output.prompt_logprobs) == len(PROMPT)


def test_cut_and_preempted_prompts_give_the_same(checkpoint: Tiny, alone: np.ndarray) -> None:
    with engine(checkpoint, max_num_batched_tokens=16, max_num_seqs=4, kv_cache_memory_bytes=None, num_pages=12) as llm:
        for found in scores(llm, *[asked(max_tokens=20), asked(max_tokens=20)] * 2):
            assert np.array_equal(found, alone)
        assert llm._client.engine.scheduler._num_preemptions > 0


@pytest.mark.parametrize(
    ("params", "why"),
    [
        ({"rows": ROWS[1:]}, "must have 30 rows"),
        ({"rows": ROWS, "start": 500}, "must have 0 rows"),
        ({"rows": [[1000]] * 30}, "names token 1000"),
        ({"rows": [list(range(30))] * 30}, "must be at most 20, not 30"),
    ],
)
def test_what_does_not_fit_the_prompt_is_refused(llm: LLM, params: dict[str, Any], why: str) -> None:
    with pytest.raises(ParameterError, match=why):
        scores(llm, asked(**params))


@pytest.mark.parametrize("rows", [[], [[]], [1, 2], "ab", [[-2]], [[1.5]], 7])
def test_what_is_no_rows_is_refused(rows: Any) -> None:
    with pytest.raises(ParameterError, match="prompt_logprob_token_ids"):
        asked(rows)


def test_a_start_alone_is_refused() -> None:
    with pytest.raises(ParameterError, match="belongs to prompt_logprob_token_ids"):
        SamplingParams(prompt_logprob_start=3)
