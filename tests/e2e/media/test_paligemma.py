"""PaliGemma, whose prompts see all of themselves: what follows for pages, steps, and what is asked of a prompt."""

from collections.abc import Iterator

import pytest

from quintet import LLM, BeamSearchParams
from quintet.sampling_params import SamplingParams
from tests.e2e.media.test_pictures import GREEDY, opened, prompt, tokens, wanted
from tests.helpers.media.wrappers import ONE, TWO, Made, make

pytest.importorskip("PIL")

LONG = "A text of more than two pages of tokens: {} what is it, and where?"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make("paligemma2", tmp_path_factory.mktemp("paligemma2"))


@pytest.fixture(scope="module")
def llm(made: Made) -> Iterator[LLM]:
    llm = opened(made)
    yield llm
    llm.close()


def test_pages_are_found_for_the_same_prompt_alone(made: Made, llm: LLM) -> None:
    text = LONG.format(made.token)
    first = prompt(text, [ONE])
    found = [llm.generate(each, GREEDY, use_tqdm=False)[0] for each in (
        first, first, prompt(text[:-1] + "!", [ONE]), prompt(text, [TWO]), first,
    )]  # fmt: skip
    assert [each.num_cached_tokens for each in found] == [0, 80, 0, 0, 80]
    same = [list(found[at].outputs[0].token_ids) for at in (0, 1, 4)]
    assert same == [wanted(made, (text, [ONE]))] * 3
    assert list(found[2].outputs[0].token_ids) == wanted(made, (text[:-1] + "!", [ONE]))


def test_prompts_are_computed_in_one_step_beside_others_that_decode(made: Made, llm: LLM) -> None:
    assert not llm.config.enable_chunked_prefill and llm.config.max_num_batched_tokens >= 512
    cases = [("one " + made.token, [ONE]), ("text alone", []), (made.token + made.token, [TWO, ONE])]
    tokens_of_all = tokens(llm, [prompt(*case) for case in cases])
    assert tokens_of_all == [wanted(made, case) for case in cases]


def test_what_is_not_computed_is_refused(made: Made, llm: LLM) -> None:
    with pytest.raises(ValueError, match="97 tokens that see one another, and 96 do at most"):
        llm.generate({"prompt_token_ids": [1] * 97}, GREEDY, use_tqdm=False)
    with pytest.raises(ValueError, match="prompt_logprobs"):
        llm.generate("a text", SamplingParams(prompt_logprobs=1), use_tqdm=False)
    with pytest.raises(ValueError, match="beam_search goes on from prompts"):
        llm.beam_search(["a text"], BeamSearchParams(beam_width=2, max_tokens=2))
    with pytest.raises(ValueError, match="0 of each kind, and its prompts of text are computed in the same way"):
        opened(made, limit_mm_per_prompt={"image": 0})
