"""A process that gives pages or takes them, to be killed while they flow.

`python -m tests.helpers.servers.page_peer ...`. It imports no torch, and starts in a moment. Both halves are the
package's own; what a taker got it never uses."""

import os
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path

import msgspec
import numpy as np

from quintet.config import KVTransferConfig
from quintet.engine.kv_transfer.connector import PageRows
from quintet.engine.kv_transfer.p2p import remote_memory as memory
from quintet.engine.kv_transfer.p2p.consumer import PageClient, PageOrigin, PeerLoad, Route
from quintet.engine.kv_transfer.p2p.producer import PageServer
from quintet.engine.kv_transfer.p2p.protocol import PageFormat, PeerChannel
from quintet.engine.kv_transfer.p2p.send_buffer import SendBuffer
from quintet.engine.kv_transfer.p2p.transports import Transport, transport_of
from quintet.engine.kv_transfer_params import LeasePeer
from quintet_tools.checkpoints.tiny import folder_of_all

FACTS = PageFormat("a checkpoint", "float32", 4, ((1, 2, 3),))
KEY = b"a key that all engines share"
PATIENCE = 20.0  # seconds; nothing here waits so long
CONNECTORS = {"tcp": "TCPConnector", "shared memory": "SharedMemoryConnector", "nixl": "NixlConnector"}


class Lot(msgspec.Struct):
    """What a process is told of pages."""

    loan: str
    keys: list[bytes]
    words: int
    rows: bytes = b""


def means(kind: str) -> Transport:
    return transport_of(KVTransferConfig(kv_connector=CONNECTORS[kind], kv_role="kv_both"), True)


def listening(kind: str) -> socket.socket:
    """At a place of its own."""
    if kind != "shared memory":
        return socket.create_server(("127.0.0.1", 0))
    found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    found.bind(str(Path(tempfile.mkdtemp(dir=folder_of_all().name)) / "pages"))
    found.listen()
    return found


def place(of: socket.socket) -> str:
    name = of.getsockname()
    return str(name if isinstance(name, str) else name[1])


def connect(where: str, words: int) -> PeerChannel:
    found = socket.socket(socket.AF_INET if where.isdigit() else socket.AF_UNIX, socket.SOCK_STREAM)
    found.settimeout(PATIENCE)
    found.connect(("127.0.0.1", int(where)) if where.isdigit() else where)
    return PeerChannel(found, PATIENCE, 4 * words)


def lent(kind: str, lots: list[Lot]) -> tuple[PageServer, SendBuffer, Transport]:
    """A giver of these, that does not listen yet."""
    words, found = lots[0].words, means(kind)
    loans = SendBuffer(4 * words * sum(len(lot.keys) for lot in lots), words, 3600.0, kind == "shared memory")
    for lot in lots:
        assert loans.reserve(lot.loan, lot.keys)
        rows: PageRows = np.frombuffer(lot.rows, np.int32).reshape(-1, words)
        loans.fill(lot.loan, lot.keys, rows)
    giver = PageServer(loans, lambda: FACTS, KEY, PATIENCE)
    giver.transport, giver.share_memory = found.name, found.share_memory(loans)
    return giver, loans, found


def taking(kind: str, where: str, words: int) -> PageClient:
    found = means(kind)
    opening = found.open_region(PATIENCE)
    return PageClient(
        Route(lambda _: connect(where, words), lambda: FACTS, KEY, words, opening, found.name), threading.Event()
    )


def _give(kind: str, lots: list[Lot]) -> None:
    giver, _, _ = lent(kind, lots)
    at = listening(kind)
    giver.listen(at)
    print("here", place(at), flush=True)


def _take(kind: str, lots: list[Lot], where: str) -> None:
    """Stops for good when a page has come, or as soon as the first is being read where it lies."""

    def stop(*_: object) -> None:
        print("here", flush=True)
        time.sleep(3600)

    PeerLoad.add_page = stop  # type: ignore[assignment]
    taker = taking(kind, where, lots[0].words)
    if taker._route.open_region is not None:
        opening = taker._route.open_region

        def opened(channel: PeerChannel, words: int) -> memory.RemoteRegion:
            far = opening(channel, words)
            far.read = stop  # type: ignore[assignment]
            return far

        taker._route = taker._route._replace(open_region=opened)
    taker.load([PageOrigin(LeasePeer("here", 1, lots[0].loan))], lots[0].keys, True)


def main() -> None:
    what, kind, file, *where = sys.argv[1:]
    lots = msgspec.msgpack.decode(Path(file).read_bytes(), type=list[Lot])
    _give(kind, lots) if what == "give" else _take(kind, lots, *where)
    sys.stdin.read()  # until who started it ends
    os._exit(0)


if __name__ == "__main__":
    main()
