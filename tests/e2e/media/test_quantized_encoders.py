"""Encoders of media in 8 bits: rows near those of the floats."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quintet import LLM, SamplingParams
from quintet.layers.linear import ColumnParallelLinear
from quintet.media.items import MediaItem
from quintet.models.transformers.tower import MediaTower
from tests.helpers.media import wrappers
from tests.helpers.media.mmproj import MODELS, write_mmproj, write_text
from tests.helpers.media.wrappers import HEARING, SEEING, Made, make, picture, sound

pytest.importorskip("PIL")

FIRST = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
SMALL = {"dtype": "float32", "max_model_len": 1024, "kv_cache_memory_bytes": "16M", "use_tqdm": False}
QUICK = ("qwen2_5_vl", "idefics3")
KINDS = [pytest.param(kind, marks=() if kind in QUICK else pytest.mark.slow) for kind in (*SEEING, *HEARING)]


@pytest.fixture(scope="module", params=KINDS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    yield make(request.param, tmp_path_factory.mktemp(request.param))


def encoded(llm: LLM, text: str, media: dict[str, Any], patch: pytest.MonkeyPatch) -> tuple[list[Tensor], MediaTower]:
    """Returns the rows of all media of a prompt, and the tower that has made them."""
    found: list[Tensor] = []
    towers: list[MediaTower] = []
    encode = MediaTower.encode

    def kept(self: MediaTower, item: MediaItem) -> tuple[Tensor, ...]:
        rows = encode(self, item)
        found.extend(each.float() for each in rows)
        towers.append(self)
        return rows

    with patch.context() as patched:
        patched.setattr(MediaTower, "encode", kept)
        llm.generate({"prompt": text, "multi_modal_data": media}, FIRST, use_tqdm=False)
    return found, towers[0]


def alike(a: list[Tensor], b: list[Tensor]) -> float:
    """Returns the cosine between all numbers of rows of one model and of another."""
    return float(torch.nn.functional.cosine_similarity(torch.cat(a).flatten(), torch.cat(b).flatten(), 0))


def formats(tower: MediaTower) -> set[str]:
    return {each.format.kind for each in tower.modules() if isinstance(each, ColumnParallelLinear)}


def test_floats_become_8_bits_as_those_of_the_text_model(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    hears = not made.wrapper.vision
    media: dict[str, Any] = {"audio": sound(1.0)} if hears else {"image": [picture(40, 56, 1)]}
    here = made.token_of("audio") if hears else made.token
    settings = {**SMALL, "mm_processor_kwargs": made.wrapper.options}
    exact, tower = encoded(LLM(str(made.folder), **settings), here, media, monkeypatch)
    assert formats(tower) == {"plain"}
    for scheme in ("w8a8", "int4"):
        found, tower = encoded(LLM(str(made.folder), quantization=scheme, **settings), here, media, monkeypatch)
        assert "w8a8" in formats(tower) and 0.99 < alike(found, exact) < 1


def test_blocks_of_a_gguf_file_are_computed_as_they_are(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setitem(wrappers.WRAPPERS, "gemma3", MODELS["gemma3"])
        original = make("gemma3", tmp_path_factory.mktemp("made"))
    text = str(write_text(original, tmp_path / "model-F32.gguf"))
    rows: dict[str, list[Tensor]] = {}
    for form in ("float32", "Q8_0"):
        file = write_mmproj(original, tmp_path / f"mmproj-{form}.gguf", "gemma3", form)
        llm = LLM(text, mmproj=str(file), **SMALL)
        rows[form], tower = encoded(llm, original.token, {"image": [picture(40, 56, 1)]}, monkeypatch)
        assert formats(tower) == ({"plain"} if form == "float32" else {"plain", "w8a8"})
    assert 0.99 < alike(rows["Q8_0"], rows["float32"]) < 1
