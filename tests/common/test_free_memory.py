"""Pages of libraries and GGUF headers are dropped where they equal the file's, and come again when they are used."""

import subprocess
import sys
from pathlib import Path

import pytest

from quintet.common.free_memory import _unchanged, release_file_pages

HEAD = "{} {} 00000000 08:01 42                         {}\n"
BODY = (
    "Size:  4096 kB\nRss: {:12} kB\nPrivate_Dirty: {:4} kB\nAnonymous: {:8} kB\nSwap:  0 kB\nVmFlags: rd ex mr mw me \n"
)


def smaps(*maps: tuple[str, str, str, int, int]) -> list[str]:
    """Lines of /proc/self/smaps for maps: addresses, rights, file, KiB that are resident and KiB that were changed."""
    text = "".join(HEAD.format(*each[:3]) + BODY.format(each[3], each[4], each[4]) for each in maps)
    return text.splitlines(keepends=True)


def test_only_unchanged_maps_of_libraries_and_headers_that_cannot_be_written_to_are_dropped() -> None:
    lines = smaps(
        ("1000-2000", "r-xp", "/usr/lib/libbig.so.1.2", 4096, 0),
        ("2000-3000", "r--p", "/usr/lib/lib with space.so", 300, 0),
        ("3000-4000", "r--p", "/usr/lib/librelocated.so", 4096, 4),
        ("4000-5000", "rw-p", "/usr/lib/libdata.so", 4096, 0),
        ("5000-6000", "r-xp", "/usr/lib/libsmall.so", 100, 0),
        ("6000-7000", "r--p", "/models/x.weights", 4096, 0),
        ("7000-8000", "r-xs", "/usr/lib/libshared.so", 4096, 0),
        ("8000-9000", "r--p", "", 4096, 0),
        ("9000-9800", "r--s", "/models/header of.gguf", 4096, 0),
        ("9800-9900", "rw-p", "/models/weights.gguf", 4096, 0),
        ("a000-b000", "r-xp", "/usr/lib/liblast.so", 4096, 0),
    )
    assert [start for start, _, _ in _unchanged(lines)] == [0x1000, 0x2000, 0x9000, 0xA000]
    assert next(_unchanged(lines)) == (0x1000, 0x2000, 4096 * 1024)


def test_a_map_without_the_counts_stays() -> None:
    lines = [HEAD.format("1000-2000", "r-xp", "/usr/lib/libbig.so"), "Rss:  4096 kB\n"]
    assert [*_unchanged(lines)] == []


def test_without_the_file_nothing_is_dropped(tmp_path: Path) -> None:
    assert release_file_pages(tmp_path / "smaps") == 0


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says what is mapped where")
def test_torch_computes_as_before_and_takes_less_memory() -> None:
    code = """
import psutil, torch
from quintet.common.free_memory import release_file_pages
x = torch.arange(4096.0).view(64, 64) / 4096
before, memory = torch.softmax(x @ x, -1), psutil.Process().memory_info().rss
released = release_file_pages()
fell = memory - psutil.Process().memory_info().rss
assert released > 2**24 and fell > released / 2, (released, fell)
assert torch.equal(torch.softmax(x @ x, -1), before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
