"""Pages of a mapped checkpoint are given back, and of nothing else; what is read again is the same."""

import mmap
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from quintet.model_loader.mmap_release import MappedFiles

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux says what is mapped where")
ELEMENTS = 3 * 2**18  # 3 MiB of float32: many pages, and no whole number of huge ones


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    values = torch.arange(ELEMENTS, dtype=torch.float32)
    save_file({"a": values, "b": values + 1, "small": torch.ones(3)}, path)
    return path


def _resident(tensor: Tensor) -> int:
    """Bytes of the file that this process has mapped in around the tensor."""
    text, found = Path("/proc/self/smaps").read_text(), False
    for line in text.splitlines():
        fields = line.split()
        if "-" in fields[0] and not fields[0].endswith(":"):
            start, stop = (int(part, 16) for part in fields[0].split("-"))
            found = start <= tensor.data_ptr() < stop
        elif found and fields[0] == "Rss:":
            return int(fields[1]) * 1024
    raise AssertionError("the tensor lies nowhere")


def test_what_was_read_is_given_back_and_can_be_read_again(file: Path) -> None:
    handle = safe_open(file, framework="pt")
    a = handle.get_tensor("a")
    total = a.sum()
    before = _resident(a)
    dropped = MappedFiles([file]).release_pages(a)
    assert a.nbytes - 2 * mmap.PAGESIZE <= dropped <= a.nbytes
    assert _resident(a) <= before - dropped
    assert a.sum() == total and a[12345] == 12345


def test_a_link_leads_to_the_file(file: Path, tmp_path: Path) -> None:
    """The hub's cache links to its blobs."""
    link = tmp_path / "link.safetensors"
    link.symlink_to(file)
    a = safe_open(link, framework="pt").get_tensor("a")
    assert MappedFiles([link]).release_pages(a) > 0


def test_a_slice_gives_back_its_own_pages_alone(file: Path) -> None:
    a = safe_open(file, framework="pt").get_tensor("a")
    assert 0 < MappedFiles([file]).release_pages(a[1000 : ELEMENTS // 2]) < a.nbytes // 2


def test_memory_that_is_no_file_keeps_what_it_holds(file: Path, tmp_path: Path) -> None:
    handle = safe_open(file, framework="pt")
    mapped = MappedFiles([file])
    heap = handle.get_tensor("a").clone()
    other = tmp_path / "other.safetensors"
    shutil.copy(file, other)
    elsewhere = safe_open(other, framework="pt").get_tensor("a")
    shared = torch.from_file(str(other), shared=True, size=other.stat().st_size // 4, dtype=torch.float32)
    for tensor in (heap, elsewhere, shared):
        assert mapped.release_pages(tensor) == 0
    assert MappedFiles([other]).release_pages(shared) == 0
    assert torch.equal(heap, torch.arange(ELEMENTS, dtype=torch.float32))


def test_less_than_a_page_and_no_stretch_of_memory_are_left(file: Path) -> None:
    handle = safe_open(file, framework="pt")
    mapped = MappedFiles([file])
    assert mapped.release_pages(handle.get_tensor("small")) == 0
    assert mapped.release_pages(handle.get_tensor("a").view(3, -1).t()) == 0
    assert mapped.release_pages(handle.get_tensor("a")[:0]) == 0


def test_a_system_that_does_not_say_gives_nothing_back(file: Path, tmp_path: Path) -> None:
    a = safe_open(file, framework="pt").get_tensor("a")
    assert MappedFiles([file], tmp_path / "no maps").release_pages(a) == 0
    (tmp_path / "maps").write_text(
        f"0-{2**47:x} rw-s 00000000 fd:00 1      {os.path.realpath(file)}\n7f00-7fff rw-p 0 0 0\n"
    )
    assert MappedFiles([file], tmp_path / "maps").release_pages(a) == 0
