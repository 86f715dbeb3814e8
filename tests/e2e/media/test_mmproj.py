"""Pictures of GGUF models with their encoders (mmproj): transformers' tokens of the model that both are made of."""

import logging
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quintet import LLM, SamplingParams
from tests.helpers.media import wrappers
from tests.helpers.media.mmproj import MODELS, write_mmproj, write_text
from tests.helpers.media.wrappers import Made, make, picture, picture_prompts

pytest.importorskip("PIL")

COUNT = 6
GREEDY = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True)
SMALL = {"dtype": "float32", "max_model_len": 1024, "kv_cache_memory_bytes": "16M", "use_tqdm": False}
WIDE = picture(97, 130, 3)


QUICK = ("gemma3", "qwen2.5vl_merger", "idefics3")
KINDS = [pytest.param(kind, marks=() if kind in QUICK else pytest.mark.slow) for kind in MODELS]


def written(kind: str, factory: pytest.TempPathFactory) -> tuple[Made, Path]:
    """Returns a model, and the folder with its two files."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(wrappers.WRAPPERS, kind, MODELS[kind])
        found = make(kind, factory.mktemp("made"))
    files = factory.mktemp("gguf")
    write_text(found, files / "model-F32.gguf")
    write_mmproj(found, files / "mmproj-F32.gguf", kind)
    return found, files


@pytest.fixture(scope="module", params=KINDS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Made, Path]:
    return written(request.param, tmp_path_factory)


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> tuple[Made, Path]:
    return written("gemma3", tmp_path_factory)


def cases(made: Made) -> dict[str, tuple[str, list[Any]]]:
    return {**picture_prompts(made), "wide": (f"so {made.token} wide", [WIDE])}


def prompt(text: str, pictures: list[Any]) -> dict[str, Any]:
    return {"prompt": text, **({"multi_modal_data": {"image": pictures}} if pictures else {})}


def tokens(llm: LLM, prompts: list[dict[str, Any]]) -> list[list[int]]:
    return [list(each.outputs[0].token_ids) for each in llm.generate(prompts, GREEDY, use_tqdm=False)]


def test_tokens_are_those_of_transformers(made: tuple[Made, Path]) -> None:
    original, files = made
    llm = LLM(str(files / "model-F32.gguf"), **SMALL)
    wanted = [original.greedy(*case, COUNT) for case in cases(original).values()]
    for case in cases(original).values():
        (output,) = llm.generate(prompt(*case), GREEDY, use_tqdm=False)
        assert output.prompt_token_ids == original.inputs(*case)["input_ids"][0].tolist()
    assert tokens(llm, [prompt(*case) for case in cases(original).values()]) == wanted


def test_the_file_beside_the_model_is_found_and_described(
    gemma: tuple[Made, Path], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        LLM(str(gemma[1]), **SMALL)  # the folder: the encoder is no second model
    assert "mmproj-F32.gguf, found beside the model, as gemma3" in caplog.text


def test_a_file_is_given_and_others_are_left_out(gemma: tuple[Made, Path], tmp_path: Path) -> None:
    original, files = gemma
    case = cases(original)["two"]
    alone = shutil.copy(files / "model-F32.gguf", tmp_path / "model-F32.gguf")
    llm = LLM(str(alone), mmproj=str(files / "mmproj-F32.gguf"), **SMALL)
    assert tokens(llm, [prompt(*case)]) == [original.greedy(*case, COUNT)]
    for settings in ({"limit_mm_per_prompt": {"image": 0}}, {"language_model_only": True}):
        text = LLM(str(files / "model-F32.gguf"), **SMALL, **settings)
        assert text._client.engine_plan.sizes.tower is None
        with pytest.raises(ValueError, match="text alone"):
            tokens(text, [prompt(*case)])


def test_weights_are_read_again(gemma: tuple[Made, Path]) -> None:
    original, files = gemma
    llm, case = LLM(str(files / "model-F32.gguf"), **SMALL), cases(original)["one"]
    want = tokens(llm, [prompt(*case)])
    llm.sleep(level=2)
    llm.wake_up()
    assert tokens(llm, [prompt(*case)]) == want
    llm.reload_weights(str(files / "model-F32.gguf"))
    assert tokens(llm, [prompt(*case)]) == want


OTHERS = {
    "another projector": ({"clip.projector_type": "ldp"}, "projector type 'ldp' are not served; those of gemma3,"),
    "no mean": ({"image_mean": None}, "clip.vision.image_mean is not three numbers"),
    "many layers": ({"block_count": 2**31}, "metadata are of 2147483648 layers"),
    "a huge image": ({"image_size": 2**31}, "images of 2147483648 pixels"),
    "another image": ({"image_size": 56}, "position_embedding.weight is .16, 32., not .64, 32."),
    "more layers": ({"block_count": 3}, "lacks model.vision_tower.encoder.layers.2"),
    "fewer layers": ({"block_count": 1}, "holds model.vision_tower.encoder.layers.1.* no place for"),
    "no heads": ({"attention.head_count": 5}, "rows of 32 are not of 5 heads"),
    "another patch": ({"patch_size": 14}, "v.patch_embd.weight is .32, 3, 7, 7., not .32, 3, 14, 14."),
    "odd pooling": ({"projector.scale_factor": 3}, "4 patches of a side are not taken 3 to one"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_damaged_file_is_one_clear_error(gemma: tuple[Made, Path], tmp_path: Path, name: str) -> None:
    original, files = gemma
    entries, message = OTHERS[name]
    bad = write_mmproj(original, tmp_path / "mmproj-bad.gguf", "gemma3", **entries)
    with pytest.raises(ValueError, match=message) as error:
        LLM(str(files / "model-F32.gguf"), mmproj=str(bad), **SMALL)
    assert "mmproj-bad.gguf" in str(error.value) and "\n" not in str(error.value)


def test_a_file_of_another_model_is_refused_or_passed_over(
    gemma: tuple[Made, Path], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, caplog: Any
) -> None:
    model = str(gemma[1] / "model-F32.gguf")
    other = written("idefics3", tmp_path_factory)[1] / "mmproj-F32.gguf"
    why = "no encoder for a text model of type 'gemma3_text': those of its projector are llama"
    with pytest.raises(ValueError, match=why):
        LLM(model, mmproj=str(other), **SMALL)
    shutil.copy(model, tmp_path)
    shutil.copy(other, tmp_path)
    with caplog.at_level(logging.INFO):
        llm = LLM(str(tmp_path), **SMALL)
    assert re.search(rf"images are not served, for the encoder beside .* {why}", caplog.text)
    assert tokens(llm, [prompt("Hello there", [])]) == [gemma[0].greedy("Hello there", [], COUNT)]
    with pytest.raises(ValueError, match="is of architecture 'gemma3', and no encoder of images"):
        LLM(model, mmproj=model, **SMALL)
    with pytest.raises(ValueError, match="and no language model"):
        LLM(str(other), **SMALL)
    with pytest.raises(ValueError, match="is for GGUF models"):
        LLM(str(gemma[0].folder), mmproj=str(other), **SMALL)
    with pytest.raises(FileNotFoundError, match="no file"):
        LLM(model, mmproj=str(tmp_path / "none.gguf"), **SMALL)


def test_rows_of_another_width_are_refused(gemma: tuple[Made, Path], tmp_path: Path) -> None:
    original, files = gemma
    narrow = write_mmproj(original, tmp_path / "mmproj-narrow.gguf", "gemma3", text_width=32)
    with pytest.raises(ValueError, match="makes rows of 32 numbers, and .* has tokens of 64"):
        LLM(str(files / "model-F32.gguf"), mmproj=str(narrow), **SMALL)


def test_a_vocabulary_without_the_token_is_refused(gemma: tuple[Made, Path], tmp_path: Path) -> None:
    original, files = gemma
    text = write_text(original, tmp_path / "model.gguf", renamed={"<end_of_image>": "<none>"})
    with pytest.raises(ValueError, match="has no token '<end_of_image>' in its vocabulary"):
        LLM(str(text), mmproj=str(files / "mmproj-F32.gguf"), **SMALL)


def test_blocks_of_encoders_are_those_of_their_layers_products(gemma: tuple[Made, Path], tmp_path: Path) -> None:
    from quintet.model_loader.gguf_weights import entries

    original, files = gemma
    wanted = dict(entries(files / "mmproj-F32.gguf"))
    half = dict(entries(write_mmproj(original, tmp_path / "half.gguf", "gemma3", np.float16)))
    blocks = dict(entries(write_mmproj(original, tmp_path / "q8.gguf", "gemma3", "Q8_0")))
    assert set(half) == set(blocks) == set(wanted)
    for name, each in wanted.items():
        of_product = re.search(r"\.layers\.\d+\..*(_proj|fc1)\.weight", name) is not None
        assert (blocks[name].dtype == torch.uint8) == of_product
        for found in (half[name], *([] if of_product else [blocks[name]])):
            assert found.shape == each.shape and found.dtype.is_floating_point
            assert (found.tensor().float() - each.tensor().float()).abs().max() < 0.02
