"""The process that makes the tokenizer of a GGUF file: its parent finds it in the cache, and reads no vocabulary."""

import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from quintet.config import EngineConfig
from quintet.gguf import vocabulary
from quintet.hub import transformers_cache as readings
from quintet.tokenizers import cache_process
from quintet.tokenizers.tokenizer import Tokenizer, _gguf_reading, is_missing_in_cache, load_tokenizer

GGUF = Path(__file__).parents[1] / "data/quantized/gguf/tokenizers/spm.gguf"


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A GGUF file, and a user's cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return Path(shutil.copy(GGUF, tmp_path / "model.gguf"))


def test_the_tokenizer_is_in_the_cache_when_the_process_has_ended(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child = cache_process.start(EngineConfig(model=str(file)))
    assert child is not None and child.wait(60) is not None and child.exit is not None
    assert child.exit.code == 0 and not is_missing_in_cache(file)
    monkeypatch.setattr(vocabulary, "read_vocabulary", lambda metadata: pytest.fail("read again"))
    assert load_tokenizer(file).encode("hello") != []
    assert cache_process.start(EngineConfig(model=str(file))) is None, "the cache has it"
    child.close()


def test_a_file_without_a_tokenizer_is_the_parents_to_refuse(tmp_path: Path, file: Path) -> None:
    file.write_bytes(file.read_bytes()[:1000])
    child = cache_process.start(EngineConfig(model=str(file)))
    assert child is not None and child.wait(60) is not None and child.exit is not None
    assert child.exit.code == 0 and is_missing_in_cache(file)
    child.close()
    with pytest.raises(ValueError, match="fetch it again"):
        load_tokenizer(file)


@pytest.mark.parametrize("changes", [{"tokenizer": "bundled"}, {"skip_tokenizer_init": True}, {"model": "bundled"}])
def test_no_process_is_started_for_other_tokenizers(changes: dict[str, Any], file: Path) -> None:
    assert cache_process.start(EngineConfig(**{"model": str(file), **changes})) is None


def test_no_process_is_started_where_nothing_can_be_kept(file: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_bytes(b"a file in the folder's place")
    assert not is_missing_in_cache(file)
    assert cache_process.start(EngineConfig(model=str(file))) is None


def test_two_that_want_a_new_tokenizer_read_its_vocabulary_once(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, reads, loaded = vocabulary.read_vocabulary, list[int](), list[Tokenizer]()
    both = threading.Barrier(2)

    def counted(metadata: Any) -> Any:
        reads.append(1)
        return read(metadata)

    def load() -> None:
        both.wait(60)
        loaded.append(load_tokenizer(file))

    monkeypatch.setattr(vocabulary, "read_vocabulary", counted)
    threads = [threading.Thread(target=load) for _ in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(reads) == 1
    assert loaded[0].backend.to_str() == loaded[1].backend.to_str()


def test_a_process_that_never_ends_its_reading_holds_up_none(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readings, "LOCK_SECONDS", 0.0)
    with readings.making(_gguf_reading(file)):
        assert load_tokenizer(file).encode("hello") != []
