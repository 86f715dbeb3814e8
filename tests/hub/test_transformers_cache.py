"""Readings on disk: found again, never half, never of others, bounded; the shipped ones are those of transformers."""

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from quintet.config.cache_dir import cache_folder
from quintet.hub import transformers_cache as readings
from scripts import transformers_cache

NAME = readings.digest("test", [b"part"])


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    readings._warn.cache_clear()
    return cache_folder("readings")


def _same(reading: Any) -> Any:
    return reading


def _file(folder: Path) -> Path:
    (file,) = folder.iterdir()
    return file


def test_a_reading_is_found_again(folder: Path) -> None:
    reading = {"a": [1, 2.5, None, float("inf")], "b": "\ud800 ä"}
    assert readings.find(NAME, _same) is None
    readings.store(NAME, reading)
    assert readings.find(NAME, _same) == reading
    assert readings.find(readings.digest("test", [b"pa", b"rt"]), _same) is None
    assert readings.find(readings.digest("other", [b"part"]), _same) is None


def test_only_its_owner_may_write(folder: Path) -> None:
    before = os.umask(0)
    try:
        readings.store(NAME, {})
    finally:
        os.umask(before)
    assert (folder.stat().st_mode & 0o777, _file(folder).stat().st_mode & 0o777) == (0o700, 0o600)


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"', b"\xff", b"[" * 10**5, b'{"%s": {"of": 2}}'])
def test_a_damaged_reading_is_made_anew(folder: Path, content: bytes) -> None:
    readings.store(NAME, {"name": 1})
    _file(folder).write_bytes(content.replace(b"%s", NAME.encode()))
    assert readings.find(NAME, lambda reading: reading["name"]) is None
    readings.store(NAME, {"name": 2})
    assert readings.find(NAME, lambda reading: reading["name"]) == 2


def test_the_reading_of_another_is_not_taken(folder: Path) -> None:
    other = readings.digest("test", [b"other"])
    readings.store(NAME, {"name": 1})
    content = _file(folder).read_bytes()
    readings.store(other, {"name": 2})
    for file in folder.iterdir():
        file.write_bytes(content)
    assert (readings.find(NAME, _same), readings.find(other, _same)) == ({"name": 1}, None)


def test_a_folder_that_others_can_write_to_is_neither_read_nor_written(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    readings.store(NAME, 1)
    folder.chmod(0o770)
    assert readings.find(NAME, _same) is None
    for reading in (2, 3):
        readings.store(NAME, reading)
    assert caplog.text.count("can be written to by others, and what lies there is trusted; each start with this") == 1
    folder.chmod(0o700)
    assert readings.find(NAME, _same) == 1


def test_a_folder_that_cannot_be_made_costs_the_import_and_no_more(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    folder.parent.write_text("a file")
    readings.store(NAME, 1)
    assert readings.find(NAME, _same) is None
    assert "cannot be written to" in caplog.text


def test_what_was_not_used_for_longest_goes_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readings, "MAX_FILES", 3)
    names = [readings.digest("test", [bytes([index])]) for index in range(4)]
    for index, name in enumerate(names[:3]):
        readings.store(name, index)
        os.utime(max(folder.iterdir(), key=lambda file: file.stat().st_mtime_ns), (index, index))
    assert readings.find(names[0], _same) == 0  # used: now the last to go
    readings.store(names[3], 3)
    assert [readings.find(name, _same) for name in names] == [0, None, 2, 3]


def test_bytes_are_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(readings, "MAX_BYTES", 1000)
    monkeypatch.setattr(readings, "MAX_IN_ALL", 2000)
    readings.store(NAME, "x" * 1000)
    assert not folder.exists() and "over 1000; each start with this model imports transformers" in caplog.text
    for index in range(9):
        readings.store(readings.digest("test", [bytes([index])]), "x" * 800)
    assert sum(file.stat().st_size for file in folder.iterdir()) <= 2000


@pytest.mark.parametrize("versions", [("5.99.0", "0.23.3"), ("5.24.0.dev0", "0.23.3")])
def test_another_version_of_the_libraries_reads_anew(
    versions: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    readings.store(NAME, 1)
    monkeypatch.setattr(readings, "_versions", lambda: versions)
    assert readings.find(NAME, _same) is None
    readings.store(NAME, 2)
    assert readings.find(NAME, _same) == (None if "dev" in versions[0] else 2)  # which changes under one version


def test_the_bundled_models_readings_are_those_of_transformers() -> None:
    kept = json.loads(readings.SHIPPED.read_text(encoding="utf-8"))
    assert kept == transformers_cache.made(transformers_cache.FOLDERS), "run scripts/transformers_cache.py"
