"""Rows that callers give in the place of an encoder's output: the tokens of the image that they were made of."""

import base64
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save

from quintet import LLM
from tests.e2e.media.test_chats import TEMPLATE
from tests.e2e.media.test_pictures import GREEDY, SMALL, prompt, tokens, wanted
from tests.helpers.media.wrappers import ONE, TWO, Made, make

ENCODED = {"enable_mm_embeds": True, **SMALL}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    yield make("llava", tmp_path_factory.mktemp("llava"))


def rows(made: Made, picture: Any) -> Any:
    with torch.inference_mode():
        found = made.model.get_image_features(made.inputs(made.token, [picture])["pixel_values"]).pooler_output
    return torch.cat(list(found)).reshape(-1, 64).numpy()


def test_rows_are_read_as_the_image_that_they_are_of(made: Made) -> None:
    llm, text = LLM(str(made.folder), **ENCODED), f"a {made.token} b {made.token} c"
    want = wanted(made, (text, [ONE, TWO]))
    one, two = rows(made, ONE), rows(made, TWO)
    given: list[Any] = [[one, torch.from_numpy(two)], [{"image_embeds": one[None]}, {"image_embeds": two}], [one, TWO]]
    prompts = [prompt(text, each) for each in given]
    assert tokens(llm, prompts) == [want] * 3
    assert tokens(llm, prompts) == [want] * 3, "found in the cache"
    assert tokens(llm, [prompt(text, [one, one])])[0] == wanted(made, (text, [ONE, ONE])) != want
    part = {"type": "image_embeds", "image_embeds": base64.b64encode(save({"x": one})).decode()}
    [found] = llm.chat([{"role": "user", "content": [part]}], replace(GREEDY), use_tqdm=False, chat_template=TEMPLATE)
    assert list(found.outputs[0].token_ids) == wanted(made, (made.token, [ONE]))
    llm.close()


def test_rows_of_another_shape_or_none_wanted_are_refused(made: Made) -> None:
    llm = LLM(str(made.folder), **ENCODED)
    one = rows(made, ONE)
    for wrong, why in ((one[:, :32], r"shape \[16, 32\], and must have \[1 to 65536 rows, 64\]"),
                       (one * np.nan, "NaN or infinite")):  # fmt: skip
        with pytest.raises(ValueError, match=why):
            tokens(llm, [prompt(made.token, [wrong])])
    llm.close()
    plain = LLM(str(made.folder), **SMALL)
    with pytest.raises(ValueError, match="enable-mm-embeds"):
        tokens(plain, [prompt(made.token, [one])])
    plain.close()


def test_a_model_whose_positions_need_the_image_takes_no_rows(tmp_path: Any) -> None:
    made = make("qwen2_vl", tmp_path)
    llm = LLM(str(made.folder), **ENCODED)
    with pytest.raises(ValueError, match="this model takes none"):
        tokens(llm, [prompt(made.token, [np.zeros((4, 64), np.float32)])])
    llm.close()
