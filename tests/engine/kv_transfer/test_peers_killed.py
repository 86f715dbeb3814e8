"""Engines killed while pages flow: no other waits for ever, loses an answer, gives two, or keeps a page."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from quintet.engine.kv_transfer.p2p import remote_memory as memory
from quintet.engine.kv_transfer.p2p.consumer import PageOrigin, PeerLoad
from quintet.engine.kv_transfer.p2p.protocol import PeerChannel
from quintet.engine.kv_transfer_params import LeasePeer
from tests.engine.kv_transfer.test_manager import WORDS, beginnings
from tests.engine.kv_transfer.test_transfers import LENDS, Two, _told, _until, _with
from tests.engine.test_overlap import Ask, Served, plain
from tests.helpers.servers import page_peer
from tests.helpers.servers.page_peer import Lot

KINDS = [*page_peer.CONNECTORS]


@contextlib.contextmanager
def peer(folder: Path, what: str, kind: str, lots: list[Lot], *where: str) -> Iterator[tuple[Any, str]]:
    """A process of page_peer.py, and what it says when it is there."""
    file = folder / "lots"
    file.write_bytes(msgspec.msgpack.encode(lots))
    command = [sys.executable, "-m", "tests.helpers.servers.page_peer", what, kind, str(file), *where]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline().split()
            assert line[:1] == ["here"], "it did not begin"
            yield process, line[-1]
        finally:
            process.kill()


def needed(kind: str) -> None:
    if kind == "nixl":
        pytest.importorskip("nixl")


def lots_of(two: Two, told: dict[str, dict[str, Any]]) -> list[Lot]:
    """What the first engine lends, for another process to give."""
    found = []
    for said in told.values():
        name = said["remote_request_id"]
        places = two.loans._loans[name].rows
        rows = two.loans.rows[list(places.values())]
        found.append(Lot(name, list(places), WORDS, rows.tobytes()))
    return found


def killing(monkeypatch: pytest.MonkeyPatch, kind: str, kill: Callable[[], None], taker: Any) -> None:
    """The giver goes when a page has come, or when the next is being read where it lies."""
    monkeypatch.setattr(memory, "MAX_BYTES_AHEAD", 1)  # page by page
    bring, opening, came = PeerLoad.add_page, taker._route.open_region, threading.Event()

    def brought(load: PeerLoad, place: int, row: Any) -> None:
        bring(load, place, row)
        came.set()
        if opening is None:
            kill()

    def opened(channel: PeerChannel, words: int) -> memory.RemoteRegion:
        far: memory.RemoteRegion = opening(channel, words)
        read = far.read

        def reading(rows: Any) -> Any:
            if came.is_set():
                kill()
            return read(rows)

        far.read = reading  # type: ignore[method-assign]
        return far

    monkeypatch.setattr(PeerLoad, "add_page", brought)
    if opening is not None:
        taker._route = taker._route._replace(open_region=opened)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_giver_that_is_killed_costs_computation_or_its_requests(
    kind: str, fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed(kind)
    two, asks = Two(fails=fails), beginnings(4)
    begun = [Ask(ask.name, ask.prompt, plain(1, extra_args=LENDS)) for ask in asks]
    told = {name: said for ask in begun for name, said in _told(two.first, ask).items()}
    with peer(tmp_path, "give", kind, lots_of(two, told)) as (giver, where):
        taker = page_peer.taking(kind, where, WORDS)
        taker._changed = two.places.changed
        killing(monkeypatch, kind, giver.kill, taker)
        two.taking.consumer = taker
        got, wanted = two.second.run(*(_with(ask, told[ask.name]) for ask in asks)), Served(False).run(*asks)
    loaded, failed = two.counts.pages_loaded, two.counts.pages_failed
    assert failed > 0 and two.manager.held_pages == [] and taker.counts()["failed"] == failed
    assert loaded > 0 and loaded + failed == 4 * 9, "each page came once, or failed once"
    for name in wanted:
        assert (
            (got[name].reason == "error" and "could not be loaded" in (got[name].error or ""))
            if (fails and got[name] != wanted[name])
            else got[name] == wanted[name]
        )
    assert not fails or any(each.reason == "error" for each in got.values())
    assert two.second.run(*asks) == wanted, "it goes on"
    taker.close()
    two.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_taker_that_is_killed_leaves_the_pages_to_others(kind: str, tmp_path: Path) -> None:
    """Each way in the middle: pages of a megabyte that it does not read any more, or that it is reading."""
    needed(kind)
    words, count = 2**18, 16
    before = threading.active_count()
    rows = np.arange(count, dtype=np.int32)[:, None] * np.ones(words, np.int32)
    lot = Lot("loan", [bytes([at]) for at in range(count)], words, rows.tobytes())
    giver, loans, means = page_peer.lent(kind, [lot])
    at = page_peer.listening(kind)
    giver.listen(at)
    held = loans._loans["loan"]
    asked = [Lot("loan", lot.keys, words)]
    with peer(tmp_path, "take", kind, asked, page_peer.place(at)) as (process, _):
        assert held.readers == 1
        os.kill(process.pid, signal.SIGKILL)
        _until(lambda: held.readers == 0 and not giver._open)
    taker = page_peer.taking(kind, page_peer.place(at), words)
    load = taker.load([PageOrigin(LeasePeer("here", 1, "loan"))], lot.keys, True)
    came: dict[int, int] = {}
    while not load.done:
        arrived = load.take(5)
        assert not arrived.failed
        came.update((place, int(row.max())) for place, row in zip(arrived.indices, arrived.rows, strict=True))
    assert came == {place: place for place in range(count)}
    _until(lambda: loans.num_free == count)
    taker.close()
    giver.close()
    means.close()
    loans.close()
    _until(lambda: threading.active_count() <= before + 8)
