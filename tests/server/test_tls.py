"""Certificates of clients, and files that change while a server runs."""

import asyncio
import logging
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import trustme

from quintet.server.config import ServerConfig
from quintet.server.tls import Certificates
from tests.helpers.servers.serving import NULL, PATIENCE, Server, until


class Files:
    """A server's certificate and key, and the authorities of its clients, in one folder."""

    def __init__(self, folder: Path) -> None:
        self.cert, self.key, self.clients = (str(folder / f"{name}.pem") for name in ("cert", "key", "clients"))
        self.issue()

    def issue(self) -> trustme.CA:
        """A new certificate of a new authority in their place."""
        authority = trustme.CA()
        issued = authority.issue_cert("localhost", "127.0.0.1")
        issued.private_key_pem.write_to_path(self.key)
        issued.cert_chain_pems[0].write_to_path(self.cert)
        self.authority = authority
        return authority

    def admit(self, authority: trustme.CA) -> None:
        """Its clients, and no others."""
        authority.cert_pem.write_to_path(self.clients)

    def settings(self, **more: Any) -> dict[str, Any]:
        return {"ssl_certfile": self.cert, "ssl_keyfile": self.key, "enable_ssl_refresh": True, **more}


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


def client_of(server: trustme.CA, own: trustme.CA | None = None) -> ssl.SSLContext:
    """A client that trusts the one, and has a certificate of the other."""
    context = ssl.create_default_context()
    server.configure_trust(context)
    if own is not None:
        own.issue_cert("client@example.org").configure_cert(context)
    return context


