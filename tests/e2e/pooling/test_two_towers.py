"""CLIP, SigLIP and SigLIP 2: embeddings of texts and of images are transformers' features, of length 1."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
import transformers
from tokenizers.processors import TemplateProcessing
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES

from quintet import LLM
from quintet_tools.checkpoints.random_weights import scatter
from quintet_tools.checkpoints.tiny import hushed
from tests.e2e.media.test_chats import url
from tests.e2e.media.test_pictures import ONE
from tests.helpers.media.configs import Wrapper
from tests.helpers.media.wrappers import picture, tokenizer
from tests.helpers.servers.serving import Server

pytest.importorskip("PIL")

PLACES = 24
TEXT = {"vocab_size": 320, "hidden_size": 48, "intermediate_size": 77, "num_hidden_layers": 2, "num_attention_heads": 4,
        "max_position_embeddings": PLACES, "bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 257}  # fmt: skip
VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
FIXED = {**VISION, "image_size": 28, "patch_size": 7}
SIZE = {"size": {"height": 28, "width": 28}}
# model_type -> config of text, config of vision, entries of the whole, settings of the image processor
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "clip": ({}, FIXED, {"projection_dim": 48}, {"size": {"shortest_edge": 28}, "crop_size": SIZE["size"]}),
    "siglip": ({"projection_size": 48}, {**FIXED, "hidden_size": 48}, {}, SIZE),
    "siglip2": (
        {"projection_size": 48}, {**VISION, "hidden_size": 48, "num_patches": 16, "patch_size": 7}, {},
        {"patch_size": 7, "max_num_patches": 16},
    ),
}  # fmt: skip
PICTURES = [picture(40, 56, 1), picture(31, 90, 2), picture(28, 28, 3)]
TEXTS = [[256, 5, 9, 31, 257], [256, 8, 8, 77, 100, 101, 3, 257]]
SETTINGS = {"dtype": "float32", "kv_cache_memory_bytes": "16M", "use_tqdm": False,
            "skip_tokenizer_init": True}  # fmt: skip


@dataclass
class Towers:
    """A checkpoint, and transformers' model and image processor of it."""

    kind: str
    folder: Path
    model: Any
    process: Any

    def of_text(self, ids: list[int]) -> Any:
        """Returns the features of a text, of length 1: a text of SigLIP is filled up."""
        ids = ids + [257] * (PLACES - len(ids)) * (self.kind != "clip")
        with torch.inference_mode():
            return unit(self.model.get_text_features(input_ids=torch.tensor([ids])))

    def of_image(self, image: Any) -> Any:
        """Returns the features of an image, of length 1."""
        from PIL import Image

        with torch.inference_mode():
            return unit(self.model.get_image_features(**self.process(Image.fromarray(image), return_tensors="pt")))


def unit(found: Any) -> Any:
    row = getattr(found, "pooler_output", found)[0]
    return (row / row.norm()).numpy()


@pytest.fixture(scope="module", params=KINDS)
def towers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Towers:
    kind, folder = request.param, tmp_path_factory.mktemp(request.param)
    text, vision, entries, settings = KINDS[kind]
    with torch.random.fork_rng(), hushed():
        torch.manual_seed(0)
        config = transformers.CONFIG_MAPPING[kind](text_config={**TEXT, **text}, vision_config=vision, **entries)
        model = transformers.AutoModel.from_config(config).float().eval()
        scatter(model)
        model.save_pretrained(folder)
    process = getattr(transformers, IMAGE_PROCESSOR_MAPPING_NAMES[kind]["pil"])(**settings)
    process.save_pretrained(folder)
    return Towers(kind, folder, model, process)


@pytest.fixture
def llm(towers: Towers) -> Iterator[LLM]:
    llm = LLM(str(towers.folder), **SETTINGS)
    yield llm
    llm.close()


def image_prompt(image: Any) -> dict[str, Any]:
    return {"prompt": "", "multi_modal_data": {"image": image}}


def embedded(llm: LLM, prompts: list[Any]) -> list[list[float]]:
    return [each.outputs.embedding for each in llm.embed(prompts, use_tqdm=False)]


def test_texts_and_images_are_embedded_as_transformers_does(towers: Towers, llm: LLM) -> None:
    prompts = [{"prompt_token_ids": TEXTS[0]}, image_prompt(PICTURES[0]), image_prompt(PICTURES[1]),
               {"prompt_token_ids": TEXTS[1]}, image_prompt(PICTURES[2])]  # fmt: skip
    wanted = [towers.of_text(TEXTS[0]), *map(towers.of_image, PICTURES[:2]), towers.of_text(TEXTS[1]),
              towers.of_image(PICTURES[2])]  # fmt: skip
    found = embedded(llm, prompts)
    np.testing.assert_allclose(found, wanted, atol=3e-6)
    assert [embedded(llm, [each])[0] for each in prompts] == found, "alone"
    (output,) = llm.embed([image_prompt(PICTURES[0])], use_tqdm=False)
    assert len(output.prompt_token_ids) == 1


def test_a_text_and_an_image_together_are_refused(towers: Towers, llm: LLM) -> None:
    for prompt in (
        {"prompt_token_ids": TEXTS[0], "multi_modal_data": {"image": PICTURES[0]}},
        {"prompt": "", "multi_modal_data": {"image": PICTURES[:2]}},
    ):
        with pytest.raises(ValueError, match="a text, or one image with an empty text"):
            llm.embed(prompt, use_tqdm=False)
    with pytest.raises(ValueError, match=f"max_model_len is {PLACES}"):
        llm.embed({"prompt_token_ids": [1] * (PLACES + 1)}, use_tqdm=False)


@pytest.mark.slow  # a server starts
@pytest.mark.parametrize("towers", ["clip"], indirect=True)
def test_a_server_embeds_images_of_messages(towers: Towers) -> None:
    words = tokenizer(Wrapper({}, specials=()))
    words.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A </s>", pair=None, special_tokens=[("<s>", 256), ("</s>", 257)]
    )
    words.backend_tokenizer.save(str(towers.folder / "tokenizer.json"))
    entries = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (towers.folder / "tokenizer_config.json").write_text(json.dumps(entries))
    flags = ("--dtype", "float32", "--kv-cache-memory-bytes", "16M", "--device", "cpu")
    image = [{"type": "image_url", "image_url": {"url": url()}}]
    with Server(str(towers.folder), *flags) as server:

        def embedding(content: Any) -> Any:
            body = {"messages": [{"role": "user", "content": content}]}
            return httpx.post(f"{server.url}/v1/embeddings", json=body, timeout=300)

        seen, both = embedding(image), embedding([*image, {"type": "text", "text": "a cat"}])
        read = embedding("a cat")
        text = httpx.post(f"{server.url}/v1/embeddings", json={"input": "a cat"}, timeout=300)
    np.testing.assert_allclose(seen.json()["data"][0]["embedding"], towers.of_image(ONE), atol=3e-6)
    assert both.status_code == 400 and "a text, or one image with an empty text" in both.text
    assert read.json()["data"] == text.json()["data"] != seen.json()["data"]
    assert read.json()["usage"] == text.json()["usage"]
