"""Placed weights that are kept for the next start: the same model, sooner; and what is not used."""

import fcntl
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quintet import LLM, SamplingParams
from quintet.config.cache_dir import cache_folder
from quintet.conformance.harness.worker_runner import random_prompts
from quintet.engine.executor.model_part import ModelSizes
from quintet.engine.executor.worker import MemoryRoom, Worker
from quintet.hub.model_removal import plan_removal
from quintet.interface.types import RankInfo
from quintet.model_loader import loader, weights_cache
from quintet.model_loader.loader import ParameterLoad
from quintet.model_loader.weights_cache import CacheEntry
from quintet.platforms.cpu.platform import CPU, _layout_key
from quintet_tools.checkpoints.tiny import PLAIN, Tiny, make
from tests.helpers.releases import need_model_type

GGUF = Path(__file__).parents[2] / "data/quantized/gguf/llama.gguf"
PLACED: list[str] = []


@pytest.fixture(autouse=True)
def counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of the weights that are placed, without constants, which each start computes."""
    PLACED.clear()
    place, place_constants = CPU.place, loader.place_constants

    def counting(self: CPU, weight: Any, *rest: Any, **more: Any) -> Any:
        PLACED.append(weight.name)
        return place(self, weight, *rest, **more)

    def uncounted(*args: Any) -> None:
        count = len(PLACED)
        place_constants(*args)
        del PLACED[count:]

    monkeypatch.setattr(CPU, "place", counting)
    monkeypatch.setattr(loader, "place_constants", uncounted)


def tokens(folder: Path, cache: Path | str | None, **settings: Any) -> list[int]:
    small = {"dtype": "bfloat16", "kv_cache_memory_bytes": "16M", "max_model_len": 64, "use_tqdm": False, **settings}
    llm = LLM(str(folder), device="cpu", skip_tokenizer_init=True, weights_cache=cache, **small)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
    (output,) = llm.generate([{"prompt_token_ids": random_prompts(3, (20,), 64)[0]}], params, use_tqdm=False)
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


@pytest.mark.parametrize("changed", [{"hf_overrides": {"rope_theta": 10.0}}, {"max_model_len": 32}])
def test_weights_are_those_of_starts_with_another_context_or_rotation(changed: dict[str, Any], tmp_path: Path) -> None:
    folder = model().folder
    tokens(folder, tmp_path / "kept")
    known = tokens(folder, None, **changed)
    PLACED.clear()
    assert tokens(folder, tmp_path / "kept", **changed) == known
    assert not PLACED and len(list((tmp_path / "kept").iterdir())) == 1


@pytest.mark.parametrize("change", ["settings", "weights", "times", "extension", "sources"])
def test_what_was_kept_for_another_start_is_not_used(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model().folder, folder)
    tokens(folder, tmp_path / "kept")
    PLACED.clear()
    settings: dict[str, Any] = {
        "settings": {"quantization": "int8"},
    }.get(change, {})
    if change == "weights":
        tensors = load_file(folder / "model.safetensors")
        save_file({name: each + 0.01 for name, each in tensors.items()}, folder / "model.safetensors")
    elif change == "times":
        os.utime(folder / "model.safetensors", ns=(1, 1))
    elif change == "extension":
        monkeypatch.setattr("quintet.platforms.cpu.platform._layout_key", lambda: "of tomorrow")
    elif change == "sources":
        monkeypatch.setattr("quintet.platforms.cpu.platform.PACKING", ["gguf"])
        _layout_key.cache_clear()
    tokens(folder, tmp_path / "kept", **settings)
    _layout_key.cache_clear()
    assert PLACED and len(list((tmp_path / "kept").iterdir())) == 2


@pytest.mark.parametrize("damage", ["empty", "cut", "header", "long", "shape", "name", "norm"])
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
            "norm": whole[:8] + header.replace(b"[64]", b"[32]", 1) + whole[8 + length :],
            "shape": whole[:8] + header.replace(b"[101, 64]", b"[999, 64]", 1) + whole[8 + length :],
        }[damage]
    )
    if damage in ("shape", "name", "norm"):
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


# ----------------------------------------------------------------------------------------------- the automatic cache


@pytest.fixture
def gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A GGUF file, all of which are large enough here, and a user's cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(weights_cache, "MIN_AUTO_BYTES", 1)
    return Path(shutil.copy(GGUF, tmp_path / "model.gguf"))


def kept_files() -> list[Path]:
    for thread in threading.enumerate():
        if isinstance(thread, weights_cache.StoreThread):
            thread.close()
    return list(cache_folder("weights").glob("*"))


def test_packed_weights_of_a_gguf_file_are_kept_by_default(gguf: Path) -> None:
    first = tokens(gguf, "auto")
    assert PLACED and len(kept_files()) == 1
    PLACED.clear()
    assert tokens(gguf, "auto") == first
    assert not PLACED and len(kept_files()) == 1


@pytest.mark.parametrize(
    "settings",
    [
        {"weights_cache": "none"},
        {"weights_cache": None},
        {"small": True},
        {"disk": 1},
        {"kv_cache_dtype": "fp8", "calculate_kv_scales": True},
    ],
)
def test_none_are_kept(settings: dict[str, Any], gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the setting says so, of a small file, where they would take too much of the disk, and where they change."""
    if settings.pop("small", False):
        monkeypatch.setattr(weights_cache, "MIN_AUTO_BYTES", gguf.stat().st_size + 1)
    if settings.pop("disk", False):
        monkeypatch.setattr(weights_cache, "AUTO_SHARE", 0.0)
    tokens(gguf, settings.pop("weights_cache", "auto"), **settings)
    assert PLACED and not kept_files()


