"""Mooncake's transfer engine, which reads pages out of another engine's memory, over TCP or RDMA."""

import importlib
import re
import threading
from collections.abc import Sequence
from typing import Any

from quintet.common.distribution import install_hint
from quintet.engine.kv_transfer.connector import PageRows
from quintet.engine.kv_transfer.p2p.protocol import ProtocolError
from quintet.engine.kv_transfer.p2p.rdma import check_not_closed

ADDRESS = re.compile(r"[A-Za-z0-9._:\[\]-]{1,256}:[0-9]{1,5}")
_ERROR_PREFIX = "kv_transfer_config.kv_connector MooncakeConnector"


def library() -> Any:
    """Returns Mooncake's engine module; ValueError where it is not installed."""
    try:
        return importlib.import_module("mooncake.engine")
    except ImportError as error:
        raise ValueError(
            f"{_ERROR_PREFIX} needs Mooncake's transfer engine ({error}); {install_hint('mooncake')} (and "
            "libibverbs1 of the system), or use TCPConnector"
        ) from None


class MooncakeRead:
    """One transfer, for which a thread of its own waits: Mooncake gives it up by itself after a while."""

    def __init__(self, engine: Any, peer: str, addresses: Sequence[int], into: PageRows) -> None:
        step = into.strides[0]
        here = [into.ctypes.data + at * step for at in range(len(addresses))]
        self._args = (peer, here, list(addresses), [step] * len(addresses))
        self._engine, self._into, self._failed = engine, into, ""  # `into` must stay as long as the thread
        self._thread = threading.Thread(target=self._run, name="quintet-mooncake", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            if code := self._engine.batch_transfer_sync_read(*self._args):
                self._failed = f"code {code}"
        except Exception as error:
            self._failed = str(error) or type(error).__name__

    def done(self) -> bool:
        if self._thread.is_alive():
            return False
        if self._failed:
            raise ProtocolError(f"Mooncake could not read there ({self._failed})")
        return True

    def cancel(self) -> bool:
        return not self._thread.is_alive()


class MooncakeEngine:
    """One Mooncake transfer engine, of an engine that sends pages, receives them, or does both."""

    def __init__(self, host: str, protocol: str) -> None:
        """host: where others reach this engine. ValueError where there is no Mooncake, or it cannot begin."""
        self._engine: Any = library().TransferEngine()
        if code := self._engine.initialize(host, "P2PHANDSHAKE", protocol, ""):
            raise ValueError(
                f"{_ERROR_PREFIX}: its engine cannot begin at host={host!r} over {protocol} (code {code}); its log "
                "says why"
            )
        self._host, self._kept = host, list[PageRows]()

    def register_source(self, rows: PageRows) -> None:
        if code := self._open.register_memory(rows.ctypes.data, rows.nbytes):
            raise ValueError(f"{_ERROR_PREFIX}: {rows.nbytes} bytes of memory cannot be registered (code {code})")
        self._kept.append(rows)  # they must stay as long as Mooncake has them registered

    def register_buffer(self, rows: PageRows) -> None:
        try:
            self.register_source(rows)
        except ValueError as error:
            raise ProtocolError(str(error)) from None

    def metadata(self) -> bytes:
        return f"{self._host}:{self._open.get_rpc_port()}".encode()

    def connect(self, metadata: bytes) -> str:
        name = metadata.decode("ascii", "replace")
        if not ADDRESS.fullmatch(name):
            raise ProtocolError("it says no address of Mooncake's")
        return name

    def disconnect(self, peer: str) -> None:
        """Does nothing: Mooncake keeps its connections for later transfers."""

    def start_read(self, peer: str, addresses: Sequence[int], into: PageRows) -> MooncakeRead:
        return MooncakeRead(self._open, peer, addresses, into)

    @property
    def _open(self) -> Any:
        return check_not_closed(self._engine)

    def close(self) -> None:
        """Unregisters the memory, and drops the engine, which ends with its last user. Offered memory stays as long as
        this mover, which is longer."""
        engine, self._engine = self._open, None
        for rows in self._kept:
            engine.unregister_memory(rows.ctypes.data)
