"""Tensors over TCP, from a trainer that listens: each process of ranks connects to it, and both prove to know a key."""

import logging
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from quintet.distributed.connection import Connection, authenticate_server, configure_socket
from quintet.distributed.keys import ranks_key
from quintet.engine.weight_transfer.receivers import Expect
from quintet.engine.weight_transfer.tensor_types import dtype_named, num_bytes

logger = logging.getLogger(__name__)

PROTOCOL = b"quintet weights 1"
RANKS, TENSOR, DATA, END = 1, 2, 3, 4  # kinds of frames
CHUNK_BYTES = 1 << 26  # of a tensor in a frame
SECONDS = 60.0  # that a trainer may be silent in the midst of a transfer, unless init_info has "timeout"


def split_address(address: Any) -> tuple[str, int]:
    """Returns host and port. ValueError: it is no host:port."""
    host, _, port = str(address).removeprefix("tcp://").rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"init_info: address is host:port, not {str(address)[:100]!r}")
    return host.strip("[]"), int(port)


class TCPReceiver:
    """This process's connection to a trainer."""

    def __init__(self, info: Mapping[str, Any], ranks: Sequence[int]) -> None:
        """`info`: address, host:port, and timeout in seconds. OSError: the trainer cannot be reached, or has another
        key."""
        self._seconds = float(info.get("timeout", SECONDS))
        address, until = split_address(info.get("address")), time.monotonic() + self._seconds
        connection = socket.create_connection(address, timeout=self._seconds)
        try:
            configure_socket(connection, self._seconds)
            self._connection: Connection = authenticate_server(connection, ranks_key(), PROTOCOL, until)
            self._connection.send(RANKS, msgspec.msgpack.encode(list(ranks)), until)
        except BaseException:
            connection.close()
            raise

    def receive(self, info: Mapping[str, Any], expect: Expect) -> Iterator[tuple[str, Tensor]]:
        """Yields the tensors of one transfer, until the trainer says that it ends. ValueError for one that has no
        place; ConnectionError if the trainer is gone."""
        while True:
            frame = self._connection.receive(self._until())
            if frame.kind == END:
                return
            name, dtype, shape = _header(frame.kind, frame.payload)
            expect(name, shape, dtype)
            data = torch.empty(num_bytes(shape, dtype), dtype=torch.uint8)
            for start in range(0, len(data), CHUNK_BYTES):
                size = min(CHUNK_BYTES, len(data) - start)
                part = self._connection.receive(self._until(), size)
                if part.kind != DATA or len(part.payload) != size:
                    raise ConnectionError(f"the trainer sent {len(part.payload)} bytes of {name}, not {size}")
                data[start : start + size] = torch.frombuffer(part.payload, dtype=torch.uint8)
            yield name, data.view(dtype).view(shape)

    def close(self) -> None:
        self._connection.close()

    def _until(self) -> float:
        return time.monotonic() + self._seconds


def _header(kind: int, payload: bytes | bytearray) -> tuple[str, torch.dtype, list[int]]:
    if kind != TENSOR:
        raise ConnectionError(f"the trainer sent a frame of kind {kind}, where a tensor begins")
    try:
        name, dtype, shape = msgspec.msgpack.decode(payload, type=tuple[str, str, list[int]])
    except msgspec.MsgspecError as error:
        raise ConnectionError(f"the trainer sent a tensor without name, dtype and shape ({error})") from None
    if any(each < 0 for each in shape):
        raise ConnectionError(f"the trainer sent {name[:200]} with shape {shape}")
    return name, dtype_named(dtype), shape
