"""Files of torch.save: read to the bit without torch.load, and whatever is no tensor in them is refused, never run."""

import collections
import json
import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from quintet.model_loader.np_cache import NpCache
from quintet.model_loader.torch_checkpoint import TorchFile
from quintet.model_loader.weight_files import WeightFiles
from quintet_tools.checkpoints.tiny import variant
from tests.helpers.platforms.engines import answers, engine

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool)


def saved(path: Path, content: Any, **how: Any) -> Path:
    torch.save(content, path / "x.bin", **how)
    return path / "x.bin"


def test_every_tensor_is_torchs_own_bit_for_bit(tmp_path: Path) -> None:
    whole = torch.arange(60.0).reshape(5, 12)
    tensors: dict[str, Any] = {str(dtype): torch.randint(0, 2, (3, 4)).to(dtype) for dtype in DTYPES}
    tensors |= {"turned": whole.t(), "part": whole[1:3, ::2], "whole": whole, "none": torch.empty(0, 3)}
    tensors |= {"scalar": torch.tensor(2.5), "parameter": torch.nn.Parameter(torch.ones(2)), "again": whole}
    for content in (tensors, collections.OrderedDict(tensors), torch.nn.Linear(3, 2).state_dict()):
        file = TorchFile(saved(tmp_path, content))
        theirs = torch.load(tmp_path / "x.bin", weights_only=True)
        assert file.keys() == list(theirs)
        for name, want in theirs.items():
            got, shape = file.get_tensor(name), file.get_slice(name)
            assert got.dtype == want.dtype == shape.get_dtype() and list(want.shape) == shape.get_shape()
            assert torch.equal(got, want)


class Runs:
    """What does harm when it is unpickled."""

    def __reduce__(self) -> Any:
        return (Path.touch, (Path("/tmp/quintet-was-run"),))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"a": Runs()}, r"its pickle calls pathlib\S*Path.touch, and quintet runs nothing|its pickle calls"),
        ({"a": torch.ones(1), "b": 3}, "it holds int as 'b', which is no tensor"),
        ([torch.ones(1)], "it holds list, and no tensors by name"),
        ({"a": {"b": torch.ones(1)}}, "it holds dict as 'a'"),
        ({1: torch.ones(1)}, "its pickle names an entry by a int, and tensors have names of text"),
        (torch.nn.Linear(2, 2), "its pickle"),
        ({"a": torch.ones(2).to_sparse()}, "its pickle calls torch"),
    ],
)
def test_what_is_no_tensor_is_refused_and_never_run(tmp_path: Path, content: Any, says: str) -> None:
    with pytest.raises(ValueError, match=f"x.bin is refused: {says}"):
        TorchFile(saved(tmp_path, content))
    assert not Path("/tmp/quintet-was-run").exists()


def rewritten(file: Path, change: Callable[[str, bytes], bytes], kind: int = zipfile.ZIP_STORED) -> Path:
    """The zip once more, with other contents."""
    with zipfile.ZipFile(file) as old:
        entries = {each: old.read(each) for each in old.namelist()}
    with zipfile.ZipFile(file, "w", kind) as new:
        for name, content in entries.items():
            new.writestr(name, change(name, content))
    return file


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda name, content: content[:-4] if "/data/" in name else content, "the numbers of 'a' are not in it"),
        (lambda name, content: b"big" if name.endswith("byteorder") else content, "big-endian"),
        (lambda name, content: content[:40] if name.endswith("data.pkl") else content, "is refused: "),
        (lambda name, content: pickle.dumps({"a": 1}, 0) if name.endswith("data.pkl") else content, "its pickle does"),
        (lambda name, content: b"(" * 99 + b"." if name.endswith("data.pkl") else content, "is refused"),
        (lambda name, content: b"t." if name.endswith("data.pkl") else content, "its pickle is cut short"),
        (lambda name, content: content.replace(b"K\x0c\x85", b"K\xff\x85"), "'a' reaches past its numbers|no dict|its"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, change: Callable[[str, bytes], bytes], says: str) -> None:
    file = rewritten(saved(tmp_path, {"a": torch.arange(12.0)}), change)
    with pytest.raises(ValueError, match=says):
        TorchFile(file)


