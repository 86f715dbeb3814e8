"""Memory that a map of a file takes the place of holds the same bytes, at the same address, and is the file's."""

import mmap
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor

from quintet.model_loader.mmap_replace import MIN_BYTES, replace_by_file
from quintet.model_loader.weights_cache import ALIGNMENT, CachedTensor, TensorName, WeightsCache

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="uses mremap")
SIZE = MIN_BYTES + 3 * mmap.PAGESIZE // 2  # bytes: the last page is no whole one


def in_memory(content: bytes, shift: int = 0) -> Tensor:
    """The content in memory of its own, `shift` bytes behind a page's start."""
    memory = mmap.mmap(-1, len(content) + shift + mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    tensor = torch.frombuffer(memory, dtype=torch.uint8)[shift : shift + len(content)]
    tensor.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
    return tensor


def mapped_file(tensor: Tensor) -> str:
    """The file that is mapped where a tensor begins; "" for memory without one."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, stop = (int(each, 16) for each in line.split()[0].split("-"))
        if start <= tensor.data_ptr() < stop:
            return " ".join(line.split()[5:])
    raise AssertionError("the tensor lies nowhere")


@pytest.fixture
def content() -> bytes:
    return (
        torch.randint(0, 256, (SIZE,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)).numpy().tobytes()
    )


def test_the_file_takes_the_place_of_whole_pages_and_nothing_written_gets_into_it(
    content: bytes, tmp_path: Path
) -> None:
    path, tensor = tmp_path / "x", in_memory(content)
    path.write_bytes(bytes(mmap.PAGESIZE) + content)
    address, copy = tensor.data_ptr(), tensor.clone()
    with path.open("rb") as stream:
        assert replace_by_file(stream.fileno(), [(mmap.PAGESIZE, tensor)]) == SIZE // mmap.PAGESIZE * mmap.PAGESIZE
    assert mapped_file(tensor) == str(path) and mapped_file(tensor[-1:]) == ""
    assert tensor.data_ptr() == address and torch.equal(tensor, copy)
    tensor.zero_()
    assert path.read_bytes()[mmap.PAGESIZE :] == content


def test_a_thread_that_reads_meanwhile_sees_the_same(content: bytes, tmp_path: Path) -> None:
    path, tensor = tmp_path / "x", in_memory(content)
    path.write_bytes(content)
    wanted, sums, done = int(tensor.sum(dtype=torch.int64)), set(), threading.Event()

    def read() -> None:
        while not done.is_set():
            sums.add(int(tensor.sum(dtype=torch.int64)))

    reader = threading.Thread(target=read)
    reader.start()
    try:
        with path.open("rb") as stream:
            for _ in range(50):
                assert replace_by_file(stream.fileno(), [(0, tensor)]) > 0
    finally:
        done.set()
        reader.join()
    assert sums == {wanted}


def test_the_cache_of_packed_weights_takes_the_place_of_what_it_keeps(content: bytes, tmp_path: Path) -> None:
    tensor, small = in_memory(content), torch.arange(5, dtype=torch.uint8)
    names = (TensorName("a", "weight"),), (TensorName("b", "weight"),)
    second = -(-SIZE // ALIGNMENT) * ALIGNMENT
    kept = [CachedTensor(names[0], torch.uint8, (SIZE,), 0), CachedTensor(names[1], torch.uint8, (5,), second)]
    cache = WeightsCache(tmp_path / "cache" / "x.weights")
    cache.write(kept, [tensor, small], threading.Event())
    assert mapped_file(tensor) == str(cache.file) and tensor.numpy().tobytes() == content
    assert mapped_file(small) != str(cache.file) and small.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("shift", "offset", "size"), [(64, 0, SIZE), (0, 64, SIZE), (0, 0, MIN_BYTES - 1)])
def test_other_tensors_stay_where_they_are(shift: int, offset: int, size: int, content: bytes, tmp_path: Path) -> None:
    path, tensor = tmp_path / "x", in_memory(content[:size], shift)
    path.write_bytes(bytes(offset) + content)
    with path.open("rb") as stream:
        assert replace_by_file(stream.fileno(), [(offset, tensor)]) == 0
    assert mapped_file(tensor) == "" and tensor.numpy().tobytes() == content[:size]


def test_transposed_tensors_stay_where_they_are(content: bytes, tmp_path: Path) -> None:
    path, tensor = tmp_path / "x", in_memory(content[:MIN_BYTES]).view(2, -1).T
    path.write_bytes(content)
    with path.open("rb") as stream:
        assert replace_by_file(stream.fileno(), [(0, tensor)]) == 0
