"""Sockets of KV transfer between engines: TCP, or a local socket of this machine."""

import contextlib
import ipaddress
import os
import re
import socket
import struct
import tempfile
from pathlib import Path

from quintet.config import KVTransferConfig
from quintet.config.cache_dir import unsafe_reason
from quintet.engine.kv_transfer.p2p.allowed_peers import AllowedPeers
from quintet.engine.kv_transfer.p2p.consumer import LeaseAddress
from quintet.engine.kv_transfer.p2p.protocol import PeerChannel, ProtocolError

ENGINE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,39}")
CREDENTIALS = struct.Struct("3i")  # process, user, group
NO_KEY = (
    "{where}: others could take pages, which are prompts, and give them; give all engines a key "
    "(QUINTET_KV_TRANSFER_KEY, or key_file in kv_connector_extra_config), or bind to 127.0.0.1"
)


def listen(settings: KVTransferConfig, keyed: bool, rank: int) -> socket.socket:
    """Listens for other engines, each of several at a port of its own, counted up. ValueError says why it cannot."""
    host, port = settings.kv_ip, settings.kv_port + rank if settings.kv_port else 0
    where = f"kv_transfer_config: kv_ip={host!r}, kv_port={port}"
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        if not keyed and not _is_loopback(str(address[0])):
            raise ValueError(NO_KEY.format(where=where))
        if ipaddress.ip_address(str(address[0]).partition("%")[0]).is_unspecified and settings.extras.host is None:
            raise ValueError(f"{where}: others cannot use this address; give host in kv_connector_extra_config, too")
        listening = socket.socket(family, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen()
    except OSError as error:
        raise ValueError(f"{where} cannot be listened at ({error.strerror or error}); give another") from None
    return listening


def connect(
    peer: LeaseAddress, patience: float, longest: int, keyed: bool, peers: AllowedPeers | None = None
) -> PeerChannel:
    """Connects to the engine that holds a loan; ProtocolError says why it cannot. Without a key only this machine is
    trusted. peers: engines that may be asked; None: all."""
    host, _, port = peer.host_port.rpartition(":")
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0]
        if not keyed and not _is_loopback(str(address[0])):
            raise ProtocolError("it is another machine's, and this engine has no key; give all engines one")
        if peers is not None and not peers.allows(host, str(address[0]), int(port)):
            raise ProtocolError("kv_connector_extra_config.peers does not name it; nothing was asked of it")
        connection = socket.socket(family, kind)
        connection.settimeout(patience)
        try:
            connection.connect(address)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError:
            connection.close()
            raise
    except TimeoutError:
        raise ProtocolError("the peer does not answer") from None
    except (OSError, UnicodeError) as error:
        raise ProtocolError(getattr(error, "strerror", None) or str(error)) from None
    return PeerChannel(connection, patience, longest)


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _socket_folder() -> Path:
    """Returns the folder of this user's sockets; ValueError where others could put theirs there."""
    folder = Path(tempfile.gettempdir()) / f"quintet-kv-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    if folder.is_symlink() or not folder.is_dir() or (why := unsafe_reason(folder)):
        raise ValueError(f"kv_transfer_config: {why or f'{folder} is no folder'}; remove it, or set TMPDIR")
    return folder


def listen_local(engine: str) -> tuple[socket.socket, str]:
    """Listens at a socket that only this user's processes can reach -> it, and its name. ValueError says why it
    cannot."""
    if not hasattr(os, "memfd_create") or not hasattr(socket, "SO_PEERCRED"):
        raise ValueError("kv_transfer_config.kv_connector SharedMemoryConnector needs Linux; use TCPConnector")
    if not ENGINE_NAME.fullmatch(engine):
        raise ValueError(f"kv_transfer_config.engine_id={engine!r} names a socket: 1 to 40 letters, digits and ._-")
    path, listening = _socket_folder() / engine, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
            other.connect(str(path))
            raise ValueError(f"kv_transfer_config.engine_id={engine!r} is another engine's that runs; give another")
        path.unlink(missing_ok=True)  # of an engine that was killed
        listening.bind(str(path))
        listening.listen()
    except OSError as error:
        raise ValueError(f"kv_transfer_config: {path} cannot be listened at ({error.strerror})") from None
    return listening, engine


def remove_local_socket(engine: str) -> None:
    """Removes the socket of an engine that listens no more."""
    with contextlib.suppress(OSError, ValueError):
        (_socket_folder() / engine).unlink()


def connect_local(peer: LeaseAddress, patience: float) -> PeerChannel:
    """Connects to another engine of this user; ProtocolError says why it cannot."""
    name = peer.host_port.rpartition(":")[0]
    if not ENGINE_NAME.fullmatch(name):
        raise ProtocolError("it is no engine of this machine's")
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(patience)
        connection.connect(str(_socket_folder() / name))
        found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    except (OSError, ValueError) as error:
        connection.close()
        raise ProtocolError(getattr(error, "strerror", None) or str(error)) from None
    if CREDENTIALS.unpack(found)[1] != os.getuid():
        connection.close()
        raise ProtocolError("it is another user's")
    return PeerChannel(connection, patience, 0)