def test_other_files_are_refused(tmp_path: Path) -> None:
    file = saved(tmp_path, {"a": torch.ones(3)}, _use_new_zipfile_serialization=False)
    with pytest.raises(ValueError, match=r"is no file that torch.save has written since torch 1\.6"):
        TorchFile(file)
    file = rewritten(saved(tmp_path, {"a": torch.ones(300)}), lambda _, content: content, zipfile.ZIP_DEFLATED)
    with pytest.raises(ValueError, match="its pickle takes|is compressed"):
        TorchFile(file)
    whole = saved(tmp_path, {"a": torch.ones(300)}).read_bytes()
    for kept in (0, 9, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:kept])
        with pytest.raises(ValueError, match=r"since torch 1\.6|is refused"):
            TorchFile(file)


def test_a_bomb_stays_small(tmp_path: Path) -> None:
    """Tuples of tuples, each twice the one before: 2^100 entries to whoever walks them."""
    doubled = b"K\x01" + b"".join(b"q\x01h\x01\x86" for _ in range(100)) + b"."
    file = rewritten(
        saved(tmp_path, {"a": torch.ones(1)}), lambda name, content: doubled if name.endswith("pkl") else content
    )
    with pytest.raises(ValueError, match="it holds tuple, and no tensors by name"):
        TorchFile(file)


# ------------------------------------------------------------------------------------------------------- as a model


@pytest.fixture
def pickled(tmp_path: Path) -> Path:
    """A tiny checkpoint as torch.save writes it, in two files with an index."""
    made = variant("llama", "plain")
    for file in made.folder.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, tmp_path / file.name)
    tensors = list(load_file(made.folder / "model.safetensors").items())
    where = {}
    for number in range(2):
        file = f"pytorch_model-{number + 1:05}-of-00002.bin"
        torch.save(dict(tensors[number::2]), tmp_path / file)
        where |= {name: file for name, _ in tensors[number::2]}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": where}))
    torch.save({"lr": 1}, tmp_path / "training_args.bin")
    return tmp_path


def test_every_way_to_read_weights_gives_the_same(pickled: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = variant("llama", "plain")
    want = answers(engine(made))
    others = made.__class__(pickled, made.config, made.reference)
    with caplog.at_level("INFO"):
        assert answers(engine(others)) == want
    assert "has only what torch.save wrote; it is read without running what is in it" in caplog.text
    for _ in range(2):  # made, and found
        assert answers(engine(others, load_format="npcache")) == want
    assert answers(engine(made, safetensors_load_strategy="eager")) == want
    assert answers(engine(made, safetensors_load_strategy="prefetch")) == want
    with pytest.raises(FileNotFoundError, match="load_format='pt' reads"):
        engine(others, load_format="safetensors")


def test_arrays_are_made_anew_when_their_file_changes(tmp_path: Path) -> None:
    file = saved(tmp_path, {"a": torch.ones(3, dtype=torch.bfloat16)})
    kept = [NpCache(file).get_tensor("a") for _ in range(2)]
    assert all(torch.equal(each, torch.ones(3, dtype=torch.bfloat16)) for each in kept)
    torch.save({"b": torch.zeros(2, 2)}, file)
    assert NpCache(file).keys() == ["b"] and NpCache(file).get_slice("b").get_shape() == [2, 2]


def test_an_index_may_not_lead_out_of_its_folder(pickled: Path) -> None:
    for name in ("../x.bin", "/etc/x.bin", "x.safetensors", 3):
        (pickled / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
        with pytest.raises(ValueError, match="which is no file of its folder"):
            WeightFiles(pickled, "pt").files()


def test_nothing_of_torchs_unpickler_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = saved(tmp_path, {"a": torch.ones(2)})

    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError

    monkeypatch.setattr(pickle, "Unpickler", never)
    monkeypatch.setattr(torch, "load", never)
    assert torch.equal(TorchFile(file).get_tensor("a"), torch.ones(2))
