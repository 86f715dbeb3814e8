"""Pickles that would hang, crash or swell a reader are refused in a sentence, soon (attack A7)."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from quintet.model_loader.torch_checkpoint import TorchFile

SHARED = b")" + b"q\x00h\x00\x86" * 60  # a tuple that holds itself of one step before, twice: 2**60 leaves in 300 bytes
DEEP = b")" + b"\x85" * 60_000
TEXT = b"X\x01\x00\x00\x00a"
STORAGE = (
    b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x01tQ"  # a persistent id
)
REBUILD = b"ctorch._utils\n_rebuild_tensor_v2\n("
BOMBS = {
    "shared_key": (b"}" + SHARED + b"Ns", "names an entry by a tuple"),
    "shared_key_of_many": (b"}(" + TEXT + b"N" + SHARED + b"Nu", "names an entry by a tuple"),
    "deep_key": (b"}" + DEEP + b"Ns", "names an entry by a tuple"),
    "deep_key_of_3_MB": (b"}" + b")" + b"\x85" * 3_000_000 + b"Ns", "takes 3000007 bytes"),
    "deep_value": (b"}" + TEXT + DEEP + b"s", "it holds tuple as 'a'"),
    "deep_list_of_lists": (b"]" * 30_000 + b"a" * 29_999, "it holds list"),
    "shared_state": (b"}" + SHARED + b"b", "sets the state"),
    "shared_function": (SHARED + b")R", "its pickle calls tuple"),
    "shared_arguments": (b"ccollections\nOrderedDict\n" + SHARED + b"R", "its pickle calls collections.OrderedDict"),
    "shared_global": (SHARED + TEXT + b"\x93", "names a function by what is no text"),
    "shared_name_of_a_global": (TEXT + SHARED + b"\x93)R", "names a function by what is no text"),
    "shared_storage_class": (
        STORAGE.replace(b"ctorch\nFloatStorage\n", b"X\x05\x00\x00\x00torch" + SHARED + b"\x93"),
        "",
    ),
    "shared_key_of_a_storage": (STORAGE.replace(b"X\x01\x00\x00\x000", SHARED), "asks for torch.FloatStorage"),
    "shared_shape": (REBUILD + STORAGE + b"K\x00" + SHARED + b")tR", "2 dimensions with 0 strides"),
    "shared_sizes": (REBUILD + STORAGE + b"K\x00" + SHARED + SHARED + b"tR", "makes a tensor of what is none"),
    "wide": (b"}" * 60_000_000, "takes 60000003 bytes"),
    "wide_within_the_bytes": (b"}" * 1_000_000, "more than 66048 instructions"),
    "wide_shapes": (
        b"(" + b"K\x01" * 30_000 + b"tq\x00" + REBUILD + STORAGE + b"K\x00h\x00h\x00tR",
        "30000 dimensions",
    ),
    "text_of_4_GB": (b"X\xff\xff\xff\xff", "expected 4294967295 bytes"),
}
READ = """
import resource, sys
from pathlib import Path
from quintet.model_loader.torch_checkpoint import TorchFile
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for name in sys.argv[1:]:
    try:
        TorchFile(Path(name))
    except ValueError as error:
        print(error)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


def written(path: Path, pickle: bytes) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02" + pickle + b".")
        archive.writestr("archive/data/0", b"\0\0\0\0")
    return path


def test_bombs_are_refused_in_seconds_and_in_little_memory(tmp_path: Path) -> None:
    """In a process of its own, which a bomb that works would hang or crash."""
    files = [str(written(tmp_path / f"{name}.bin", pickle)) for name, (pickle, _) in BOMBS.items()]
    done = subprocess.run([sys.executable, "-c", READ, *files], capture_output=True, text=True, timeout=60)
    *sentences, megabytes = done.stdout.splitlines()
    assert (done.returncode, len(sentences)) == (0, len(BOMBS)), done.stderr
    for (name, (_, says)), sentence in zip(BOMBS.items(), sentences, strict=True):
        assert f"{name}.bin is" in sentence and says in sentence and len(sentence) < 500
    assert int(megabytes) < 100


@pytest.mark.parametrize("views", [1, 2_000])
def test_checkpoints_of_many_small_tensors_are_read(tmp_path: Path, views: int) -> None:
    """Bounds on bytes and instructions leave room for what torch writes, tensors that share one storage included."""
    whole = torch.arange(5_000.0)
    tensors = {f"model.layers.{i}.self_attn.q_proj.weight": whole[i : i + 2] for i in range(views)}
    tensors |= {f"model.layers.{i}.mlp.experts.{i}.down_proj.weight_scale_inv": torch.ones(1) for i in range(6_000)}
    torch.save(tensors, tmp_path / "x.bin")
    assert TorchFile(tmp_path / "x.bin").keys() == list(tensors)
