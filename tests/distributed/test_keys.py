"""Keys that are given, read from files, or made once for a user."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from quintet.config import KVTransferConfig
from quintet.distributed.keys import kv_transfer_key, ranks_key


def test_the_key_is_given_or_made_once_for_this_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("QUINTET_RANKS_KEY", "of these tests alone")
    assert ranks_key() == b"of these tests alone"
    monkeypatch.setenv("QUINTET_RANKS_KEY", "short")
    with pytest.raises(ValueError, match="has 5 bytes"):
        ranks_key()
    monkeypatch.delenv("QUINTET_RANKS_KEY")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with ThreadPoolExecutor(8) as pool:
        keys = list(pool.map(lambda _: ranks_key(), range(8)))
    assert len(set(keys)) == 1 and len(keys[0]) == 64
    path = tmp_path / "quintet" / "ranks.key"
    assert path.stat().st_mode & 0o777 == 0o600 and len(list(path.parent.iterdir())) == 1
    path.chmod(0o644)
    with pytest.raises(ValueError, match="can be read by others"):
        ranks_key()
    monkeypatch.setenv("QUINTET_RANKS_KEY_FILE", str(tmp_path / "none"))
    with pytest.raises(ValueError, match="cannot be read"):
        ranks_key()
    (tmp_path / "none").write_text("a key in a file\n")
    assert ranks_key() == b"a key in a file"


def test_engines_share_a_key_of_sixteen_bytes_that_its_owner_alone_can_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("QUINTET_KV_TRANSFER_KEY", raising=False)
    assert kv_transfer_key(KVTransferConfig()) == b""
    monkeypatch.setenv("QUINTET_KV_TRANSFER_KEY", "k" * 15)
    with pytest.raises(ValueError, match="QUINTET_KV_TRANSFER_KEY has 15 bytes; a key has from 16"):
        kv_transfer_key(KVTransferConfig())
    monkeypatch.setenv("QUINTET_KV_TRANSFER_KEY", "k" * 16)
    assert kv_transfer_key(KVTransferConfig()) == b"k" * 16
    file = tmp_path / "key"
    settings = KVTransferConfig(kv_connector_extra_config={"key_file": str(file)})
    for content, mode, why in (
        ("", 0o600, "has 0 bytes"), ("f" * 15, 0o600, "has 15 bytes"), ("f" * 16, 0o640, "can be read by others"),
    ):  # fmt: skip
        file.write_text(content)
        file.chmod(mode)
        with pytest.raises(ValueError, match=f"kv_transfer_config: key_file=.*{why}"):
            kv_transfer_key(settings)
    file.chmod(0o600)
    assert kv_transfer_key(settings) == b"f" * 16