def test_a_changed_file_is_packed_anew(gguf: Path) -> None:
    tokens(gguf, "auto")
    (before,) = kept_files()
    os.utime(gguf, ns=(1, 1))
    PLACED.clear()
    tokens(gguf, "auto")
    assert PLACED and len(kept_files()) == 2 and before.exists()


def test_weights_that_were_not_used_for_longest_go_first(tmp_path: Path) -> None:
    for age, name in enumerate(("new", "used", "old", "unfinished-old", "unfinished-new")):
        file = tmp_path / f"{name}.weights"
        file.write_bytes(bytes(10))
        os.utime(file, (1000 - age, 1000 - age))
    with (tmp_path / "unfinished-new.weights").open("r+b") as writer:
        fcntl.flock(writer, fcntl.LOCK_EX)
        weights_cache.prune(tmp_path, 25)
        assert sorted(each.stem for each in tmp_path.iterdir()) == ["new", "unfinished-new", "used"]
    weights_cache.prune(tmp_path, 25)  # its writer has ended
    assert sorted(each.stem for each in tmp_path.iterdir()) == ["new", "used"]


def test_unfinished_files_are_removed_before_the_disk_is_measured(
    gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens(gguf, "auto")
    (kept,) = kept_files()
    unfinished = kept.with_name("unfinished-x.weights")
    kept.rename(unfinished)
    usage = shutil.disk_usage(tmp_path)

    def full(_: Path) -> Any:
        return usage._replace(free=0) if unfinished.exists() else usage

    monkeypatch.setattr(weights_cache.shutil, "disk_usage", full)  # type: ignore[attr-defined]
    tokens(gguf, "auto")
    assert kept_files() == [kept]


def test_weights_are_stored_before_they_are_overwritten(gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reload waits for the thread that stores them."""
    release, order, write = threading.Event(), list[str](), weights_cache._write
    overwrite = ParameterLoad.overwrite

    def slow(*content: Any) -> None:
        release.wait()
        write(*content)
        order.append("stored")

    def noted(self: ParameterLoad, platform: Any) -> None:
        order.append("overwritten")
        overwrite(self, platform)

    monkeypatch.setattr(weights_cache, "_write", slow)
    monkeypatch.setattr(ParameterLoad, "overwrite", noted)
    with LLM(str(gguf), device="cpu", skip_tokenizer_init=True, max_model_len=64, use_tqdm=False) as llm:
        reload = threading.Thread(target=llm.reload_weights)
        reload.start()
        assert not order
        release.set()
        reload.join()
    assert order == ["stored", "overwritten"]


def test_ctrl_c_at_the_end_of_a_command_skips_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown, disk_usage = list[str](), shutil.disk_usage

    def interrupt(text: str) -> None:
        shown.append(text)
        raise KeyboardInterrupt

    def wait_for_interrupt(folder: Path) -> Any:
        threading.current_thread()._cancelled.wait()  # type: ignore[attr-defined]
        return disk_usage(folder)

    worker = Worker(CPU(), model().config, ModelSizes(torch.float32, 16, 64), RankInfo())
    worker.load(model().folder, MemoryRoom(4), (), progress=False)
    monkeypatch.setattr(weights_cache, "UNNOTICED", 0.0)
    monkeypatch.setattr(weights_cache, "print_stderr", interrupt)
    monkeypatch.setattr(weights_cache.shutil, "disk_usage", wait_for_interrupt)  # type: ignore[attr-defined]
    thread = weights_cache.WeightsCache(tmp_path / "kept" / "x.weights", auto=True).store(worker.model)
    assert thread is not None
    thread.close()
    assert shown == ["keeping packed weights for the next start; Ctrl-C skips it"]
    assert list((tmp_path / "kept").iterdir()) == []


def test_an_automatic_file_is_written_behind_the_first_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_cache, "DELAY", threading.TIMEOUT_MAX)
    cache = weights_cache.WeightsCache(tmp_path / "kept" / "x.weights", auto=True)
    thread = cache.store(torch.nn.Linear(4, 4))
    assert thread is not None and not cache.file.exists()
    thread.close()
    assert cache.file.exists()


def test_packed_weights_are_removed_with_their_checkpoint(gguf: Path, tmp_path: Path) -> None:
    other = Path(shutil.copy(gguf, tmp_path / "other.gguf"))
    for file in (gguf, other):
        tokens(file, "auto")
        assert kept_files()
    assert len(kept_files()) == 2
    plan_removal(str(gguf), [str(tmp_path)], str(tmp_path / "hub")).run()
    (kept,) = kept_files()
    tokens(other, "auto")
    assert kept_files() == [kept] and not gguf.exists()


# model types whose modules have buffers, in checkpoints or computed
BUFFERED: dict[str, dict[str, Any]] = {
    "ctrl": {},
    "gemma4_text": {"tie_word_embeddings": True, "head_dim": 8},  # a factor of each layer
    "minimax_m2": {"num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 8},  # a bias of each router
}


def placed_tensors(worker: Worker) -> dict[str, torch.Tensor]:
    """Copies of all parameters and buffers."""
    model = worker.model
    return {name: each.clone() for name, each in (*model.named_parameters(), *model.named_buffers())}


@pytest.mark.parametrize("family", BUFFERED)
def test_buffers_of_the_transformers_backend_are_kept_too(family: str, tmp_path: Path) -> None:
    need_model_type(family)
    tiny = make(family, {**PLAIN, "num_hidden_layers": 2, **BUFFERED[family]})
    entry = CacheEntry(tmp_path / "kept", "")
    sizes = ModelSizes(torch.float32, 16, 64, transformers_backend=True, weights_cache=entry)
    first, second = (Worker(CPU(), tiny.config, sizes, RankInfo()) for _ in range(2))
    first.load(tiny.folder, MemoryRoom(4, 0), (), progress=False)
    want = placed_tensors(first)
    PLACED.clear()
    second.load(tiny.folder, MemoryRoom(4, 0), (), progress=False)
    read = placed_tensors(second)
    second.sleep(2)
    second.wake()
    assert not PLACED and any(name in want for name, _ in first.model.named_buffers())
    for found in (read, placed_tensors(second)):
        assert found.keys() == want.keys()
        assert [name for name, each in want.items() if not torch.equal(found[name], each)] == []
