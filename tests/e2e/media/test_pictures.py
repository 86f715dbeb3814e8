"""Pictures of chat models: transformers' tokens of the same prompt, whatever runs beside it and however it is cut."""

from collections.abc import Iterator
from typing import Any

import pytest

from quintet import LLM, SamplingParams
from tests.helpers.media.wrappers import WRAPPERS, Made, make, picture

pytest.importorskip("PIL")

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
SMALL = {"dtype": "float32", "max_model_len": 512, "kv_cache_memory_bytes": "16M", "use_tqdm": False}
ONE, TWO, THREE = picture(40, 56, 1), picture(31, 90, 2), picture(64, 64, 3)


@pytest.fixture(scope="module", params=WRAPPERS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    yield make(request.param, tmp_path_factory.mktemp(request.param))


def cases(made: Made) -> dict[str, tuple[str, list[Any]]]:
    """Prompts, with the pictures of each."""
    here = made.token
    return {
        "none": ("Hello there", []),
        "one": (f"What is {here} this?", [ONE]),
        "odd": (f"{here}tall", [picture(97, 13, 4)]),
        "two": (f"{here}{here} both", [ONE, TWO]),
        "the same twice": (f"a {here} b {here} c {here} d", [THREE, ONE, THREE]),
    }


def prompt(text: str, pictures: list[Any], **more: Any) -> dict[str, Any]:
    return {"prompt": text, **({"multi_modal_data": {"image": pictures}} if pictures else {}), **more}


def tokens(llm: LLM, prompts: list[dict[str, Any]], params: SamplingParams = GREEDY) -> list[list[int]]:
    return [list(each.outputs[0].token_ids) for each in llm.generate(prompts, params, use_tqdm=False)]


def test_tokens_are_those_of_transformers(made: Made) -> None:
    llm = LLM(str(made.folder), **SMALL)
    found = {name: tokens(llm, [prompt(*case)])[0] for name, case in cases(made).items()}
    assert found == {name: made.greedy(*case, 6) for name, case in cases(made).items()}
