"""Pictures of GGUF models with their encoders (mmproj): transformers' tokens of the model that both are made of."""

from pathlib import Path
from typing import Any

import pytest

from quintet import LLM, SamplingParams
from tests.helpers.media import wrappers
from tests.helpers.media.mmproj import MODELS, write_mmproj, write_text
from tests.helpers.media.wrappers import Made, make, picture

pytest.importorskip("PIL")

COUNT = 6
GREEDY = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True)
SMALL = {"dtype": "float32", "max_model_len": 1024, "kv_cache_memory_bytes": "16M", "use_tqdm": False}
ONE, TWO, WIDE = picture(40, 56, 1), picture(31, 90, 2), picture(97, 130, 3)


@pytest.fixture(scope="module", params=MODELS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Made, Path]:
    kind, patched = request.param, pytest.MonkeyPatch()
    patched.setitem(wrappers.WRAPPERS, kind, MODELS[kind])
    folder = tmp_path_factory.mktemp("made")
    found = make(kind, folder)
    patched.undo()
    files = tmp_path_factory.mktemp("gguf")
    write_text(found, files / "model-F32.gguf")
    write_mmproj(found, files / "mmproj-F32.gguf", kind)
    return kind, found, files


def cases(made: Made) -> dict[str, tuple[str, list[Any]]]:
    here = made.token
    return {
        "none": ("Hello there", []),
        "one": (f"What is {here} this?", [ONE]),
        "odd": (f"{here}tall", [picture(97, 13, 4)]),
        "two": (f"{here}{here} both", [ONE, TWO]),
        "wide": (f"so {here} wide", [WIDE]),
    }


def prompt(text: str, pictures: list[Any]) -> dict[str, Any]:
    return {"prompt": text, **({"multi_modal_data": {"image": pictures}} if pictures else {})}


def tokens(llm: LLM, prompts: list[dict[str, Any]]) -> list[list[int]]:
    return [list(each.outputs[0].token_ids) for each in llm.generate(prompts, GREEDY, use_tqdm=False)]


def test_tokens_are_those_of_transformers(made: tuple[str, Made, Path]) -> None:
    kind, original, files = made
    llm = LLM(str(files / "model-F32.gguf"), **SMALL)
    wanted = [original.greedy(*case, COUNT) for case in cases(original).values()]
    for case in cases(original).values():
        (output,) = llm.generate(prompt(*case), GREEDY, use_tqdm=False)
        assert output.prompt_token_ids == original.inputs(*case)["input_ids"][0].tolist()
    assert tokens(llm, [prompt(*case) for case in cases(original).values()]) == wanted
