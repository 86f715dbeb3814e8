"""Digests of files: what changes them."""

import os
from pathlib import Path

import pytest

from quintet.common import file_digests
from quintet.common.file_digests import HEAD, SAMPLE, file_identity, sources_digest


@pytest.mark.parametrize("place", [0, HEAD, HEAD + 300_000, -SAMPLE, -1])
def test_weights_of_the_same_size_and_times_have_another_identity(
    place: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the change time and the inode are the same: a fine-tune differs in all blocks, here in 8 KiB."""
    file, content = tmp_path / "m.gguf", bytearray(HEAD + 400_000)
    file.write_bytes(content)
    os.utime(file, ns=(1, 1))
    state = file.stat()
    monkeypatch.setattr(file_digests.os, "fstat", lambda _: state)
    before = file_identity(file)
    assert file_identity(file) == before
    first = place % len(content)
    content[first : first + 2 * SAMPLE] = b"x" * len(content[first : first + 2 * SAMPLE])
    file.write_bytes(content)
    assert file_identity(file) != before


def test_a_file_that_was_written_again_has_another_identity(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(bytes(10))
    os.utime(file, ns=(1, 1))
    before = file_identity(file)
    other = tmp_path / "other"
    other.write_bytes(bytes(10))
    os.utime(other, ns=(1, 1))
    os.replace(other, file)
    assert file_identity(file) != before


def test_sources_have_another_digest_after_a_change(tmp_path: Path) -> None:
    (tmp_path / "packing").mkdir()
    source = tmp_path / "packing" / "pack.py"
    source.write_text("TILE = 16\n")
    places = [tmp_path / "packing", Path(__file__)]
    before = sources_digest(places)
    assert sources_digest(places) == before
    source.write_text("TILE = 32\n")
    assert sources_digest(places) != before
