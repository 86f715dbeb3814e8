"""What killed servers left in the temporary folder goes at the next start, and nothing else does."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from quintet.server.private_folder import PrivateFolder, sweep

HOLDS = """
import sys
from quintet.server.private_folder import PrivateFolder
folder = PrivateFolder()
(folder.path / "socket").touch()
print(folder.path, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def holder() -> tuple["subprocess.Popen[str]", Path]:
    """A process that lives with its folder until it is ended."""
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", HOLDS], stdin=pipe, stdout=pipe, text=True)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_the_folder_of_a_killed_process_goes_and_that_of_a_living_one_stays() -> None:
    (dead, left), (alive, kept) = holder(), holder()
    with dead, alive:
        dead.kill()
        assert dead.wait() == -signal.SIGKILL
        assert left.is_dir() and kept.is_dir() and left != kept
        with PrivateFolder() as own:
            assert not left.exists()
            assert own.is_dir() and (kept / "socket").exists()
            assert own.stat().st_mode & 0o777 == 0o700
            sweep()
            assert own.is_dir()
        assert not own.exists()
        alive.communicate("")


def test_what_is_not_surely_a_dead_servers_stays(temporary: Path) -> None:
    elsewhere = temporary / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "lock").touch()
    (temporary / "quintet-link").symlink_to(elsewhere)  # no folder of ours
    (temporary / "quintet-file").touch()
    (temporary / "quintet-without-a-lock").mkdir()
    with_link = temporary / "quintet-lock-is-a-link"
    with_link.mkdir()
    (with_link / "lock").symlink_to(elsewhere / "lock")
    with_pipe = temporary / "quintet-lock-is-a-pipe"
    with_pipe.mkdir()
    os.mkfifo(with_pipe / "lock")
    (temporary / "other").mkdir()
    (temporary / "other" / "lock").touch()
    before = sorted(temporary.rglob("*"))
    sweep()
    assert sorted(temporary.rglob("*")) == before


def test_another_users_folder_stays(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = temporary / "quintet-theirs"
    folder.mkdir()
    (folder / "lock").touch()
    monkeypatch.setattr(os, "getuid", lambda: folder.stat().st_uid + 1)
    sweep()
    assert folder.exists()
