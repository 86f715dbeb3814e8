"""TLS certificate of a server, client certificates, and reloading of their files while the server runs."""

import asyncio
import logging
import os
import ssl
from typing import NamedTuple

from quintet.server.config import ServerConfig

logger = logging.getLogger(__name__)

POLL_SECONDS = 1.0  # seconds between two looks at the files


class _FileState(NamedTuple):
    """State of one file: it differs after the file was renamed, written to or removed."""

    inode: int
    size: int
    changed: int  # ns


def make_context(settings: ServerConfig) -> ssl.SSLContext:
    """As the files are now. ValueError says which cannot be used."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    assert settings.ssl_certfile is not None
    try:
        context.load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile)
    except (OSError, ssl.SSLError) as error:
        files = f"{settings.ssl_certfile!r} and {settings.ssl_keyfile!r}"
        raise ValueError(f"the certificate and key in {files} cannot be used: {error}") from None
    if settings.ssl_ciphers is not None:
        try:
            context.set_ciphers(settings.ssl_ciphers)
        except ssl.SSLError:
            raise ValueError(
                f"ssl_ciphers={settings.ssl_ciphers!r} names no cipher that OpenSSL has; `openssl ciphers` lists them"
            ) from None
    context.verify_mode = ssl.VerifyMode(settings.ssl_cert_reqs)
    if settings.ssl_ca_certs is not None:
        try:
            context.load_verify_locations(settings.ssl_ca_certs)
        except (OSError, ssl.SSLError) as error:
            raise ValueError(f"the authorities in {settings.ssl_ca_certs!r} cannot be used: {error}") from None
    return context


class Certificates:
    """The context that a server listens with. Each handshake is done with the newest files that can be used."""

    def __init__(self, settings: ServerConfig) -> None:
        """ValueError if those that are there cannot be used."""
        self._settings = settings
        names = (settings.ssl_certfile, settings.ssl_keyfile, settings.ssl_ca_certs)
        self._files = [name for name in names if name is not None]
        self._used = self._seen = self._states()
        self.context = self._newest = make_context(settings)
        if settings.enable_ssl_refresh:
            self.context.sni_callback = self._use_newest
            if settings.ssl_cert_reqs:  # a session that is taken up again is not asked for its certificate again
                self.context.num_tickets = 0
                self.context.minimum_version = ssl.TLSVersion.TLSv1_3  # 1.2 needs no tickets for that

    async def watch(self) -> None:
        """Looks at the files, for ever."""
        while True:
            await asyncio.sleep(POLL_SECONDS)
            await asyncio.to_thread(self.reload_if_changed)

    def reload_if_changed(self) -> bool:
        """Returns whether new files came into use: they have changed, and stayed the same since the last look.

        Certificate and key are written one after the other. Files that cannot be used are logged once.
        """
        states, seen = self._states(), self._seen
        self._seen = states
        if states == self._used or states != seen:
            return False
        self._used = states
        try:
            self._newest = make_context(self._settings)
        except ValueError as error:
            logger.error("%s; those from before stay in use", error)
            return False
        logger.info("TLS: %s are used as they are now", ", ".join(self._files))
        return True

    def _use_newest(self, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        """Called in each handshake, for any server name; authorities come with the context, too."""
        connection.context = self._newest

    def _states(self) -> list[_FileState | None]:
        return [_state(name) for name in self._files]


def _state(name: str) -> _FileState | None:
    try:
        found = os.stat(name)  # through links: where secrets are mounted, a link is turned
    except OSError:
        return None
    return _FileState(found.st_ino, found.st_size, found.st_mtime_ns)
