"""What killed servers left in the temporary folder goes at the next start, and nothing else does."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from quintet.common.socket_folder import PrivateFolder, sweep

HOLDS = """
import sys
from quintet.common.socket_folder import PrivateFolder
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


def test_a_path_that_is_too_long_for_sockets_is_left_for_a_shorter_one(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    long = temporary / ("a" * 90)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with PrivateFolder() as folder:
        assert folder.parent == Path("/tmp") and folder.stat().st_mode & 0o777 == 0o700
        assert "leaves sockets no room (76 at most): they lie in /tmp" in caplog.text or sys.platform != "linux"
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(f"{folder}/engine1234567")
    assert not folder.exists() and not list(long.iterdir())
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(ValueError, match=r"sockets in it have room for \d+; set TMPDIR to a shorter one"):
        PrivateFolder()


@pytest.mark.skipif(sys.platform != "linux", reason="how long a path may be is the system's to say")
def test_a_path_that_just_fits_is_taken(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fits = Path(tempfile.mkdtemp(prefix="q", dir="/tmp"))
    try:
        fits = fits / ("a" * (76 - len(f"{fits}/")))
        fits.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(fits))
        with PrivateFolder() as folder, socket.socket(socket.AF_UNIX) as made:
            assert folder.parent == fits
            made.bind(f"{folder}/engine1234567")
    finally:
        shutil.rmtree(fits.parent)
