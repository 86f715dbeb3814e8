"""Placed weights that are kept for the next start: the same model, sooner; and what is not used."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from quintet import LLM, SamplingParams
from quintet.conformance.harness.worker_runner import random_prompts
from quintet.model_loader import weights_cache
from quintet.platforms.cpu.platform import CPU
from quintet_tools.checkpoints.tiny import PLAIN, Tiny, make

PLACED: list[str] = []


@pytest.fixture(autouse=True)
def counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of the weights that are placed."""
    PLACED.clear()
    place = CPU.place

    def counting(self: CPU, weight: Any, *rest: Any, **more: Any) -> Any:
        PLACED.append(weight.name)
        return place(self, weight, *rest, **more)

    monkeypatch.setattr(CPU, "place", counting)


def tokens(folder: Path, cache: Path, **settings: Any) -> list[int]:
    small = {"dtype": "bfloat16", "kv_cache_memory_bytes": "16M", "max_model_len": 64, "use_tqdm": False, **settings}
    llm = LLM(str(folder), device="cpu", skip_tokenizer_init=True, weights_cache=cache, **small)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
    (output,) = llm.generate([{"prompt_token_ids": random_prompts(3, (20,), 101)[0]}], params, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 12
    return list(output.outputs[0].token_ids)


def model(**more: Any) -> Tiny:
    return make(
        "llama",
        {
            **PLAIN,
            "hidden_size": 64,
            "intermediate_size": 128,
            "head_dim": 16,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            **more,
        },
    )


@pytest.mark.parametrize("settings", [{}, {"quantization": "int8"}, {"quantization": "w4a8"}])
@pytest.mark.parametrize("tied", [False, True])
def test_a_second_start_places_nothing(settings: dict[str, Any], tied: bool, tmp_path: Path) -> None:
    tiny = model(tie_word_embeddings=tied)
    first = tokens(tiny.folder, tmp_path / "kept", **settings)
    assert PLACED and len(list((tmp_path / "kept").iterdir())) == 1
    PLACED.clear()
    assert tokens(tiny.folder, tmp_path / "kept", **settings) == first
    assert not PLACED


def test_a_tied_table_is_kept_once(tmp_path: Path) -> None:
    sizes = []
    for tied in (True, False):
        tokens(model(tie_word_embeddings=tied, vocab_size=512).folder, tmp_path / str(tied))
        sizes += [each.stat().st_size for each in (tmp_path / str(tied)).iterdir()]
    assert sizes[0] + 512 * 64 * 2 <= sizes[1]


@pytest.mark.parametrize("change", ["settings", "weights", "times", "extension", "rope", "length"])
def test_what_was_kept_for_another_start_is_not_used(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model().folder, folder)
    tokens(folder, tmp_path / "kept")
    PLACED.clear()
    settings: dict[str, Any] = {
        "settings": {"quantization": "int8"},
        "rope": {"hf_overrides": {"rope_theta": 10.0}},
        "length": {"max_model_len": 32},
    }.get(change, {})
    if change == "weights":
        tensors = load_file(folder / "model.safetensors")
        save_file({name: each + 0.01 for name, each in tensors.items()}, folder / "model.safetensors")
    elif change == "times":
        os.utime(folder / "model.safetensors", ns=(1, 1))
    elif change == "extension":
        monkeypatch.setattr("quintet.platforms.cpu.platform._layout_key", lambda: "of tomorrow")
    tokens(folder, tmp_path / "kept", **settings)
    assert PLACED and len(list((tmp_path / "kept").iterdir())) == 2


@pytest.mark.parametrize("damage", ["empty", "cut", "header", "long", "shape", "name"])
def test_a_damaged_file_is_made_anew(damage: str, tmp_path: Path) -> None:
    tiny = model()
    want = tokens(tiny.folder, tmp_path / "kept")
    (file,) = (tmp_path / "kept").iterdir()
    whole = file.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    header = whole[8 : 8 + length]
    file.write_bytes(
        {
            "empty": b"",
            "cut": whole[:-1],
            "header": whole[:8] + b"[" * length + whole[8 + length :],
            "long": (2**63 - 1).to_bytes(8, "little") + whole[8:],
            "name": whole[:8] + header.replace(b"model.layers.0", b"model.layers.7", 1) + whole[8 + length :],
            "shape": whole[:8] + header.replace(b"[101, 64]", b"[999, 64]", 1) + whole[8 + length :],
        }[damage]
    )
    if damage in ("shape", "name"):
        assert file.read_bytes() != whole
    PLACED.clear()
    assert tokens(tiny.folder, tmp_path / "kept") == want
    assert PLACED and file.read_bytes() == whole


def test_a_folder_that_others_can_write_to_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tiny, kept = model(), tmp_path / "kept"
    tokens(tiny.folder, kept)
    kept.chmod(0o777)
    PLACED.clear()
    tokens(tiny.folder, kept)
    assert PLACED and "can be written to by others" in caplog.text


def test_no_room_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(weights_cache.shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(1, 1, 0))  # type: ignore[attr-defined]
    tokens(model().folder, tmp_path / "kept")
    assert not list((tmp_path / "kept").iterdir()) and "0.0 GiB left" in caplog.text
