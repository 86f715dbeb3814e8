"""Of whom pages may be asked."""

import socket
import threading
from typing import Any

import pytest

from quintet.config import EngineConfig
from quintet.engine.kv_transfer.p2p import allowed_peers as module
from quintet.engine.kv_transfer.p2p.allowed_peers import AllowedPeers
from quintet.engine.kv_transfer.p2p.protocol import ProtocolError
from quintet.engine.kv_transfer.p2p.sockets import connect
from quintet.engine.kv_transfer_params import LeasePeer


@pytest.mark.parametrize(
    ("entry", "yes", "no"),
    [
        ("10.0.0.5", [("10.0.0.5", 1), ("10.0.0.5", 9)], [("10.0.0.6", 1)]),
        ("10.0.0.5:14579", [("10.0.0.5", 14579)], [("10.0.0.5", 14580), ("10.0.0.6", 14579)]),
        ("10.0.1.0/24", [("10.0.1.7", 5)], [("10.0.2.7", 5)]),
        ("10.0.1.9/24", [("10.0.1.7", 5)], [("10.0.2.7", 5)]),
        ("fd00::2", [("fd00::2", 3)], [("fd00::3", 3)]),
        ("[fd00::2]:14579", [("fd00::2", 14579)], [("fd00::2", 3)]),
        ("fd00::/64", [("fd00::9", 3), ("fd00::9%eth0", 3)], [("fd01::9", 3)]),
        ("127.0.0.1", [("::ffff:127.0.0.1", 3)], [("::1", 3)]),
    ],
)
def test_addresses_ports_and_networks(entry: str, yes: list[tuple[str, int]], no: list[tuple[str, int]]) -> None:
    listed = AllowedPeers([entry])
    assert all(listed.allows(host, host, port) for host, port in yes)
    assert not any(listed.allows(host, host, port) for host, port in no)


def test_names_are_what_they_say_or_where_they_lead(monkeypatch: pytest.MonkeyPatch) -> None:
    places = {"first.pages": "10.0.0.5"}

    def asked(host: str, *_: Any, **more: Any) -> Any:
        if host not in places:
            raise socket.gaierror(-2, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (places[host], 0))]

    monkeypatch.setattr(module.socket, "getaddrinfo", asked)
    listed = AllowedPeers(["First.Pages:14579", "gone.pages"])
    assert listed.allows("first.pages", "10.0.0.9", 14579), "the name itself"
    assert listed.allows("10.0.0.5", "10.0.0.5", 14579), "where it leads"
    assert not listed.allows("10.0.0.5", "10.0.0.5", 1) and not listed.allows("other.pages", "10.0.0.6", 14579)


def test_nobody_else_is_connected_to() -> None:
    """A request may name what is not listed: nothing listens to what it says there, not even to a greeting."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        came = threading.Event()

        def accept() -> None:
            listening.accept()
            came.set()

        threading.Thread(target=accept, daemon=True).start()
        peer = LeasePeer("127.0.0.1", port, "loan")
        for entries in (["10.0.0.0/8"], [f"127.0.0.1:{port - 1}"]):
            with pytest.raises(ProtocolError, match="extra_config.peers does not name it; nothing was asked"):
                connect(peer, 5.0, 0, True, AllowedPeers(entries))
        assert not came.is_set()
        connect(peer, 5.0, 0, True, AllowedPeers([f"127.0.0.1:{port}"])).close()
        assert came.wait(30)


@pytest.mark.parametrize(
    "entry", ["", "a b", "10.0.0.5:", "10.0.0.5:0", "10.0.0.5:70000", "host:x", "10.0.0.0/33", "10.0.0.0/8:5", ":5", 7]
)
def test_what_is_no_peer_is_refused(entry: Any) -> None:
    asked = {"kv_connector": "TCPConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"peers": [entry]}}
    with pytest.raises(ValueError, match=r"peers has .*, which is no host, host:port or network"):
        EngineConfig.from_kwargs(kv_transfer_config=asked)


@pytest.mark.parametrize("listed", [[], "10.0.0.5", {"a": 1}])
def test_the_list_is_a_list(listed: Any) -> None:
    asked = {"kv_connector": "TCPConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"peers": listed}}
    with pytest.raises(ValueError, match="peers must be a list of hosts"):
        EngineConfig.from_kwargs(kv_transfer_config=asked)
