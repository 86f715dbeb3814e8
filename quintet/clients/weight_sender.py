"""The trainer's half of weights over TCP. No engine is needed here: copy it, or import it, beside the optimizer.

sender = WeightSender("0.0.0.0", 51300)
... the engine's init_weight_transfer_engine({"init_info": {"address": "trainer:51300"}}) connects meanwhile ...
sender.wait(world_size)
sender.send(model.state_dict())  # while the engine's update_weights({"update_info": {}}) receives
"""

import socket
import time
from collections.abc import Iterable, Mapping

import msgspec
import torch
from torch import Tensor

from quintet.distributed.connection import (
    AuthenticationFailed,
    Connection,
    ConnectionClosed,
    authenticate_client,
    configure_socket,
)
from quintet.distributed.keys import ranks_key
from quintet.engine.weight_transfer.tcp import CHUNK_BYTES, DATA, END, PROTOCOL, RANKS, SECONDS, TENSOR
from quintet.engine.weight_transfer.tensor_types import name_of_dtype

Tensors = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]


class WeightSender:
    """Listens for an engine's processes, and sends all of them tensors. One thread at a time."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0, seconds: float = SECONDS) -> None:
        """`port` 0: one that is free, see `address`; `seconds` that the others may take for each answer. Both ends read
        the key of ranks, QUINTET_RANKS_KEY or its file. OSError if the address is taken."""
        self._seconds, self._key = seconds, ranks_key()
        self._listener = socket.create_server((host, port))
        self._connections: list[Connection] = []

    @property
    def address(self) -> str:
        """Returns host:port."""
        host, port = self._listener.getsockname()[:2]
        return f"{host}:{port}"

    def wait(self, world_size: int) -> None:
        """Waits until so many ranks have connected. TimeoutError if they do not come; a peer that does not know the key
        is refused, and the wait goes on."""
        ranks, until = 0, time.monotonic() + self._seconds
        while ranks < world_size:
            self._listener.settimeout(max(until - time.monotonic(), 0.001))
            connection, _ = self._listener.accept()
            try:
                configure_socket(connection, self._seconds)
                peer = authenticate_client(connection, self._key, PROTOCOL, until)
                frame = peer.receive(until)
                count = len(msgspec.msgpack.decode(frame.payload, type=list[int])) if frame.kind == RANKS else 0
            except (AuthenticationFailed, ConnectionClosed, msgspec.MsgspecError):
                connection.close()
                continue
            self._connections.append(peer)
            ranks += count

    def send(self, tensors: Tensors) -> None:
        """Sends one transfer, by the names of the checkpoint's files. ConnectionError if an engine is gone."""
        for name, tensor in tensors.items() if isinstance(tensors, Mapping) else tensors:
            header = msgspec.msgpack.encode((name, name_of_dtype(tensor.dtype), list(tensor.shape)))
            self._send_all(TENSOR, header)
            data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
            for start in range(0, len(data), CHUNK_BYTES):
                self._send_all(DATA, bytes(data[start : start + CHUNK_BYTES]))
        self._send_all(END, b"")

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        self._listener.close()

    def _send_all(self, kind: int, payload: bytes) -> None:
        for connection in self._connections:
            connection.send(kind, payload, time.monotonic() + self._seconds)
