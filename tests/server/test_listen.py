"""Files of Unix sockets: one of a server that has died is replaced, and nothing else is."""

import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from quintet.server.config import ServerConfig
from quintet.server.listen import listen


@pytest.fixture
def path() -> Iterator[Path]:
    """In a short folder: a socket's path has room for 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="q", dir="/tmp") as folder:
        yield Path(folder) / "socket"


def test_a_file_that_is_no_socket_stays(path: Path) -> None:
    path.write_text("mine", encoding="utf-8")
    with pytest.raises(ValueError, match=f"cannot listen on {path}: there is a file that is no socket; remove it"):
        listen(ServerConfig(uds=str(path)))
    assert path.read_text(encoding="utf-8") == "mine"


def test_the_socket_of_a_server_that_has_died_is_replaced(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with listen(ServerConfig(uds=str(path))), socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
        assert path.stat().st_mode & 0o777 == 0o600


def test_the_socket_of_a_server_that_listens_is_left_to_it(path: Path) -> None:
    with listen(ServerConfig(uds=str(path))) as first:
        with pytest.raises(ValueError, match="a server listens there; end it"):
            listen(ServerConfig(uds=str(path)))
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
            first.accept()[0].close()