@asynccontextmanager
async def listening(certificates: Certificates) -> AsyncIterator[int]:
    """The port of a server that says hello."""

    async def hello(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello")
        writer.close()

    server = await asyncio.start_server(hello, "127.0.0.1", 0, ssl=certificates.context)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def greets(port: int, context: ssl.SSLContext, name: str = "localhost") -> bool:
    """Whether the two believe each other."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname=name)
    except ssl.SSLError:
        return False
    try:
        return await reader.read() == b"hello"
    except (ssl.SSLError, ConnectionError):  # TLS 1.3 hears of it after its handshake
        return False
    finally:
        writer.close()


async def test_a_new_certificate_is_used_once_its_files_rest(files: Files) -> None:
    old, certificates = files.authority, Certificates(ServerConfig(**files.settings()))
    async with listening(certificates) as port:
        assert await greets(port, client_of(old)) and not certificates.reload_if_changed()
        new = files.issue()
        assert not certificates.reload_if_changed(), "they are perhaps written to still"
        assert await greets(port, client_of(old))
        assert certificates.reload_if_changed() and not certificates.reload_if_changed()
        for name in ("localhost", "127.0.0.1"):  # with a name in the client's hello, and without
            assert await greets(port, client_of(new), name) and not await greets(port, client_of(old), name)


async def test_files_that_cannot_be_used_change_nothing_and_are_said_once(
    files: Files, caplog: pytest.LogCaptureFixture
) -> None:
    certificates = Certificates(ServerConfig(**files.settings()))
    async with listening(certificates) as port:
        Path(files.key).write_text("half of a k")
        looks = [certificates.reload_if_changed() for _ in range(5)]
        assert not any(looks) and await greets(port, client_of(files.authority))
        (line,) = [each for each in caplog.records if each.levelno >= logging.ERROR]
        assert "cannot be used" in line.getMessage() and "those from before stay in use" in line.getMessage()
        Path(files.key).unlink()
        assert not any(certificates.reload_if_changed() for _ in range(3))
        new = files.issue()
        assert [certificates.reload_if_changed() for _ in range(2)] == [False, True]
        assert await greets(port, client_of(new))


@pytest.mark.parametrize("asks", [1, 2])
async def test_clients_show_certificates_of_the_authorities_that_are_there_now(files: Files, asks: int) -> None:
    ours, others = trustme.CA(), trustme.CA()
    files.admit(ours)
    certificates = Certificates(ServerConfig(**files.settings(ssl_ca_certs=files.clients, ssl_cert_reqs=asks)))
    async with listening(certificates) as port:
        admitted = client_of(files.authority, ours)
        assert await greets(port, admitted)
        assert not await greets(port, client_of(files.authority, others))
        assert await greets(port, client_of(files.authority)) == (asks == 1)
        files.admit(others)
        certificates.reload_if_changed()
        assert certificates.reload_if_changed()
        assert await greets(port, client_of(files.authority, others))
        assert not await greets(port, admitted), "an authority that is gone admits nobody"


def _says(port: int, context: ssl.SSLContext, session: ssl.SSLSession | None) -> tuple[bytes, ssl.SSLSession | None]:
    """What the server says to a client that takes up its session, if it has one; nothing where it is refused."""
    with socket.create_connection(("127.0.0.1", port)) as raw:
        try:
            with context.wrap_socket(raw, server_hostname="localhost", session=session) as made:
                return made.recv(10), made.session
        except OSError:
            return b"", None


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_a_session_from_before_admits_nobody(files: Files, version: ssl.TLSVersion) -> None:
    ours = trustme.CA()
    files.admit(ours)
    certificates = Certificates(ServerConfig(**files.settings(ssl_ca_certs=files.clients, ssl_cert_reqs=2)))
    context = client_of(files.authority, ours)
    context.maximum_version = version
    async with listening(certificates) as port:
        said, session = await asyncio.to_thread(_says, port, context, None)
        assert said == (b"hello" if version == ssl.TLSVersion.TLSv1_3 else b"")
        files.admit(trustme.CA())
        certificates.reload_if_changed()
        assert certificates.reload_if_changed()
        assert (await asyncio.to_thread(_says, port, context, session))[0] == b""


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"ssl_ca_certs": "x"}, "belong together.* give both or neither"),
        ({"ssl_cert_reqs": "2"}, "belong together"),
        ({"ssl_certfile": None, "ssl_keyfile": None, "ssl_ciphers": "AES"}, "ssl_ciphers"),
        ({"ssl_cert_reqs": 3}, "ssl_cert_reqs must be one of 0, 1, 2"),
        ({"ssl_certfile": None, "ssl_keyfile": None}, "are about TLS; give ssl_certfile"),
    ],
)
def test_what_makes_no_sense_is_refused(files: Files, changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        ServerConfig(**files.settings(**changes))


def test_ciphers_are_those_that_are_named(files: Files) -> None:
    one = Certificates(ServerConfig(**files.settings(ssl_ciphers="ECDHE-RSA-AES128-GCM-SHA256"))).context
    named = {each["name"] for each in one.get_ciphers() if each["protocol"] != "TLSv1.3"}
    assert named == {"ECDHE-RSA-AES128-GCM-SHA256"}
    with pytest.raises(ValueError, match="names no cipher that OpenSSL has"):
        Certificates(ServerConfig(**files.settings(ssl_ciphers="nothing")))


def test_authorities_that_cannot_be_read_are_said(files: Files) -> None:
    with pytest.raises(ValueError, match="the authorities in '.*clients.pem' cannot be used: "):
        Certificates(ServerConfig(**files.settings(ssl_ca_certs=files.clients, ssl_cert_reqs=2)))


def _found(url: str, context: ssl.SSLContext) -> bool:
    try:
        return httpx.get(url + "/health", verify=context, timeout=PATIENCE).status_code == 200
    except httpx.HTTPError:
        return False


@pytest.mark.slow
def test_every_process_of_a_server_takes_new_files(files: Files) -> None:
    ours = trustme.CA()
    files.admit(ours)
    flags = ["--ssl-certfile", files.cert, "--ssl-keyfile", files.key, "--enable-ssl-refresh"]
    flags += ["--ssl-ca-certs", files.clients, "--ssl-cert-reqs", "2", "--api-workers", "2"]
    with Server(*NULL, *flags) as server:
        old = client_of(files.authority, ours)
        assert _found(server.url, old) and not _found(server.url, client_of(files.authority))
        assert until(lambda: len(server.api_processes()) == 2)
        first, _ = server.api_processes()
        first.suspend()
        try:
            assert until(lambda: first.status() == psutil.STATUS_STOPPED)
            assert _found(server.url, old)  # so the second has read these files
        finally:
            first.resume()
        new = client_of(files.issue(), ours)
        assert until(lambda: server.output.count("are used as they are now") == 2)
        assert all(_found(server.url, new) for _ in range(8)) and not _found(server.url, old)
        assert server.stop() == 0
