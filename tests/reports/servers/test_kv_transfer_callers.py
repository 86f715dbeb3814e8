"""kv_transfer_params in other fields are refused, and a silent host delays no other caller (attack A5)."""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from quintet.engine.kv_transfer.p2p import consumer
from quintet.engine.kv_transfer.p2p.allowed_peers import AllowedPeers
from quintet.engine.kv_transfer.p2p.consumer import PageClient, PageOrigin, PeerLoad, Route
from quintet.engine.kv_transfer.p2p.producer import PageServer
from quintet.engine.kv_transfer.p2p.send_buffer import SendBuffer
from quintet.engine.kv_transfer.p2p.sockets import connect
from quintet.engine.kv_transfer_params import LeasePeer
from tests.engine.kv_transfer.test_manager import WORDS
from tests.engine.kv_transfer.test_transfers import FACTS, KEY
from tests.router.fakes import Fake, routed
from tests.server.http.serving import chat, client

PAGES = {"do_remote_prefill": True, "remote_host": "10.9.9.9", "remote_port": 9, "remote_request_id": "x"}
PATIENCE = 1.5  # seconds that a silent host holds a thread
WITHIN = 1.0


@pytest.mark.parametrize("more", [{}, {"n": 2}], ids=["n=1", "n=2"])
@pytest.mark.parametrize("field", ["extra_args", "vllm_xargs"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_they_are_refused_inside_other_fields(path: str, field: str, more: dict[str, Any]) -> None:
    for pages in (PAGES, {}, None):
        body = {**chat(), "prompt": "Hi", "model": "m", field: {"kv_transfer_params": pages, "mine": 1}, **more}
        async with client() as http:
            answer = await http.post(path, json={**body, "model": None})
        assert answer.status_code == 400 and "kv_transfer_params" in answer.json()["error"]["message"]
        assert answer.json()["error"]["param"] == field
        prefill, decode = Fake("p"), Fake("d")
        async with routed(prefill, decode, prefill=[prefill], decode=[decode]) as router:
            for text in (json.dumps(body), json.dumps(body).replace("kv_", "kv\\u005f")):
                answer = await router.post(path, json=None, content=text)
                assert answer.status_code == 400 and answer.json()["error"]["param"] == field
        assert prefill.calls == decode.calls == []


async def test_other_extra_args_go_through() -> None:
    prefill, decode = Fake("p"), Fake("d")
    async with routed(prefill, decode, prefill=[prefill], decode=[decode]) as router:
        for extra in ({"mine": 1}, None, {"of": {"kv_transfer_params": 1}}):
            assert (await router.post(json={**chat(), "model": "m", "n": 2, "extra_args": extra})).status_code == 200


@contextlib.contextmanager
def hosts(silent: int) -> Iterator[tuple[list[int], int, PageClient]]:
    """Ports that take connections and send nothing, one of a producer, and a consumer."""
    with contextlib.ExitStack() as stack:
        quiet = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(silent)]
        good = socket.create_server(("127.0.0.1", 0))
        server = PageServer(SendBuffer(2**20, WORDS, 60.0), lambda: FACTS, KEY, 5.0)
        server.listen(good)
        stack.callback(server.close)
        allowed = AllowedPeers(["127.0.0.0/8"])
        reach: Callable[[Any], Any] = lambda peer: connect(peer, PATIENCE, 4 * WORDS, True, allowed)  # noqa: E731
        taker = PageClient(Route(reach, lambda: FACTS, KEY, WORDS), threading.Event())
        stack.callback(taker.close)
        yield [each.getsockname()[1] for each in quiet], good.getsockname()[1], taker


def load(taker: PageClient, port: int, **caller: bytes) -> PeerLoad:
    return taker.load([PageOrigin(LeasePeer("127.0.0.1", port, "lease"))], [b"k" * 33], False, **caller)


def seconds(waiting: PeerLoad) -> float:
    """Until it has an answer: that the lease is unknown."""
    start = time.monotonic()
    while not waiting._failed and time.monotonic() - start < 20:
        time.sleep(0.01)
    assert "did not answer" not in str(waiting._failed) and "does not answer" not in str(waiting._failed)
    return time.monotonic() - start


def test_loads_of_one_silent_host_hold_up_no_other_host() -> None:
    with hosts(1) as ([quiet], good, taker):
        attack = [load(taker, quiet, caller=b"a") for _ in range(40)]
        assert seconds(load(taker, good, caller=b"b")) < WITHIN
        start = time.monotonic()
        while not all(each._failed for each in attack) and time.monotonic() - start < 20:
            time.sleep(0.01)
        assert time.monotonic() - start < 3 * PATIENCE, "a host that was silent is not asked again at once"


def test_many_silent_hosts_hold_up_no_other_caller_and_no_host_that_is_known() -> None:
    with hosts(12) as (quiet, good, taker):
        seconds(load(taker, good, caller=b"a"))
        other = socket.create_server(("127.0.0.1", 0))
        server = PageServer(SendBuffer(2**20, WORDS, 60.0), lambda: FACTS, KEY, 5.0)
        server.listen(other)
        for port in quiet * 3:
            load(taker, port, caller=b"a")
        assert seconds(load(taker, good, caller=b"a")) < WITHIN, "known from before"
        assert seconds(load(taker, other.getsockname()[1], caller=b"b")) < WITHIN, "new, but another caller's"
        server.close()


def test_a_load_that_the_engine_leaves_waiting_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks may run loads in different orders, so no load may hold its thread for ever."""
    monkeypatch.setattr(consumer, "MAX_PAUSE", 0.1)
    waiting = PeerLoad([PageOrigin(LeasePeer("h", 1, "x"))], [b"k"], False, WORDS, threading.Event())
    with pytest.raises(consumer.ProtocolError, match="no pages were taken"):
        waiting.wait_for_room(0)
