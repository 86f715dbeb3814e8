"""Embeddings of prompts with pictures: transformers' numbers, whatever runs beside them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
import transformers

from quintet import LLM
from quintet.media.load_processor import _processor
from quintet.pooling_params import PoolingParams
from quintet_tools.checkpoints.random_weights import scatter
from quintet_tools.checkpoints.tiny import hushed
from tests.e2e.media.test_chats import TEMPLATE, TEXT, content, url
from tests.e2e.media.test_pictures import ONE, cases, prompt
from tests.helpers.media.configs import TEXT as TINY
from tests.helpers.media.wrappers import WRAPPERS, Made, make, media_model, save_processor
from tests.helpers.servers.serving import Server

SMALL = {"dtype": "float32", "max_model_len": 512, "kv_cache_memory_bytes": "16M", "runner": "pooling",
         "pooler_config": {"pooling_type": "LAST"}}  # fmt: skip
KINDS = {  # wrapper -> its class; E5-V and DSE embed pictures by the second and the third
    "llava": "LlavaForConditionalGeneration",
    "llava_next": "LlavaNextForConditionalGeneration",
    "qwen2_vl": "Qwen2VLForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
}
SLOW = ("qwen3_vl",)


@pytest.fixture(
    scope="module", params=[pytest.param(kind, marks=[pytest.mark.slow] * (kind in SLOW)) for kind in KINDS]
)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    built = make(request.param, tmp_path_factory.mktemp(request.param))
    assert built.model.config.architectures == [KINDS[request.param]]
    yield built


def wanted(made: Made, case: tuple[str, list[Any]]) -> Any:
    """Returns the last token's hidden states, of length 1."""
    with torch.inference_mode():
        states = made.model.model(**made.inputs(*case), use_cache=False).last_hidden_state[0, -1]
    return (states / states.norm()).numpy()


def embeddings(llm: LLM, prompts: list[dict[str, Any]]) -> list[list[float]]:
    return [each.outputs.embedding for each in llm.embed(prompts, use_tqdm=False)]


def test_embeddings_are_those_of_transformers_alone_together_and_from_the_cache(made: Made) -> None:
    llm = LLM(str(made.folder), **SMALL, use_tqdm=False)
    prompts = [prompt(*case) for case in cases(made).values()]
    found = embeddings(llm, prompts)
    for case, numbers in zip(cases(made).values(), found, strict=True):
        np.testing.assert_allclose(numbers, wanted(made, case), atol=2e-6)
    assert found == [embeddings(llm, [each])[0] for each in prompts], "each begins with pages of before"
    llm.reset_prefix_cache()
    assert found == [embeddings(llm, [each])[0] for each in prompts]
    with pytest.raises(ValueError, match="would cut a prompt with media"):
        llm.embed(prompts[1], pooling_params=PoolingParams(truncate_prompt_tokens=4), use_tqdm=False)
    llm.close()


LATE = {"colqwen2": "qwen2_vl", "colpali": "paligemma"}  # models for late interaction -> the wrapper in each


@pytest.mark.parametrize("kind", LATE)
def test_vectors_of_queries_and_pictures_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    wrapper = WRAPPERS[LATE[kind]]
    inner = {"model_type": LATE[kind], "text_config": {**TINY, **wrapper.text}, "vision_config": wrapper.vision,
             wrapper.token_entry: 258, "tie_word_embeddings": False, **wrapper.entries}  # fmt: skip
    with torch.random.fork_rng(), hushed():
        torch.manual_seed(0)
        config = transformers.CONFIG_MAPPING[kind](vlm_config=inner, embedding_dim=16)
        model = getattr(transformers, f"{type(config).__name__.removesuffix('Config')}ForRetrieval")(config)
        scatter(model.float().eval())
        model.save_pretrained(tmp_path)
    save_processor(LATE[kind], tmp_path)
    made = Made(tmp_path, model, _processor(media_model(LATE[kind], tmp_path)), wrapper)
    names = ("none", "one", "odd")  # transformers takes one picture of a text
    llm = LLM(str(tmp_path), **{**SMALL, "runner": "auto", "pooler_config": None}, use_tqdm=False)
    prompts = [prompt(*cases(made)[name]) for name in names]
    found = [each.outputs.data for each in llm.encode(prompts, pooling_task="token_embed", use_tqdm=False)]
    for name, rows in zip(names, found, strict=True):
        given = made.inputs(*cases(made)[name])
        given = {key: given[key] for key in ("input_ids", "attention_mask", "pixel_values", "image_grid_thw") if
                 key in given}  # fmt: skip
        if "image_grid_thw" in given:
            given["pixel_values"] = given["pixel_values"][None]
        with torch.inference_mode():
            want = model(**given).embeddings[0].numpy()
        np.testing.assert_allclose(rows, want, atol=3e-6)
    alone = [llm.encode(each, pooling_task="token_embed", use_tqdm=False)[0].outputs.data for each in prompts]
    assert all(np.array_equal(one, other) for one, other in zip(alone, found, strict=True))
    llm.close()


@pytest.mark.slow
def test_a_server_embeds_messages_with_pictures(tmp_path: Path) -> None:
    made = make("llava", tmp_path / "llava")
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    flags = ("--dtype", "float32", "--max-model-len", "512", "--kv-cache-memory-bytes", "16M", "--device", "cpu",
             "--runner", "pooling", "--chat-template", str(tmp_path / "template.jinja"))  # fmt: skip
    messages = [{"role": "user", "content": content({"type": "image_url", "image_url": {"url": url()}})}]
    with Server(str(made.folder), *flags) as server:
        answer = httpx.post(f"{server.url}/v1/embeddings", json={"messages": messages}, timeout=300)
        assert answer.status_code == 200, answer.text
        text = httpx.post(f"{server.url}/v1/embeddings", json={"input": "".join(TEXT)}, timeout=300)
    want = wanted(made, (f"{TEXT[0]}<image>{TEXT[1]}", [ONE]))
    np.testing.assert_allclose(answer.json()["data"][0]["embedding"], want, atol=2e-6)
    assert text.status_code == 200 and text.json()["data"][0]["embedding"] != answer.json()["data"][0]["embedding"]
