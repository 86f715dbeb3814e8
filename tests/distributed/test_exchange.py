"""Notes between ranks: all get all of them, or hear who is lost."""

import socket
import threading
from collections.abc import Sequence

import pytest

from quintet.distributed.exchange import MAX_MESSAGE, MessageExchange, RankLost


def pair(seconds: float = 30) -> tuple[MessageExchange, socket.socket]:
    """Rank 0 of 2, and the other's end."""
    ours, theirs = socket.socketpair()
    return MessageExchange([-1, ours.detach()], 0, seconds), theirs


def both() -> tuple[MessageExchange, MessageExchange]:
    one, other = socket.socketpair()
    return MessageExchange([-1, one.detach()], 0, 30), MessageExchange([other.detach(), -1], 1, 30)


def test_all_have_all_notes_in_rank_order() -> None:
    first, second = both()
    heard: list[Sequence[bytes]] = []
    thread = threading.Thread(target=lambda: heard.extend([second.exchange(b"b"), second.exchange(b"")]))
    thread.start()
    assert [first.exchange(b"a"), first.exchange(b"x" * 1000)] == [[b"a", b"b"], [b"x" * 1000, b""]]
    thread.join(30)
    assert heard == [[b"a", b"b"], [b"x" * 1000, b""]]


def test_one_that_has_gone_is_named() -> None:
    notes, other = pair()
    other.close()
    with pytest.raises(RankLost, match="rank 1 of 2 is lost: (its connection was closed|Broken pipe)"):
        notes.exchange(b"a")
    notes.wait_until_gone(30)


def test_one_that_is_silent_is_named() -> None:
    notes, other = pair(0.2)
    with pytest.raises(RankLost, match=r"rank 1 of 2 did not come within 0.2 s"):
        notes.exchange(b"a")
    other.close()


def test_a_note_that_is_too_long_is_not_taken() -> None:
    notes, other = pair()
    other.sendall((MAX_MESSAGE + 1).to_bytes(2, "big"))
    with pytest.raises(RankLost, match="a note of 2049 bytes, where 2048 at most are taken"):
        notes.exchange(b"a")
    other.close()


def test_who_waits_is_told_to_stop_and_the_first_reason_holds() -> None:
    notes, other = pair()
    timer = threading.Timer(0.1, lambda: notes.stop("the first"))
    timer.start()
    with pytest.raises(RankLost, match="the first"):
        notes.exchange(b"a")
    notes.stop("another")
    assert notes.stopped() == "the first"
    other.close()
