"""What is fetched over HTTP, from hosts of the test's own: by what names, from which addresses, how much, how long."""

import contextlib
import itertools
import socket
import ssl
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import trustme

from quintet.media.errors import MediaError
from quintet.media.fetch.http import MAX_REDIRECTS, FetchRules, fetch
from tests.helpers.media_files import http_host, response

LOOPBACK = "127.0.0.1"
NAMES = ("images.example", "other.example")


@dataclass
class Resolver:
    """Answers with addresses of the test, and notes what it was asked."""

    answers: Sequence[Sequence[str]] = ((LOOPBACK,),)
    asked: list[str] = field(default_factory=list)

    def __call__(self, host: str, port: int, timeout: float) -> Sequence[str]:
        assert timeout > 0
        self.asked.append(host)
        return self.answers[min(len(self.asked), len(self.answers)) - 1]


def rules(resolver: Resolver | None = None, **more: Any) -> FetchRules:
    """Rules under which loopback is as good as the internet."""
    more = {"is_allowed": lambda address: address == LOOPBACK, **more}
    return FetchRules(NAMES, resolve=resolver or Resolver(), **more)


def refused(url: str, given: FetchRules, most: int = 1000) -> str:
    with pytest.raises(MediaError) as error:
        fetch(url, given, most, 20.0)
    return str(error.value)


def test_the_body_comes_from_the_address_that_was_checked_with_the_urls_name() -> None:
    resolver = Resolver()
    with http_host(lambda head: [response(b"a picture")]) as host:
        url = f"http://Images.Example.:{host.port}/a b%20c/é?x=1&y=ü#part".replace(" ", "%20")
        assert fetch(url, rules(resolver), 1000, 20.0) == b"a picture"
    [head] = host.requests
    assert resolver.asked == ["images.example"]
    assert head.startswith(b"GET /a%20b%20c/%C3%A9?x=1&y=%C3%BC HTTP/1.1\r\n")
    assert f"Host: images.example:{host.port}".encode() in head and b"Accept-Encoding: identity" in head
    assert b"ookie" not in head and b"uthorization" not in head


def test_chunked_bodies_and_bodies_without_a_length_are_read() -> None:
    answers = [
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n",
        b"HTTP/1.0 200 OK\r\n\r\nabcde",
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nabcde",
    ]
    for answer in answers:
        with http_host(lambda head, answer=answer: [answer[:20], answer[20:]]) as host:  # type: ignore[misc]
            assert fetch(f"http://images.example:{host.port}/", rules(), 5, 20.0) == b"abcde"


@pytest.mark.parametrize(
    "url",
    [
        "http://images.example.evil/x", "http://evil/images.example", "http://images.example@evil/",
        "http://evil@images.example/", "http://user:word@images.example/", "http://images.example\\@evil/",
        "http://evil\\images.example/", "http://images.example /", "http://images.example\t/", "http://images.example\n/",
        "http:///x", "http://", "http:images.example", "https://:80/", "ftp://images.example/", "//images.example/",
        "http://images.example:0/", "http://images.example:99999/", "http://images.example:x/", "http://[::1]/",
        "http://[images.example]/", "http://127.0.0.1/", "http://2130706433/", "http://0x7f.1/", "http://localhost/",
        "http://images%2eexample/", "http://ⅰmages.example.evil/", "http://xn--/", "http://" + "a" * 9000,
        "http://images.example/\0", "http://images.example/\r\nHost: evil", "http://*.example/", "http://images.example..",
    ],
)  # fmt: skip
def test_a_url_of_another_form_or_host_is_refused_before_anything_is_resolved(url: str) -> None:
    resolver = Resolver()
    assert refused(url, rules(resolver))
    assert resolver.asked == []


def test_no_host_is_allowed_by_default() -> None:
    assert "none is allowed" in refused("https://example.com/x.png", FetchRules())


@pytest.mark.parametrize(
    "addresses",
    [["10.0.0.1"], ["127.0.0.1"], ["8.8.8.8", "10.0.0.1"], ["8.8.8.8", "::1"], ["::ffff:8.8.8.8"], [], ["x"]],
)
def test_a_host_with_any_address_that_is_not_public_is_not_dialled(
    addresses: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def dial(*args: Any) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket, "create_connection", dial)
    given = FetchRules(NAMES, resolve=Resolver([addresses]))
    message = refused("http://images.example/", given)
    assert "address" in message and "8.8.8.8" not in message and "10.0" not in message


def test_a_name_is_resolved_once_for_each_connection_and_the_checked_address_is_dialled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A second answer of the resolver, to a private address, is never asked for."""
    dialled: list[Any] = []

    def dial(address: Any, timeout: float) -> Any:
        dialled.append(address)
        raise ConnectionRefusedError("the test's end")

    monkeypatch.setattr(socket, "create_connection", dial)
    resolver = Resolver([["8.8.8.8"], [LOOPBACK]])
    assert "cannot be fetched from" in refused("http://images.example/", FetchRules(NAMES, resolve=resolver))
    assert dialled == [("8.8.8.8", 80)] and resolver.asked == ["images.example"]


def test_redirects_are_followed_by_the_same_rules() -> None:
    with http_host(lambda head: [response(b"here")]) as last:

        def first(head: bytes) -> list[bytes]:
            return [response(b"", "302 Found", Location=f"http://other.example:{last.port}/b")]

        with http_host(first) as host:
            resolver = Resolver()
            assert fetch(f"http://images.example:{host.port}/a", rules(resolver), 1000, 20.0) == b"here"
    assert resolver.asked == ["images.example", "other.example"]


@pytest.mark.parametrize(
    "location",
    ["http://evil.example/", "http://127.0.0.1/", "file:///etc/passwd", "data:image/png;base64,AAAA",
     "ftp://images.example/",
     "gopher://images.example/", "http://images.example@127.0.0.1/", "//evil.example/x", "http://[::1]/",
     "\\\\evil\\x"],
)  # fmt: skip
def test_a_redirect_to_what_is_not_allowed_is_refused(location: str) -> None:
    resolver = Resolver()
    with http_host(lambda head: [response(b"", "302 Found", Location=location)]) as host:
        assert refused(f"http://images.example:{host.port}/", rules(resolver))
    assert resolver.asked == ["images.example"] and len(host.requests) == 1


def test_a_redirect_to_an_allowed_name_with_a_private_address_is_refused() -> None:
    resolver = Resolver([[LOOPBACK], ["10.0.0.1"]])
    with http_host(lambda head: [response(b"", "307 T", Location="http://other.example/")]) as host:
        message = refused(f"http://images.example:{host.port}/", rules(resolver))
    assert "not on the public internet" in message and resolver.asked == ["images.example", "other.example"]


def test_redirects_are_bounded() -> None:
    with http_host(lambda head: [response(b"", "301 Moved", Location="/again")]) as host:
        assert f"more than {MAX_REDIRECTS} times" in refused(f"http://images.example:{host.port}/", rules())
    assert len(host.requests) == MAX_REDIRECTS + 1


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (response(b"x" * 1001), "more than 1000 bytes"),
        (response(b"", Content_Length="99999999999999999999"), "more than 1000 bytes"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"3e9\r\n" + b"x" * 1001 + b"\r\n0\r\n\r\n",
         "more than 1000 bytes"),
        (b"HTTP/1.0 200 OK\r\n\r\n" + b"x" * 5000, "more than 1000 bytes"),
        (response(b"abc", Content_Length="10"), "3 of 10 bytes"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab", "cannot be fetched"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "cannot be fetched"),
        (response(b"x", Content_Encoding="gzip"), "compresses it"),
        (response(b"x", "404 Not Found"), "status 404"), (response(b"x", "500 Oops"), "status 500"),
        (response(b"", "204 No Content"), "status 204"), (response(b"", "302 Found"), "status 302"),
        (response(b"x", "206 Partial Content"), "status 206"),
        (b"", "cannot be fetched"), (b"SSH-2.0-OpenSSH\r\n", "cannot be fetched"), (b"\0" * 100, "cannot be fetched"),
        (b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 200 + b"\r\n", "cannot be fetched"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"y" * 100_000 + b"\r\n\r\n", "cannot be fetched"),
    ],
)  # fmt: skip
def test_an_answer_that_is_too_large_damaged_or_none_is_an_error_of_one_line(answer: bytes, says: str) -> None:
    with http_host(lambda head: [answer]) as host:
        message = refused(f"http://images.example:{host.port}/", rules())
    assert says in message and "\n" not in message and len(message) < 400


def test_a_host_that_sends_a_little_at_a_time_is_left_at_the_deadline() -> None:
    """The clock is the test's: each look at it takes a second, and the host would send for ever."""
    seconds = itertools.count()

    def answer(head: bytes) -> Iterator[bytes]:
        yield b"HTTP/1.1 200 OK\r\n\r\n"
        while True:
            yield b"x"

    with http_host(answer) as host:  # type: ignore[arg-type]
        given = rules(clock=lambda: float(next(seconds)))
        with pytest.raises(MediaError, match="took longer than 20 s"):
            fetch(f"http://images.example:{host.port}/", given, 10**9, 20.0)


def test_tls_is_for_the_urls_name(tmp_path: Any) -> None:
    authority = trustme.CA()
    for name, works in ((NAMES[0], True), ("third.example", False)):
        server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        authority.issue_cert(name).configure_cert(server)
        with _tls_host(server) as port:
            client = ssl.create_default_context()
            authority.configure_trust(client)
            given = rules(tls=lambda client=client: client)
            if works:
                assert fetch(f"https://images.example:{port}/", given, 1000, 20.0) == b"secret"
            else:
                assert "SSLCertVerificationError" in refused(f"https://images.example:{port}/", given)


def test_a_redirect_from_https_to_http_is_refused() -> None:
    authority = trustme.CA()
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(NAMES[0]).configure_cert(server)
    client = ssl.create_default_context()
    authority.configure_trust(client)
    with _tls_host(server, response(b"", "302 Found", Location="http://images.example/")) as port:
        assert "redirects from https" in refused(f"https://images.example:{port}/", rules(tls=lambda: client))


@contextlib.contextmanager
def _tls_host(context: ssl.SSLContext, answer: bytes = response(b"secret")) -> Iterator[int]:
    """Answers one connection."""
    with socket.socket() as listener:
        listener.bind((LOOPBACK, 0))
        listener.listen(1)

        def serve() -> None:
            plain, _ = listener.accept()
            with plain, contextlib.suppress(OSError), context.wrap_socket(plain, server_side=True) as wire:
                wire.recv(4096)
                wire.sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        thread.join(10)
